"""What one sublayer does to the hidden states: pure functions of the state before it and the state after it.

`add_up` reduces the states to sums that other processes' sums can be added to; `conclude` makes the numbers of a record of them.

Legend: N tokens, D channels, n tokens of the sample; h before the sublayer, g after it, e at the entry of the stack.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gnomon.geometry.sphere import widen

SAMPLE = 256
"""Tokens of the whole batch whose states go into the measures that need them side by side."""

TURNS = 8


@dataclass(frozen=True)
class StateSums:
    """Sums over N tokens, fp32 or wider.

    Args:
        sums_5: N, and the sums of |h|^2, |g|^2, the angle from h to g, and cos(g, e).
        unit_D: sum of g / |g|.
        square_D: sum of g^2 by channel.
        peak_3: the largest |entry| of g, its channel, and the position of its token.
        sample_nD: g of tokens from all over the batch, see `scattered`.
    """

    sums_5: Tensor
    unit_D: Tensor
    square_D: Tensor
    peak_3: Tensor
    sample_nD: Tensor


def add_up(h: Tensor, g: Tensor, e: Tensor, keep: Tensor | None = None, sample: int = SAMPLE) -> StateSums:
    """Sums over the tokens of h, g, e (..., T, D); `keep` (..., T) is False for padding, which is left out."""
    length = g.shape[-2] if g.ndim > 2 else 1
    place_N = torch.arange(length, device=g.device).expand(g.shape[:-1]).flatten() if g.ndim > 2 else None
    h_ND, g_ND, e_ND = (widen(x.detach()).flatten(0, -2) for x in (h, g, e))
    if keep is not None:
        inside_N = keep.flatten().bool()
        h_ND, g_ND, e_ND = h_ND[inside_N], g_ND[inside_N], e_ND[inside_N]
        place_N = None if place_N is None else place_N[inside_N]
    N, D = g_ND.shape
    tiny = torch.finfo(g_ND.dtype).tiny
    u_ND, w_ND, z_ND = (F.normalize(x, dim=-1, eps=tiny) for x in (h_ND, g_ND, e_ND))
    largest, at = g_ND.abs().flatten().max(0)
    where = torch.div(at, D, rounding_mode="floor")
    position = torch.zeros_like(at) if place_N is None else place_N[where]
    return StateSums(
        sums_5=torch.stack([
            largest.new_tensor(float(N)), h_ND.square().sum(), g_ND.square().sum(), angle(u_ND, w_ND).sum(), (w_ND * z_ND).sum(),
        ]),
        unit_D=w_ND.sum(0),
        square_D=g_ND.square().sum(0),
        peak_3=torch.stack([largest, (at % D).to(largest), position.to(largest)]),
        sample_nD=g_ND[scattered(N, min(sample, N), g.device)].clone(),
    )  # fmt: skip


def conclude(found: StateSums) -> dict[str, Tensor]:
    """Series -> its number, 0-dim: those of `gnomon.series` that one sublayer has by itself."""
    count, before, after, turn, with_entry = found.sums_5.unbind()
    largest, channel, position = found.peak_3.unbind()
    mean_square_D = found.square_D / count
    tiny = torch.finfo(mean_square_D.dtype).tiny
    return {
        "stream_norm": (after / count).sqrt(),
        "stream_growth": (after / before.clamp_min(tiny)).sqrt(),
        "angle": turn / count,
        "input_cosine": with_entry / count,
        "stream_coherence": (found.unit_D / count).norm(),
        "effective_rank": effective_rank(found.sample_nD),
        "massive": largest / found.sample_nD.abs().flatten().median().clamp_min(tiny),
        "massive_channel": channel,
        "massive_position": position,
        "kurtosis": mean_square_D.square().mean() / mean_square_D.mean().square().clamp_min(tiny),
    }


def angle(x: Tensor, y: Tensor) -> Tensor:
    """Angle between rows in radians: 2 atan2(|u - w|, |u + w|) of unit vectors, accurate near 0 and pi unlike acos."""
    u, w = (F.normalize(v, dim=-1, eps=torch.finfo(v.dtype).tiny) for v in (x, y))
    return 2 * torch.atan2((u - w).norm(dim=-1), (u + w).norm(dim=-1))


def effective_rank(g_nD: Tensor) -> Tensor:
    """exp of the entropy of the eigenvalues of mean(u u^T), u = g / |g|: between 1 (one line) and min(n, D).

    With unit rows the eigenvalues are shares by themselves, p_i = sigma_i^2 / sum sigma^2 (arXiv 2605.04971, Eq. 3), and one state
    of a thousand times the norm weighs no more than another. A sample that is not finite has rank NaN.
    """
    u_nD = F.normalize(g_nD.double(), dim=-1, eps=torch.finfo(torch.float64).tiny)
    G = u_nD.T @ u_nD if u_nD.shape[0] > u_nD.shape[1] else u_nD @ u_nD.T
    finite = G.isfinite().all()
    # LAPACK refuses NaN; what is put in its place does not get out.
    p = torch.linalg.eigvalsh(torch.where(finite, G, torch.zeros_like(G))).clamp_min(0)
    p = p / p.sum().clamp_min(torch.finfo(p.dtype).tiny)
    return torch.where(finite, torch.exp(-torch.xlogy(p, p).sum()), torch.nan)


def spread(length: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """`count` evenly spaced numbers of 0 … length - 1. Of the halves of a batch they are the halves of the whole batch's."""
    return torch.arange(count, device=device) * length // max(count, 1)


def scattered(length: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The same, by turns at eight places within a stretch: a stretch as long as a row would show one position of the rows alone.
    The halves are those of the whole where each half's count is a multiple of eight."""
    turn = torch.arange(count, device=device) % TURNS
    return spread(length, count, device) + turn * (length // max(count, 1)) // TURNS
