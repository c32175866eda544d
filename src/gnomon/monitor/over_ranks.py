"""Sums of every process's share of a batch: what one process with the whole batch would have.

Legend: P places, n tokens of a sample, D channels, H heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gnomon.monitor.attention_rows import AttentionSums
from gnomon.monitor.states import StateSums
from gnomon.sharding import is_sharded


def world_of(model: nn.Module) -> int:
    """Over how many processes the rows of a batch lie: all of them under DDP and FSDP2, else one."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    spread = isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel) or any(map(is_sharded, model.parameters()))
    return dist.get_world_size() if spread else 1


def states_over_ranks(found: dict[str, StateSums], sample: int) -> dict[str, StateSums]:
    """The sums of all processes; every process must call this with the same places."""
    if not found:
        return found
    each = list(found.values())
    added = _added([x for one in each for x in (one.sums_5, one.unit_D, one.square_D)])
    peaks_rP3 = _gathered(torch.stack([one.peak_3 for one in each]))
    # A process with less than its share of tokens fills up with rows of zeros, which are taken out again.
    padded = [torch.cat([one.sample_nD, one.sample_nD.new_zeros(sample - len(one.sample_nD), one.sample_nD.shape[1])]) for one in each]
    samples = [_gathered(x_nD).flatten(0, 1) for x_nD in padded]
    whole = {}
    for i, (place, one) in enumerate(found.items()):
        largest = peaks_rP3[:, i, 0].argmax()
        rows_nD = samples[i]
        whole[place] = replace(
            one, sums_5=added[3 * i], unit_D=added[3 * i + 1], square_D=added[3 * i + 2], peak_3=peaks_rP3[largest, i],
            sample_nD=rows_nD[rows_nD.abs().amax(-1) > 0],
        )  # fmt: skip
    return whole


def attention_over_ranks(found: dict[str, AttentionSums]) -> dict[str, AttentionSums]:
    """The same for attention."""
    if not found:
        return found
    each = list(found.values())
    sums = _added([one.sums_5H for one in each])
    largest = _added([one.largest_H for one in each], dist.ReduceOp.MAX)
    return {place: AttentionSums(*pair) for place, pair in zip(found, zip(largest, sums))}


def _added(tensors: list[Tensor], how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[Tensor]:
    """Every tensor reduced over all processes, in one exchange."""
    flat = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(flat, how)
    return [part.view_as(x) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors)]


def _gathered(x: Tensor) -> Tensor:
    """(ranks, …): what each process has."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return torch.stack(found)
