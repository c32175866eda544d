"""One pass over a checkpoint: every matrix is read, measured, and forgotten but for its singular vectors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnomon.anatomy import Anatomy, Part
from gnomon.checkpoints.checkpoint import Buffer, Checkpoint
from gnomon.continuity import pair_measures
from gnomon.errors import UserError
from gnomon.geometry import subspace
from gnomon.geometry.subspace import Singular

# What the matrices being worked on at once may take, all workers together.
_MEMORY = 600e6
_MAX_WORKERS = 8


@dataclass
class Measured:
    """What is kept of one matrix.

    Attributes:
        at: its singular triplets; None when it could not be measured.
        sigma_k: the singular values found, largest first: the leading k, or all of them (full).
        effective_rank: full tier only.
        heads: for each head the leading vector on the side of the stream, (heads, d); None unless asked for.
        folded: norm gains that were multiplied in.
        error: why it could not be measured; "" when it was.
    """

    part: Part
    at: Singular | None = None
    sigma_k: Tensor | None = None
    effective_rank: float | None = None
    heads: Tensor | None = None
    folded: tuple[str, ...] = ()
    error: str = ""


# The matrices of one read, and the leading vectors to start the next of each series from.
_Result = tuple[list[Measured], dict[Any, Tensor]]


class Options(NamedTuple):
    """How to measure: see `inspect`."""

    k: int
    full: bool
    fold_norms: bool
    heads: bool


class Read(NamedTuple):
    """One read: a tensor, or one expert of it, and the parts it serves."""

    name: str
    index: int | None
    parts: list[Part]
    nbytes: int


def plan_reads(checkpoint: Checkpoint, parts: Sequence[Part], by_role: bool) -> list[Read]:
    """Reads in file order, or role by role up the depth, which lets the full tier forget sooner."""
    grouped: dict[tuple[str, int | None], list[Part]] = {}
    for part in parts:
        grouped.setdefault((part.name, part.block.index), []).append(part)
    found = []
    for (name, index), members in grouped.items():
        entry = checkpoint.entries[name]
        nbytes = entry.nbytes if index is None else entry.nbytes // entry.shape[0]
        found.append(Read(name, index, members, nbytes))
    if not by_role:
        in_file = {name: number for number, name in enumerate(checkpoint.entries)}
        return sorted(found, key=lambda read: (in_file[read.name], read.index or 0))
    roles = {role: number for number, role in enumerate(dict.fromkeys((part.stack, part.role) for part in parts))}

    def up_the_depth(read: Read) -> tuple[int, int, int]:
        first = read.parts[0]
        return roles[first.stack, first.role], read.index or 0, first.layer or 0

    return sorted(found, key=up_the_depth)


def measure(
    checkpoint: Checkpoint, anatomy: Anatomy, reads: Sequence[Read], options: Options, workers: int, threads: int
) -> Iterator[tuple[Read, list[Measured]]]:
    """Measure every read, `workers` at once with `threads` each; results come in the order of `reads`.

    A matrix that cannot be measured comes back with `error` set and stops nothing.
    """
    local = threading.local()

    def start() -> None:
        local.buffer = Buffer()
        torch.set_num_threads(threads)

    def work(read: Read, before: Future[_Result] | None) -> _Result:
        # Each series goes up the depth one matrix at a time, starting from where the last one ended. Waiting for it
        # keeps the numbers the same for any number of workers; it was submitted earlier, so it is under way.
        near = before.result()[1] if before else {}
        try:
            tensor = checkpoint.read(read.name, local.buffer, read.index)
        except UserError as error:
            return [Measured(part, error=str(error)) for part in read.parts], near
        found = [
            _one(checkpoint, anatomy, part, tensor, read.index, options, near.get(series(part))) for part in read.parts
        ]
        return found, near | {series(one.part): one.at.V_kN[: options.k] for one in found if one.at is not None}

    waiting: deque[tuple[Read, Future[_Result]]] = deque()
    latest: dict[Any, Future[_Result]] = {}
    with ThreadPoolExecutor(workers, "measure", start) as pool:
        try:
            for read in reads:
                key = series(read.parts[0])
                latest[key] = pool.submit(work, read, latest.get(key))
                waiting.append((read, latest[key]))
                if len(waiting) > workers:
                    first, future = waiting.popleft()
                    yield first, future.result()[0]
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()[0]
        finally:
            pool.shutdown(cancel_futures=True)


def series(part: Part) -> tuple[Any, ...]:
    """What parts of one kind have in common from layer to layer."""
    return (part.stack, part.role, part.expert, part.inner, part.shape)


def _one(
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    part: Part,
    tensor: Tensor,
    index: int | None,
    options: Options,
    near: Tensor | None,
) -> Measured:
    block = part.block if index is None else replace(part.block, index=None)
    W_MN = block.take(tensor)
    try:
        folded: tuple[str, ...] = ()
        if options.fold_norms:
            W_MN, folded = fold(checkpoint, anatomy, part, W_MN)
        # Two at least: only sigma_1 / sigma_2 says whether v_1 means anything.
        at = subspace.spectrum(W_MN) if options.full else subspace.leading(W_MN, max(options.k, 2), start=near)
        erank = pair_measures.effective_rank(at.sigma_k) if options.full and at.norm else None
        heads = _heads(part, W_MN) if options.heads and part.heads else None
    except UserError as error:
        return Measured(part, error=f"{checkpoint.entries[part.name].file}: {part.name!r} ({part.role}): {error}")
    return Measured(part, at, at.sigma_k.clone(), erank, heads, folded)


def fold(checkpoint: Checkpoint, anatomy: Anatomy, part: Part, W_MN: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """diag(g_after) W diag(g_before): the matrix between normalised streams. Which gains is returned too."""
    folded = []
    for name, of_inputs in ((part.norm_before, True), (part.norm_after, False)):
        if name is None:
            continue
        gain = checkpoint.read(name).float() + (anatomy.norm_offset or 0.0)
        if gain.numel() != W_MN.shape[1 if of_inputs else 0]:
            continue
        W_MN = W_MN.float() * (gain.reshape(1, -1) if of_inputs else gain.reshape(-1, 1))
        folded.append(name)
    return W_MN, tuple(folded)


def _heads(part: Part, W_MN: Tensor) -> Tensor | None:
    """The leading vector of each head on the side of the stream: inputs for readers, outputs for writers."""
    if not (part.reads_stream or part.writes_stream) or part.head_dim is None or part.heads is None:
        return None
    rows_HhN = (W_MN if part.reads_stream else W_MN.T).float().reshape(part.heads, part.head_dim, -1)
    vectors = [subspace.spectrum(rows_hN).V_kN[0] for rows_hN in rows_HhN]
    return torch.stack(vectors)


def workers_and_threads(reads: Sequence[Read], full: bool, threads: int) -> tuple[int, int]:
    """(workers, threads of each): whole matrices in parallel beat threads inside the small products of one."""
    biggest = max((read.nbytes for read in reads), default=1)
    fits = int(_MEMORY // (biggest * (12 if full else 2))) or 1
    workers = max(1, min(threads, _MAX_WORKERS, fits, len(reads)))
    return workers, threads if full and workers == 1 else 1
