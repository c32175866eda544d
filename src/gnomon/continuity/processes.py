"""A large checkpoint measured by several processes: `torchrun --nproc-per-node N -m gnomon inspect …`.

Each takes whole series of layers, since one matrix starts from the one before it; so the numbers do not depend on how many
processes there are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from gnomon.continuity.one_pass import Measured, Read, series


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Join the processes torchrun started, unless that was done; leave them at the end."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def own_reads(reads: Sequence[Read]) -> list[Read]:
    """This process's reads: whole series, the largest first to whoever has least to read."""
    sizes: dict[Any, int] = {}
    for read in reads:
        key = series(read.parts[0])
        sizes[key] = sizes.get(key, 0) + read.nbytes
    load, reader = [0] * dist.get_world_size(), {}
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        reader[key] = load.index(min(load))
        load[reader[key]] += sizes[key]
    return [read for read in reads if reader[series(read.parts[0])] == dist.get_rank()]


def gather(reads: Sequence[Read], found: Iterable[tuple[Read, list[Measured]]]) -> list[tuple[Read, list[Measured]]]:
    """What all processes found, in the order of `reads`, on the first process; nothing on the others."""
    order = {(read.name, read.index): number for number, read in enumerate(reads)}
    everything: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object([(order[read.name, read.index], results) for read, results in found], everything)
    together = sorted((pair for some in everything or () for pair in some), key=lambda pair: pair[0])
    return [(reads[number], results) for number, results in together]


def from_first(value: Any) -> Any:
    """The first process's value, on all."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
