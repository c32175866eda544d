"""Tokenising on all cores, in order: what comes out does not depend on how many work at it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import numpy as np

from gnomon.data.tokenizers import Tokenizer
from gnomon.errors import UserError

Owner = TypeVar("Owner")
Encode = Callable[[Sequence[str]], list[np.ndarray]]


def encoded(
    tokenizer: Tokenizer, batches: Iterable[tuple[Owner, list[str]]], workers: int = 1
) -> Generator[tuple[Owner, list[np.ndarray]], None, None]:
    """(owner, ids of its texts) of each batch (owner, texts), in order.

    Args:
        batches: read in this process, a few ahead of what is given out. The owners stay here.
        workers: processes. With 1 the work is done here, in as many threads as the tokenizers library takes (all cores,
            or RAYON_NUM_THREADS); more make the rest of the work parallel too, and each uses one thread.

    Raises:
        UserError: a worker was killed.
    """
    pool, encode, ahead = _pool(tokenizer, workers)
    waiting: deque[tuple[Owner, Future]] = deque()
    try:
        for owner, texts in batches:
            waiting.append((owner, pool.submit(encode, texts)))
            if len(waiting) > ahead:
                owner, future = waiting.popleft()
                yield owner, future.result()
        while waiting:
            owner, future = waiting.popleft()
            yield owner, future.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {workers} tokenising processes was killed, most likely for want of memory. Finished shards are kept: "
            "run the same command again, with fewer --workers if it repeats."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _pool(tokenizer: Tokenizer, workers: int) -> tuple[Executor, Encode, int]:
    """A pool, what it runs, and how many batches wait for it."""
    if workers == 1:
        # Two at a time: one batch is read and converted while the other is tokenised.
        return ThreadPoolExecutor(2), tokenizer.encode_many, 2
    # A forked copy of a process with threads may hang; a spawned one starts clean.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, _start, (tokenizer,)), _encode, 2 * workers


_mine: Tokenizer


def _start(tokenizer: Tokenizer) -> None:
    """In a worker: one thread, Ctrl-C is the parent's affair, and none outlives a parent that was killed."""
    global _mine
    _mine = tokenizer
    os.environ["RAYON_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(texts: Sequence[str]) -> list[np.ndarray]:
    return _mine.encode_many(texts)
