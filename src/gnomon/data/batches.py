"""Which tokens step s trains on: a pure function of (seed, step), whatever the number of processes.

An epoch cuts the tokens into chunks of `context` tokens that do not overlap, from an offset of its own, and
visits each chunk once in an order of its own. Sample g of the run (g = step · batch + row) is chunk order[g
mod n] of epoch g div n. Nothing is remembered between steps, so a run resumed at step s, or on another
number of processes, sees what the uninterrupted run would have seen.

B batch (of all processes), T context, N number of validation windows.
"""

from __future__ import annotations

import functools

import numpy as np

from gnomon.data.tokens import Tokens
from gnomon.errors import UserError


def batch(
    tokens: Tokens, *, seed: int, step: int, batch: int, context: int, rank: int = 0, world: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and targets of one step for one process.

    Args:
        tokens: what to draw from; at least context + 1 tokens.
        seed, step: non-negative; together they determine the global batch.
        batch: rows of the global batch B, a multiple of `world`.
        context: tokens per row T.
        rank, world: this process and their number; rank r gets rows r·B/world and following, so the parts of
            all ranks, one after the other, are the global batch.

    Returns:
        x_BT and y_BT, int64, shape (batch / world, context); y is x one token later.

    Raises:
        UserError: too few tokens, a batch that does not divide, or an id outside the vocabulary.
    """
    if batch < 1 or step < 0 or not 0 <= seed < 2**64:
        raise UserError(f"batch must be positive, step and seed not negative: {batch=}, {step=}, {seed=}")
    if not 0 <= rank < world or batch % world:
        raise UserError(f"a batch of {batch} rows cannot be dealt to rank {rank} of {world}: use a multiple of {world}")
    chunks, spare = _grid(tokens, context)
    rows = batch // world
    first = step * batch + rank * rows
    starts_B = np.empty(rows, np.int64)
    done = 0
    while done < rows:  # one round per epoch that the rows touch
        epoch, position = divmod(first + done, chunks)
        offset, order = _epoch(seed, epoch, chunks, spare)
        here = order[position : position + rows - done]
        starts_B[done : done + len(here)] = offset + here * context
        done += len(here)
    return _inputs_and_targets(tokens, starts_B, context)


def slices(tokens: Tokens, *, context: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """A fixed validation slice: the first `count` windows, end to end, or as many as there are.

    Returns:
        x_NT and y_NT, int64, shape (min(count, (len(tokens) - 1) // context), context).

    Raises:
        UserError: not even one window, or an id outside the vocabulary.
    """
    if count < 1:
        raise UserError(f"the number of validation windows must be positive, not {count}")
    _grid(tokens, context)
    starts_N = np.arange(min(count, (len(tokens) - 1) // context)) * context
    return _inputs_and_targets(tokens, starts_N, context)


def chunks_per_epoch(tokens: Tokens, context: int) -> int:
    """How many rows of `context` tokens one epoch has: as many as fit at every offset (at least one)."""
    return _grid(tokens, context)[0]


def _grid(tokens: Tokens, context: int) -> tuple[int, int]:
    """(chunks per epoch, largest offset). The number is the same at every offset, so that an epoch begins at
    a
    multiple of it."""
    if context < 1:
        raise UserError(f"the context must be at least one token, not {context}")
    if len(tokens) <= context:
        raise UserError(
            f"{tokens.name} has {len(tokens):,} tokens; a context of {context:,} needs one more than "
            "that at least. Use a shorter context or more text."
        )
    chunks = max(1, len(tokens) // context - 1)
    return chunks, min(context - 1, len(tokens) - 1 - chunks * context)


@functools.lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, chunks: int, spare: int) -> tuple[int, np.ndarray]:
    """(offset, order of the chunks) of one epoch.

    From the raw stream of Philox, which numpy keeps for ever; its shuffles may change between versions (NEP
    19).
    """
    key = np.array([seed, epoch], np.uint64)
    raw = np.random.Philox(key=key).random_raw(chunks + 1)
    order = np.argsort(raw[1:], kind="stable")
    order.flags.writeable = False
    return int(raw[0] % np.uint64(spare + 1)), order


def _inputs_and_targets(tokens: Tokens, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    ids = tokens.windows(starts, context + 1)
    return ids[:, :-1], ids[:, 1:]
