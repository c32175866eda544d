"""What running a model over a text will take, before it is run.

Legend: B rows, T tokens of a row, D channels, V vocabulary.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

import torch

from gnomon.progress import duration, quantity
from gnomon.running.streamed import Streamed


@dataclass(frozen=True)
class Estimate:
    """Work, and what this machine makes of it.

    Attributes:
        block_flops: operations of one block on all tokens.
        head_flops: those of the head.
        flops: of everything asked for.
        removal_flops: of those, what losses without each block take.
        read: bytes of the checkpoint that are read.
        memory: bytes held at once: this process as it is, the largest piece of the model, the states, and a row of logits.
        rate: operations a second, as measured.
    """

    block_flops: float
    head_flops: float
    flops: float
    removal_flops: float
    read: int
    memory: float
    rate: float

    @property
    def seconds(self) -> float:
        """How long it will take."""
        return self.flops / self.rate

    def __str__(self) -> str:
        return (
            f"reads {quantity(self.read, 'B')}, holds about {quantity(self.memory, 'B')}, takes about {duration(self.seconds)} "
            f"({quantity(self.flops, 'FLOP')} at {quantity(self.rate, 'FLOP')}/s here)"
        )


def estimate(streamed: Streamed, B: int, T: int, *, removal: bool = False) -> Estimate:
    """For B rows of T tokens. Multiplies two matrices to see how fast the machine is now (a tenth of a second)."""
    blocks, tables = streamed.block_names, streamed.table_names
    count, tokens = len(blocks), B * T
    V, D = streamed.model.get_input_embeddings().weight.shape
    largest = max(streamed.nbytes(name) for name in blocks)
    # Two for a product and its sum, of each weight; and of each pair of tokens, in queries with keys and weights with values.
    block_flops = 2.0 * sum(streamed.nbytes(name) for name in blocks) / 4 / count * tokens + 4.0 * tokens * T * D
    head_flops = 2.0 * V * D * tokens if streamed.predicts else 0.0
    removal_flops = (block_flops * (count + 1) * count / 2 + head_flops * (count + 1)) if removal else 0.0
    one_pass = block_flops * count + (0.0 if removal else head_flops)
    # A block of the usual shape holds twelve D x D matrices, and about as many states as their widths together.
    states = 4.0 * tokens * D * 14 + (4.0 * tokens * D * count if removal else 0.0)
    logits = 4.0 * T * V * 2 if streamed.predicts else 0.0
    here = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    memory = here + max(2 * largest + states, sum(streamed.nbytes(name) for name in tables) + logits + states)
    stored = streamed.checkpoint.entries
    read = sum(entry.nbytes for entry in stored.values())
    return Estimate(
        block_flops,
        head_flops,
        one_pass + removal_flops,
        removal_flops,
        read * (1 + removal),
        memory,
        _flops_a_second(),
    )


def _flops_a_second(size: int = 512, seconds: float = 0.1) -> float:
    x = torch.ones(size, size)
    torch.mm(x, x)  # the first wakes the threads
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        torch.mm(x, x)
        done += 1
    return 2 * size**3 * done / (time.perf_counter() - started)
