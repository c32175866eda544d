"""A model on disk with some of its linears replaced while a block runs.

Legend: B rows, T tokens, D channels of the stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor

from gnomon.compress.replacements import Replacement
from gnomon.running.block_worth import loss_through
from gnomon.running.streamed import Block, Streamed, Visit
from gnomon.running.token_rows import Rows


@contextlib.contextmanager
def replaced(streamed: Streamed, index: int, made: Mapping[str, Replacement]) -> Iterator[None]:
    """While open, the block's weights are in memory and these linears are what they become."""
    name = streamed.block_names[index]
    block = streamed.model.get_submodule(name)
    with streamed.held([name]):
        before = {linear: block.get_submodule(linear) for linear in made}
        try:
            for linear, one in made.items():
                block.set_submodule(linear, one.module())
            yield
        finally:
            for linear, module in before.items():
                block.set_submodule(linear, module)


def visiting(streamed: Streamed, load: Callable[[int], Mapping[str, Replacement]]) -> Visit:
    """What runs each block with what its linears become, for `Streamed.run`."""

    def visit(index: int, h_BTD: Tensor, block: Block) -> Tensor:
        with replaced(streamed, index, load(index)):
            return block(h_BTD)

    return visit


def loss_with(
    streamed: Streamed, rows: Rows, load: Callable[[int], Mapping[str, Replacement]], gone: Collection[int] = ()
) -> float:
    """Loss, nats a token, of the first 4,096 tokens with these replacements, and without the blocks that are `gone`."""
    some = rows.first(4096)
    return loss_through(streamed, some, visiting(streamed, load), gone)
