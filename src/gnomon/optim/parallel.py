"""Whole matrices on ranks: each rank steps the matrices it owns, then all exchange the results.

The polar factor of a shard is not the shard of the polar factor, so a matrix is never stepped in pieces: sharded (FSDP2)
tensors are gathered, replicated (DDP) ones are there already. Without a process group everything here is the identity,
so one process and many run the same code. Owners are chosen by cost, greedily, the same on every rank.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(share: Tensor, reference: Tensor) -> Tensor:
    """A share in the layout of `reference`."""
    if not isinstance(reference, DTensor):
        return share
    return DTensor.from_local(
        share,
        reference.device_mesh,
        reference.placements,
        run_check=False,
        shape=reference.shape,
        stride=reference.stride(),
    )


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank: a copy of a sharded one, the tensor's own storage otherwise."""
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.detach()


def shard_like(full: Tensor, reference: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, in the layout of `reference`: each slices its own share, none sends."""
    if not isinstance(reference, DTensor):
        return full
    return distribute_tensor(full.to(reference.device), reference.device_mesh, reference.placements, src_data_rank=None)


def write(target: Tensor, full: Tensor) -> None:
    """Put the whole tensor back into `target`, each rank its share."""
    if isinstance(target, DTensor):
        local(target).copy_(local(shard_like(full, target)))
    elif target.data_ptr() != full.data_ptr():
        target.detach().copy_(full)


def owners(costs: list[int], ranks: int) -> list[int]:
    """The rank that steps each matrix: the most expensive first, to whoever has least to do."""
    load, chosen = [0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        chosen[index] = rank
        load[rank] += costs[index]
    return chosen


def owned(costs: list[int]) -> list[bool]:
    """Which of the matrices this rank steps."""
    if world() == 1:
        return [True] * len(costs)
    return [owner == dist.get_rank() for owner in owners(costs, world())]


def exchange(matrices: list[Tensor], costs: list[int]) -> list[Tensor]:
    """Every matrix as its owner has it."""
    if world() == 1:
        return matrices
    # Parts of fused tensors are views, which cannot be received into; contiguous copies can.
    received = [matrix.contiguous().clone() for matrix in matrices]
    work = [dist.broadcast(W, src=owner, async_op=True) for W, owner in zip(received, owners(costs, world()))]
    for waiting in work:
        cast(dist.Work, waiting).wait()
    return received


def live(parameters: list[Tensor]) -> list[bool]:
    """Which parameters have a gradient on any rank; all ranks agree, so that none waits for another."""
    flags = [p.grad is not None for p in parameters]
    if world() == 1 or not parameters:
        return flags
    shared = torch.tensor(flags, dtype=torch.uint8, device=local(parameters[0]).device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in shared.tolist()]


def anywhere(flag: Tensor) -> bool:
    """Whether `flag` is true on any rank."""
    if world() > 1:
        flag = flag.to(torch.uint8)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)
