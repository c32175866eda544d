"""What attention looks at: pure functions of queries and keys, or of logits, on a sample of rows.

Queries and keys are those that are multiplied: after their norms and RoPE. Kernels that never write the logits down can so stay on,
and a sample of rows costs little.

Legend: B sequences, H query heads, K key heads, T queries, S keys, C channels of a head; b sequences and R rows of the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.geometry.sphere import widen
from gnomon.monitor.states import spread

ROWS = 256
"""Rows of the whole batch that are looked at in each block; each has all its heads and keys."""


@dataclass(frozen=True)
class AttentionSums:
    """Over a sample of rows, by head, fp32 or wider.

    Args:
        largest_H: the largest logit.
        sums_5H: rows, their entropies in nats; rows of the second half, the shares these pay to the first token and to themselves.
    """

    largest_H: Tensor
    sums_5H: Tensor


@dataclass(frozen=True)
class Rows:
    """Which rows are looked at: `sequence_b` of the batch, `query_R` of each."""

    sequence_b: Tensor
    query_R: Tensor


def choose(B: int, T: int, rows: int | None = ROWS, device: torch.device | str = "cpu") -> Rows:
    """So many rows, evenly spread over sequences and then over queries, the last query always among them; all for None."""
    b = min(B, rows) if rows is not None else B
    R = min(T, max(rows // b, 1)) if rows is not None else T
    return Rows(spread(B, b, device), T - 1 - spread(T, R, device).flip(0))


def logits_of(
    q_BHTC: Tensor,
    k_BKSC: Tensor,
    rows: Rows,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    cap: float | None = None,
) -> Tensor:
    """Logits (b, H, R, S) in fp32 or wider, -inf where a query may not look.

    Args:
        scale: None for 1 / sqrt(C).
        mask: broadcast to (B, H, T, S): False or a large negative number where a query may not look; added where it is a number.
        causal: queries see keys up to their own, the first query being the first key (as torch's kernel takes it).
        cap: logits become cap tanh(logits / cap).
    """
    B, H, T, C = q_BHTC.shape
    K, S = k_BKSC.shape[1], k_BKSC.shape[2]
    q = widen(q_BHTC.detach()[rows.sequence_b][:, :, rows.query_R]).unflatten(1, (K, H // K))
    k = widen(k_BKSC.detach()[rows.sequence_b]).unsqueeze(2)
    logits = ((q @ k.transpose(-1, -2)) * (C**-0.5 if scale is None else scale)).flatten(1, 2)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    if mask is not None:
        cut = _cut(mask.detach(), B, T, rows)
        logits = logits + cut if cut.is_floating_point() else logits.masked_fill(~cut, -torch.inf)
    if causal:
        later_RS = torch.arange(S, device=q.device) > rows.query_R[:, None]
        logits = logits.masked_fill(later_RS, -torch.inf)
    return hidden_to_infinity(logits)


def take_rows(logits_BHTS: Tensor, rows: Rows) -> Tensor:
    """The sample's rows of logits that a model wrote down itself."""
    return hidden_to_infinity(widen(logits_BHTS.detach()[rows.sequence_b][:, :, rows.query_R]))


def hidden_to_infinity(logits: Tensor) -> Tensor:
    """Masks add the lowest number of some format in place of -inf; no logit comes near a half of fp16's."""
    return logits.masked_fill(logits < -3e4, -torch.inf)


def add_up(logits_bHRS: Tensor, rows: Rows, T: int, keep_BS: Tensor | None = None) -> AttentionSums:
    """Sums over the rows of logits.

    Args:
        T: how many queries there are; the last of them stands at the last key.
        keep_BS: False for padding, whose rows are left out; the first token is the first that is kept.
    """
    S = logits_bHRS.shape[-1]
    own_R = rows.query_R + (S - T)
    first_b = torch.zeros_like(rows.sequence_b)
    inside_bR = torch.ones(len(rows.sequence_b), len(own_R), dtype=torch.bool, device=logits_bHRS.device)
    late_bR = (rows.query_R >= T // 2).expand_as(inside_bR)
    if keep_BS is not None:
        keep_bS = keep_BS[rows.sequence_b].bool()
        first_b = keep_bS.int().argmax(1)
        inside_bR = keep_bS[:, own_R]
        kept_b = keep_bS.sum(1, keepdim=True)
        late_bR = inside_bR & (own_R - first_b[:, None] >= kept_b // 2)
    log_p = logits_bHRS.log_softmax(-1)
    p = log_p.exp()
    # exp(-inf) * -inf is NaN, where the limit p log p is 0.
    entropy_bHR = -(p * log_p.nan_to_num(neginf=0.0)).sum(-1)
    sink_bHR = p.gather(-1, first_b[:, None, None, None].expand(*p.shape[:-1], 1))[..., 0]
    self_bHR = p.gather(-1, own_R[None, None, :, None].expand(*p.shape[:-1], 1))[..., 0]
    inside_bHR, late_bHR = (x[:, None].expand_as(entropy_bHR) for x in (inside_bR, late_bR))

    def total(values: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, values, torch.zeros_like(values)).sum((0, 2))

    one = torch.ones_like(entropy_bHR)
    return AttentionSums(
        largest_H=logits_bHRS.amax(-1).masked_fill(~inside_bHR, -torch.inf).amax((0, 2)),
        sums_5H=torch.stack([
            total(one, inside_bHR), total(entropy_bHR, inside_bHR),
            total(one, late_bHR), total(sink_bHR, late_bHR), total(self_bHR, late_bHR),
        ]),
    )  # fmt: skip


def conclude(found: AttentionSums) -> dict[str, Tensor]:
    """Series -> (H,)."""
    rows_H, entropy_H, late_H, sink_H, self_H = found.sums_5H.unbind()
    return {
        "attention_logit_max": found.largest_H,
        "attention_entropy": entropy_H / rows_H,
        "attention_sink": sink_H / late_H,
        "attention_self": self_H / late_H,
    }


def _cut(mask: Tensor, B: int, T: int, rows: Rows) -> Tensor:
    """The sample's rows of a mask that is broadcast to (B, H, T, S)."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = mask[rows.sequence_b] if mask.shape[0] == B and B > 1 else mask
    return mask[:, :, rows.query_R] if mask.shape[2] == T and T > 1 else mask
