"""How much of a model is to stay, and how much of that linears may have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gnomon.compress.block_matrices import linears_of, shape_of
from gnomon.errors import UserError
from gnomon.progress import tell
from gnomon.running.streamed import Streamed, open_streamed
from gnomon.running.token_rows import Rows

ENOUGH = 10
"""Calibration tokens for each input of the widest matrix, below which it is told that they are few."""


@dataclass(frozen=True)
class Budget:
    """What stays.

    Attributes:
        total: weights of all blocks.
        replaceable: of those, the weights of linears that a method can replace.
        keep: share of all block weights that is to stay.
    """

    total: int
    replaceable: int
    keep: float

    @property
    def of_linears(self) -> float:
        """The share of the replaceable weights that may stay, so that `keep` of all does."""
        return 1 - (1 - self.keep) * self.total / self.replaceable if self.replaceable else 0.0


def open_whole(source: Any, config: Mapping[str, Any] | None = None) -> Streamed:
    """A model that can be made smaller.

    Raises:
        UserError: it cannot be run, does not predict a next token, or was compressed before.
    """
    streamed = open_streamed(source, config)
    if not streamed.predicts:
        raise UserError(f"{type(streamed.model).__name__} does not predict a next token, so what it loses has no measure here.")
    if getattr(streamed.model.config, "compressed", None):
        raise UserError(f"{streamed.checkpoint.name} is compressed already. Compress the model it was made from.")
    return streamed


def budget_of(streamed: Streamed, keep: float, gone: Collection[int] = ()) -> Budget:
    """What a share of the block weights leaves for linears; of blocks that are `gone` nothing counts.

    Raises:
        UserError: `keep` is no share, or less is to stay than cannot be replaced.
    """
    check_share(keep)
    there = [(index, name) for index, name in enumerate(streamed.block_names) if index not in gone]
    total = sum(streamed.nbytes(name) for _, name in there) // 4
    replaceable = 0
    for index, name in there:
        block = streamed.model.get_submodule(name)
        replaceable += sum(block.get_submodule(linear).weight.numel() for linear in linears_of(streamed, index))
    made = Budget(total, replaceable, keep)
    if keep < 1 and not replaceable:
        raise UserError(
            f"the blocks of {type(streamed.model).__name__} have no matrix that can be replaced: all their {total:,} weights are in norms, "
            "biases, experts, routers or mixers. Leave whole blocks out: --method depth."
        )
    if keep < 1 and made.of_linears <= 0:
        fixed = total - replaceable
        raise UserError(
            f"--keep {keep} leaves {keep * total:,.0f} of {total:,} block weights, and {fixed:,} of them are none that can be "
            f"replaced (norms, biases, experts, routers, mixers). Keep more than {fixed / total:.3g}."
        )
    return made


def check_share(keep: float) -> None:
    """Whether a share is one.

    Raises:
        UserError: it is not above 0 and at most 1.
    """
    if not 0 < keep <= 1:
        raise UserError(f"--keep {keep}: a share of the block weights, above 0 and at most 1")


def check_calibration(streamed: Streamed, rows: Rows) -> None:
    """Tell when there are few tokens for the widest input, and refuse when there are fewer than inputs.

    Raises:
        UserError: fewer tokens than inputs, so that some directions were never seen.
    """
    model, names = streamed.model, enumerate(streamed.block_names)
    linears = [model.get_submodule(f"{name}.{linear}") for index, name in names for linear in linears_of(streamed, index)]
    widest = max((shape_of(linear)[1] for linear in linears), default=0)
    if rows.count < widest:
        raise UserError(
            f"{rows.text}: {rows.count:,} tokens for matrices with up to {widest:,} inputs leave directions that were never seen. "
            f"Give a longer text or more --tokens, {ENOUGH * widest:,} or so."
        )
    if rows.count < ENOUGH * widest:
        tell(f"few calibration tokens: {rows.count:,}, where {ENOUGH} for each of {widest:,} inputs, {ENOUGH * widest:,}, are usual")
