"""Neighbouring blocks merged into one: which pairs, and the block that they become.

The block is the mean of the two, weight by weight (layer merging of arXiv 2406.16330 with equal shares). A rule tells for each block but
the last how well it goes together with the next; the pairs taken are disjoint and of the largest sum.

Legend: B rows, T tokens, D channels of the stream.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnomon.compress.block_matrices import stored_in
from gnomon.compress.group_choice import by_chance, by_continuity
from gnomon.errors import UserError
from gnomon.running.streamed import Block, Streamed
from gnomon.running.token_rows import Rows

Pairs = Sequence[tuple[int, int]]


def by_change(streamed: Streamed, rows: Rows) -> list[float]:
    """Minus how far a block and the next together turn the states, mean cos - 1 of a token's state before and after both."""
    alike: list[float] = []
    before: list[Tensor] = []

    def visit(_index: int, h_BTD: Tensor, block: Block) -> Tensor:
        after_BTD = block(h_BTD)
        if before:
            alike.append(F.cosine_similarity(before.pop(), after_BTD, dim=-1).mean().item() - 1)
        before.append(h_BTD)
        return after_BTD

    streamed.run(rows.tokens_BT, visit, **streamed.without_logits)
    return alike


MERGED_BY: Mapping[str, Callable[[Streamed, Rows, int], list[float]]] = {
    "change": lambda streamed, rows, seed: by_change(streamed, rows),
    "continuity": lambda streamed, rows, seed: by_continuity(streamed, rows, 1.0, seed),
    "random": lambda streamed, rows, seed: by_chance(streamed, rows, 1.0, seed),
}
"""Rules by name: (model, rows, seed) -> for each block but the last, how well it goes together with the next."""


def pairs_by(rule: str, streamed: Streamed, rows: Rows, count: int, seed: int) -> list[tuple[int, int]]:
    """So many pairs, in order.

    Raises:
        UserError: there are fewer pairs than that.
    """
    if 2 * count > len(streamed.blocks):
        raise UserError(
            f"{count} of {len(streamed.blocks)} blocks are to go by merging, and each takes two. Keep half of the blocks or more."
        )
    return likest_pairs(MERGED_BY[rule](streamed, rows, seed), count)


def likest_pairs(likeness: Sequence[float], count: int) -> list[tuple[int, int]]:
    """`count` disjoint pairs of neighbours with the largest sum.

    Args:
        likeness: of each item and the next.
        count: at most half of the items.
    """

    @functools.cache
    def best(items: int, count: int) -> tuple[float, Pairs]:
        if not count:
            return 0.0, ()
        if items < 2 * count:
            return -torch.inf, ()
        total, pairs = best(items - 2, count - 1)
        with_last = total + likeness[items - 2], (*pairs, (items - 2, items - 1))
        return max(best(items - 1, count), with_last)

    return list(best(len(likeness) + 1, count)[1])


def groups_without(blocks: int, gone: Collection[int], merge: bool) -> list[list[int]]:
    """The old blocks that each new one is made of: one, or with `merge` also those after it that are gone.

    Raises:
        UserError: with `merge`, the first block is gone, and has none before it to be merged with.
    """
    if merge and 0 in gone:
        raise UserError("block 0 has none before it to be merged with; name the second block of each pair")
    groups: list[list[int]] = []
    for index in range(blocks):
        if index not in gone:
            groups.append([index])
        elif merge:
            groups[-1].append(index)
    return groups


@contextlib.contextmanager
def merged(streamed: Streamed, group: Sequence[int]) -> Iterator[None]:
    """While open, the first block of a group is in memory and is the mean of all, in the numbers that its weights are stored in.

    Raises:
        UserError: their weights differ in name or shape.
    """
    first = streamed.model.get_submodule(streamed.block_names[group[0]])
    with streamed.held([streamed.block_names[group[0]]]):
        total = {name: parameter.detach().float() for name, parameter in first.named_parameters()}
        for index in group[1:]:
            with streamed.held([streamed.block_names[index]]):
                other = dict(streamed.model.get_submodule(streamed.block_names[index]).named_parameters())
                if {name: p.shape for name, p in other.items()} != {name: p.shape for name, p in total.items()}:
                    raise UserError(f"blocks {group[0]} and {index} differ in their weights' names or shapes and have no mean")
                total = {name: before + other[name].float() for name, before in total.items()}
        for name, tensor in total.items() if group[1:] else ():
            path, _, last = name.rpartition(".")
            kind = stored_in(streamed, f"{streamed.block_names[group[0]]}.{name}")
            setattr(first.get_submodule(path), last, nn.Parameter((tensor / len(group)).to(kind).float(), requires_grad=False))
        yield
