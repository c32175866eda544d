"""What a compression will take and leave, before it is begun."""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.compress.block_matrices import linears_of
from gnomon.compress.budget import Budget
from gnomon.progress import duration, quantity
from gnomon.running import text_estimate
from gnomon.running.streamed import Streamed
from gnomon.running.token_rows import Rows

# An eigenproblem of width n, and the products around it, in fp64: so many n³, at half the rate of fp32.
_CUBES = 2 * 20.0


@dataclass(frozen=True)
class Work:
    """Figures of one compression.

    Attributes:
        parameters, parameters_after: of the blocks.
        nbytes, nbytes_after: of the weights on disk, all tensors.
        memory: bytes held at once.
        seconds: at the rate of this machine, as measured now.
    """

    parameters: int
    parameters_after: int
    nbytes: int
    nbytes_after: int
    memory: float
    seconds: float

    def table(self) -> list[dict[str, str]]:
        """Two rows, for `report.show`."""
        return [
            {"": "before", "weights": f"{self.parameters:,}", "bytes": quantity(self.nbytes, "B"), "memory": "", "time": ""},
            {
                "": "after", "weights": f"{self.parameters_after:,}", "bytes": quantity(self.nbytes_after, "B"),
                "memory": quantity(self.memory, "B"), "time": duration(self.seconds),
            },
        ]  # fmt: skip


UNITS = {
    "": "", "weights": "weights of the blocks", "bytes": "bytes on disk", "memory": "expected memory", "time": "expected time",
}  # fmt: skip
"""Head of each column."""


def expected(streamed: Streamed, rows: Rows, budget: Budget, group: int) -> Work:
    """Work for groups of `group` blocks. Multiplies two matrices to see how fast the machine is now (a tenth of a second)."""
    B, T = rows.tokens_BT.shape
    running = text_estimate.estimate(streamed, B, T)
    blocks = len(streamed.blocks)
    model = streamed.model
    inputs = outputs = 0.0
    squares = 0
    for linear in linears_of(streamed, 0):
        M, N = sorted(model.get_submodule(f"{streamed.block_names[0]}.{linear}").weight.shape)
        inputs += 2.0 * B * T * N**2
        outputs += _CUBES * M**3
        squares += 8 * N**2
    # As it was, as it becomes, and twice on a part of the text for the losses; with the head there.
    some = min(1.0, 4096 / (B * T))
    flops = blocks * (2 * running.block_flops + inputs + outputs) + 2 * some * (blocks * running.block_flops + running.head_flops)
    kept = round(budget.keep * budget.total)
    stored = streamed.checkpoint.entries
    nbytes = sum(entry.nbytes for entry in stored.values())
    # What is read as fp32 (GGUF, quantised) is written as fp32.
    each = 4 if any(entry.dtype not in ("BF16", "F16") for entry in stored.values()) else 2
    tables = sum(streamed.nbytes(name) for name in streamed.table_names) // 4 - _tied(streamed)
    after = each * (kept + tables)
    return Work(budget.total, kept, nbytes, after, running.memory + group * squares + 4 * squares, flops / running.rate)


def _tied(streamed: Streamed) -> int:
    return sum(streamed.model.get_parameter(name).numel() for name in streamed.model.all_tied_weights_keys)
