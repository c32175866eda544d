"""Which blocks a model can do without: four rules of one signature, (model, rows, how many, seed, tell) -> blocks as they go.

`tell` is called for each block that is chosen, by rules that take long.

Legend: B rows, T tokens, D channels of the stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gnomon.compress.neighbour_likeness import continuity_of
from gnomon.errors import UserError
from gnomon.running.block_worth import losses_without
from gnomon.running.streamed import Block, Streamed
from gnomon.running.token_rows import Rows

Tell = Callable[[int], None]
Rule = Callable[[Streamed, Rows, int, int, Tell], list[int]]


def by_loss(streamed: Streamed, rows: Rows, count: int, seed: int, tell: Tell) -> list[int]:
    """One after the other, each time the block without which the loss is lowest (SLEB, arXiv 2402.09025)."""
    gone: list[int] = []
    while len(gone) < count:
        _, without = losses_without(streamed, rows, gone=gone)
        gone.append(min(without, key=lambda index: without[index]))
        tell(gone[-1])
    return gone


def changes(streamed: Streamed, rows: Rows) -> list[float]:
    """How far each block turns the states: 1 - mean cos of a token's state before and after (ShortGPT, arXiv 2403.03853, Eq. 1)."""
    change: list[float] = []

    def visit(_index: int, h_BTD: Tensor, block: Block) -> Tensor:
        after_BTD = block(h_BTD)
        change.append(1 - F.cosine_similarity(h_BTD, after_BTD, dim=-1).mean().item())
        return after_BTD

    streamed.run(rows.tokens_BT, visit, **streamed.without_logits)
    return change


def by_change(streamed: Streamed, rows: Rows, count: int, seed: int, tell: Tell) -> list[int]:
    """Those that turn the states least."""
    change = changes(streamed, rows)
    return sorted(range(len(change)), key=lambda index: change[index])[:count]


def by_continuity(streamed: Streamed, rows: Rows, count: int, seed: int, tell: Tell) -> list[int]:
    """Those whose matrices point most like the block before: mean |cos| of the leading singular vectors on the side of the stream
    (arXiv 2605.04971). The first block has none before it and stays.

    Raises:
        UserError: no pair of neighbours can be compared, or more blocks are to go than can be.
    """
    alike = continuity_of(streamed.checkpoint)
    if count > len(alike):
        raise UserError(
            f"continuity tells of {len(alike)} blocks, and {count} are to go. Keep more, or choose with --by loss."
        )
    mean = {layer: sum(values.values()) / len(values) for layer, values in alike.items()}
    return sorted(mean, key=lambda layer: -mean[layer])[:count]


def by_chance(streamed: Streamed, rows: Rows, count: int, seed: int, tell: Tell) -> list[int]:
    """At random: what every rule has to beat."""
    order = torch.randperm(len(streamed.blocks), generator=torch.Generator().manual_seed(seed))
    return order[:count].tolist()


BY: dict[str, Rule] = {"loss": by_loss, "change": by_change, "continuity": by_continuity, "random": by_chance}
"""The rules by name."""
