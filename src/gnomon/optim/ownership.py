"""Whole matrices on ranks: each rank steps the matrices it owns, then all exchange the results.

The polar factor of a shard is not the shard of the polar factor, so a matrix is never stepped in pieces. Replicated (DDP)
matrices are whole everywhere; the pieces of sharded (FSDP2) ones travel to the owner, and back, in one exchange for all.
Without a process group everything here is the identity, so one process and many run the same code. Owners are chosen by
cost, greedily, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon.sharding import is_sharded, local, whole, write


def world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world() > 1 else 0


def owners(costs: list[int], ranks: int) -> list[int]:
    """The rank that steps each matrix: the most expensive first, to whoever has least to do."""
    load, chosen = [0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(ranks), key=lambda r: (load[r], r))
        chosen[index] = owner
        load[owner] += costs[index]
    return chosen


def to_owners(tensors: Sequence[Tensor], chosen: list[int]) -> list[Tensor | None]:
    """Each tensor whole on the rank that owns it, and None elsewhere; a replicated one is the tensor's own storage."""
    found: list[Tensor | None] = [
        whole(t) if chosen[i] == rank() and not is_sharded(t) else None for i, t in enumerate(tensors)
    ]
    for i, t in enumerate(tensors):
        if is_sharded(t) and not _by_rows(t):
            full = whole(t)
            found[i] = full if chosen[i] == rank() else None
    for some in _alike([i for i, t in enumerate(tensors) if _by_rows(t)], tensors):
        mine = [i for i in some if chosen[i] == rank()]
        sent = [[local(tensors[i]) for i in some if chosen[i] == owner] for owner in range(world())]
        shapes = [[_share(tensors[i], source) for i in mine] for source in range(world())]
        pieces = _swap(sent, shapes, local(tensors[some[0]]))
        for i, *parts in zip(mine, *pieces):
            found[i] = torch.cat(parts)
    return found


@torch.no_grad()
def from_owners(targets: Sequence[Tensor], full: Sequence[Tensor | None], chosen: list[int]) -> None:
    """Write what each owner has into `targets`, each rank its share."""
    if world() == 1:
        for target, value in zip(targets, full):
            write(target, cast(Tensor, value))
        return
    _broadcast([i for i, t in enumerate(targets) if not _by_rows(t)], targets, full, chosen)
    for some in _alike([i for i, t in enumerate(targets) if _by_rows(t)], targets):
        mine = [i for i in some if chosen[i] == rank()]
        sent = [[cast(Tensor, full[i])[slice(*_rows(targets[i], to))] for i in mine] for to in range(world())]
        theirs = [[i for i in some if chosen[i] == owner] for owner in range(world())]
        shapes = [[tuple(local(targets[i]).shape) for i in owned] for owned in theirs]
        pieces = _swap(sent, shapes, local(targets[some[0]]))
        for owned, parts in zip(theirs, pieces):
            for i, part in zip(owned, parts):
                local(targets[i]).copy_(part)


def live(parameters: list[Tensor]) -> list[bool]:
    """Which parameters have a gradient on any rank; all ranks agree, so that none waits for another.

    A replicated gradient that some ranks lack is given to them, so that momenta stay the same everywhere.
    """
    flags = [p.grad is not None for p in parameters]
    if world() == 1 or not parameters:
        return flags
    table = torch.zeros(world(), len(flags), dtype=torch.uint8, device=local(parameters[0]).device)
    table[rank()] = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(table)
    having = table.T.tolist()
    for p, there in zip(parameters, having):
        if any(there) and not all(there) and not is_sharded(p):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.broadcast(p.grad, src=there.index(1))
    return [any(there) for there in having]


def ranks_where(flag: Tensor) -> list[int]:
    """The ranks on which `flag` is true."""
    table = torch.zeros(world(), dtype=torch.uint8, device=flag.device)
    table[rank()] = flag
    if world() > 1:
        dist.all_reduce(table)
    return table.nonzero().flatten().tolist()


def _by_rows(tensor: Tensor) -> bool:
    """Whether a tensor lies cut by rows over all ranks, as FSDP2 does it; of other layouts the whole is gathered."""
    if not is_sharded(tensor):
        return False
    mesh = tensor.device_mesh
    return mesh.ndim == 1 and mesh.mesh.tolist() == list(range(world())) and tensor.placements[0].is_shard(0)


def _rows(tensor: Tensor, at: int) -> tuple[int, int]:
    """First and last row on a rank: equal chunks, the last ones smaller or empty."""
    chunk = -(-tensor.shape[0] // world())
    return min(at * chunk, tensor.shape[0]), min((at + 1) * chunk, tensor.shape[0])


def _share(tensor: Tensor, at: int) -> tuple[int, ...]:
    """The shape of a rank's piece."""
    start, stop = _rows(tensor, at)
    return stop - start, *tensor.shape[1:]


def _alike(indices: list[int], tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of tensors that can travel in one buffer."""
    groups: dict[torch.dtype, list[int]] = {}
    for i in indices:
        groups.setdefault(tensors[i].dtype, []).append(i)
    return list(groups.values())


def _swap(sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], like: Tensor) -> list[list[Tensor]]:
    """One all-to-all: `sent` are the pieces for each rank, `shapes` those of the pieces that come from each; dtype and
    device as `like`."""
    counts = [[torch.Size(shape).numel() for shape in some] for some in shapes]
    # A rank that owns nothing still gives its device and dtype.
    flat = torch.cat([like.new_empty(0), *(piece.reshape(-1) for pieces in sent for piece in pieces)])
    received = flat.new_empty(sum(map(sum, counts)))
    dist.all_to_all_single(
        received, flat, [sum(some) for some in counts], [sum(p.numel() for p in pieces) for pieces in sent]
    )
    pieces = iter(received.split([n for some in counts for n in some]))
    return [[next(pieces).view(shape) for shape in some] for some in shapes]


def _broadcast(
    indices: list[int], targets: Sequence[Tensor], full: Sequence[Tensor | None], chosen: list[int]
) -> None:
    """One buffer from each owner, all under way at once; one is unpacked while the next arrives."""
    under_way = []
    for some in _alike(indices, targets):
        for owner in sorted({chosen[i] for i in some}):
            owned = [i for i in some if chosen[i] == owner]
            sizes = [targets[i].numel() for i in owned]
            if owner == rank():
                buffer = torch.cat([cast(Tensor, full[i]).reshape(-1) for i in owned])
            else:
                buffer = torch.empty(sum(sizes), dtype=targets[owned[0]].dtype, device=local(targets[owned[0]]).device)
            under_way.append((owned, sizes, buffer, dist.broadcast(buffer, src=owner, async_op=True)))
    for owned, sizes, buffer, work in under_way:
        cast(dist.Work, work).wait()
        for i, values in zip(owned, buffer.split(sizes)):
            own = full[i] if chosen[i] == rank() else None
            write(targets[i], values.view(targets[i].shape) if own is None else own)
