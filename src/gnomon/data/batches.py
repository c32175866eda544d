"""Which tokens step s trains on: a pure function of (seed, step), whatever the number of processes.

An epoch cuts the tokens into chunks of `context` tokens that do not overlap, from an offset of its own, and visits each
chunk once in an order of its own. Sample g of the run (g = step · batch + row) is chunk order[g mod n] of epoch g div n.
Nothing is remembered between steps, so a run resumed at step s, or on another number of processes, sees what the
uninterrupted run would have seen.

With boundaries="respect" the chunks are the rows of `documents`; in a `Mixture` each source counts its own samples.

B batch (of all processes), T context, N number of validation windows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np

from gnomon.data.documents import document_rows
from gnomon.data.mixture import BLOCK, Mixture
from gnomon.data.tokens import Tokens
from gnomon.errors import UserError, check_name

BOUNDARIES = ("ignore", "respect")

# A target without loss; what torch's cross_entropy leaves out of the mean by default.
NO_TARGET = -100


def batch(
    tokens: Tokens | Mixture,
    *,
    seed: int,
    step: int,
    batch: int,
    context: int,
    rank: int = 0,
    world: int = 1,
    boundaries: str = "ignore",
) -> tuple[np.ndarray, np.ndarray]:
    """The inputs and targets of one step for one process.

    Args:
        tokens: what to draw from; at least context + 1 tokens (of each source).
        seed, step: non-negative; together they determine the global batch.
        batch: rows of the global batch B, a multiple of `world`.
        context: tokens per row T.
        rank, world: this process and their number; rank r gets rows r·B/world and following, so the parts of all ranks,
            one after the other, are the global batch.
        boundaries: "ignore" cuts rows anywhere; "respect" gives each row tokens of one document only.

    Returns:
        x_BT and y_BT, int64, shape (batch / world, context); y is x one token later, or NO_TARGET (-100) after the end of
        a respected document.

    Raises:
        UserError: too few tokens, a batch that does not divide, or an id outside the vocabulary.
    """
    if batch < 1 or step < 0 or not 0 <= seed < 2**64:
        raise UserError(f"batch must be positive, step and seed not negative: {batch=}, {step=}, {seed=}")
    if not 0 <= rank < world or batch % world:
        raise UserError(f"a batch of {batch} rows cannot be dealt to rank {rank} of {world}: use a multiple of {world}")
    check_name("boundaries", boundaries, BOUNDARIES)
    rows = batch // world
    samples_B = np.arange(rows) + step * batch + rank * rows
    if isinstance(tokens, Tokens):
        return _rows(tokens, seed, 0, samples_B, context, boundaries)
    source_B, index_B = tokens.deal(samples_B, seed)
    x_BT, y_BT = np.empty((2, rows, context), np.int64)
    for stream, source in enumerate(tokens.sources):
        here = source_B == stream
        x_BT[here], y_BT[here] = _rows(source, seed, stream, index_B[here], context, boundaries)
    return x_BT, y_BT


def _rows(
    tokens: Tokens, seed: int, stream: int, samples_B: np.ndarray, context: int, boundaries: str
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of the samples numbered `samples_B` of one source."""
    rows = document_rows(tokens, context) if boundaries == "respect" else None
    chunks, spare = _grid(tokens, context) if rows is None else (rows.rows, 0)
    chunk_B, offset_B = np.empty_like(samples_B), np.empty_like(samples_B)
    for epoch in np.unique(samples_B // chunks).tolist():
        here = samples_B // chunks == epoch
        offset, order = _epoch(seed, epoch, chunks, spare, stream)
        chunk_B[here], offset_B[here] = order[samples_B[here] % chunks], offset
    if rows is None:
        return _inputs_and_targets(tokens, offset_B + chunk_B * context, context)
    start_B, targets_B = rows.row(chunk_B)
    ids = tokens.windows(start_B, context + 1, targets_B + 1, fill=rows.end_of_text)
    y_BT = np.where(np.arange(context) < targets_B[:, None], ids[:, 1:], NO_TARGET)
    return ids[:, :-1], y_BT


def slices(tokens: Tokens | Mixture, *, context: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """A fixed validation slice: the first `count` windows, end to end, or as many as there are.

    Of a mixture each source gives its share of the windows, so that their mean loss weighs sources as training does.

    Returns:
        x_NT and y_NT, int64, shape (min(count, (len(tokens) - 1) // context), context).

    Raises:
        UserError: not even one window, or an id outside the vocabulary.
    """
    if count < 1:
        raise UserError(f"the number of validation windows must be positive, not {count}")
    if isinstance(tokens, Mixture):
        shares = [max(1, round(count * share / BLOCK)) for share in tokens.counts]
        parts = [slices(part, context=context, count=n) for part, n in zip(tokens.sources, shares)]
        x_NT, y_NT = (np.concatenate(side) for side in zip(*parts))
        return x_NT, y_NT
    _grid(tokens, context)
    starts_N = np.arange(min(count, (len(tokens) - 1) // context)) * context
    return _inputs_and_targets(tokens, starts_N, context)


def frequencies(tokens: Tokens | Mixture, vocab_size: int, at_most: int = 10_000_000) -> np.ndarray:
    """How often each id occurs among the first `at_most` tokens (of a mixture: in its proportions), int64 (V,)."""
    if isinstance(tokens, Tokens):
        return np.bincount(tokens[:at_most], minlength=vocab_size)
    counts = np.zeros(vocab_size)
    for source, share in zip(tokens.sources, tokens.counts):
        part = frequencies(source, vocab_size, at_most * share // BLOCK)
        # A small source repeats more often: what counts is its share of the rows, not its size.
        counts += part * (at_most * share / BLOCK / max(part.sum(), 1))
    return counts.round().astype(np.int64)


def entropy(counts: Iterable[int]) -> float:
    """Entropy in nats of drawing by these counts: the loss of a model that knows only how frequent each token is."""
    some = [int(count) for count in counts if count]
    total = sum(some)
    return -sum(count / total * math.log(count / total) for count in some)


def chunks_per_epoch(tokens: Tokens, context: int, boundaries: str = "ignore") -> int:
    """How many rows of `context` tokens one epoch has: as many as fit at every offset (at least one)."""
    return _grid(tokens, context)[0] if boundaries == "ignore" else document_rows(tokens, context).rows


def _grid(tokens: Tokens, context: int) -> tuple[int, int]:
    """(chunks per epoch, largest offset). The number is the same at every offset: an epoch begins at a multiple of it."""
    if context < 1:
        raise UserError(f"the context must be at least one token, not {context}")
    if len(tokens) <= context:
        raise UserError(
            f"{tokens.name} has {len(tokens):,} tokens; a context of {context:,} needs one more than "
            "that at least. Use a shorter context or more text."
        )
    chunks = max(1, len(tokens) // context - 1)
    return chunks, min(context - 1, len(tokens) - 1 - chunks * context)


# 64 orders of 4 bytes a chunk: with 1024 uint16 tokens in a chunk an eighth of what the file has on disk, at most.
@functools.lru_cache(maxsize=64)
def _epoch(seed: int, epoch: int, chunks: int, spare: int, stream: int = 0) -> tuple[int, np.ndarray]:
    """(offset, order of the chunks) of one epoch of source number `stream`.

    From the raw stream of Philox, which numpy keeps for ever; its shuffles may change between versions (NEP 19).
    """
    key = np.array([seed, epoch], np.uint64)
    # Sources of one mixture have the same key and far-off counters.
    raw = np.random.Philox(key=key, counter=stream << 192).random_raw(chunks + 1)
    order = np.argsort(raw[1:], kind="stable").astype(np.uint32)
    order.flags.writeable = False
    return int(raw[0] % np.uint64(spare + 1)), order


def _inputs_and_targets(tokens: Tokens, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    ids = tokens.windows(starts, context + 1)
    return ids[:, :-1], ids[:, 1:]
