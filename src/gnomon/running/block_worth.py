"""What each block is worth: the loss on a text without it, every weight read once.

Legend: B rows, T tokens, D channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from gnomon.running.streamed import Block, Streamed, Visit
from gnomon.running.token_rows import Rows


def loss_of(streamed: Streamed, rows: Rows, h_BTD: Tensor) -> float:
    """Mean cross-entropy, nats a token, of the tokens of the text after the first of each row.

    Args:
        h_BTD: the stream after the last block.
    """
    total = 0.0
    # -100 is what cross_entropy passes over.
    next_BT = torch.where(rows.own_T, rows.tokens_BT, -100)[:, 1:]
    for next_T, logits_1TV in zip(next_BT, streamed.logits(rows.tokens_BT, h_BTD)):
        for some_T, some_TV in zip(next_T.split(256), logits_1TV[0, :-1].split(256)):
            total += float(F.cross_entropy(some_TV.float(), some_T, reduction="sum"))
    return total / int((next_BT >= 0).sum())


def loss_through(streamed: Streamed, rows: Rows, visit: Visit, gone: Collection[int] = ()) -> float:
    """Loss, nats a token, with `visit` at each block, and past the blocks that are `gone`."""

    def passing(index: int, h_BTD: Tensor, block: Block) -> Tensor:
        return h_BTD if index in gone else visit(index, h_BTD, block)

    return loss_of(streamed, rows, streamed.stream(rows.tokens_BT, passing))


@torch.no_grad()
def losses_without(
    streamed: Streamed, rows: Rows, gone: Collection[int] = (), tell: Callable[[int], None] = lambda _: None
) -> tuple[float, dict[int, float]]:
    """The loss, and the loss without each block: (whole, block -> loss).

    As many streams as there are blocks pass through the model side by side, each past one block, so memory grows by the states of
    the batch for every block, and the work is that of half as many passes as there are blocks.

    Args:
        gone: blocks that are left out by all.
        tell: called with the number of a block when all streams are through it, and for each loss after the last.
    """
    past: dict[int, Tensor] = {}

    def visit(index: int, h_BTD: Tensor, block: Block) -> Tensor:
        if index in gone:
            return h_BTD
        with streamed.held([streamed.block_names[index]]):
            for number, other_BTD in past.items():
                past[number] = block(other_BTD)
            past[index] = h_BTD
            h_BTD = block(h_BTD)
        tell(index)
        return h_BTD

    whole, without = loss_of(streamed, rows, streamed.stream(rows.tokens_BT, visit)), {}
    for number in list(past):
        without[number] = loss_of(streamed, rows, past.pop(number))
        tell(len(streamed.blocks))
    return whole, without
