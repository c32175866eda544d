"""Which neighbouring blocks share: a model cut into groups, by rules of one signature.

A rule tells how much each block is like the one after it; the cuts are put where it is least, between as many groups as there would
be of equal size.

Legend: D channels, L blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gnomon.compress.neighbour_likeness import continuity_of, sharing_losses
from gnomon.errors import UserError, check_name
from gnomon.running.streamed import Streamed
from gnomon.running.token_rows import Rows

Likeness = Callable[[Streamed, Rows, float, int], list[float]]
"""(model, calibration rows, share that stays, seed) -> for each block but the last, how like the next it is."""


def equal_groups(blocks: int, size: int) -> list[list[int]]:
    """0 … size - 1, size … 2 size - 1, and so on; the last may be smaller.

    Raises:
        UserError: the size is not between 1 and the number of blocks.
    """
    if not 1 <= size <= blocks:
        raise UserError(f"--group {size}: a number of neighbouring blocks, from 1 to {blocks}")
    return [list(range(first, min(first + size, blocks))) for first in range(0, blocks, size)]


def cut_where_least(likeness: Sequence[float], size: int) -> list[list[int]]:
    """As many groups as `equal_groups` makes, none larger than twice `size`, of the least sum of likeness across the cuts.

    Args:
        likeness: of each block and the next.
        size: of a group in the mean.
    """
    blocks = len(likeness) + 1
    count = len(equal_groups(blocks, size))
    # best[g][i]: least sum across cuts when the first i blocks make g groups, and where the last of them begins.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for _ in range(count):
        reached: dict[int, tuple[float, int]] = {}
        for begin, (total, _) in best[-1].items():
            if begin == blocks:
                continue
            total += likeness[begin - 1] if begin else 0.0
            for end in range(begin + 1, min(begin + 2 * size, blocks) + 1):
                if end not in reached or total < reached[end][0]:
                    reached[end] = (total, begin)
        best.append(reached)
    groups, end = [], blocks
    for reached in reversed(best[1:]):
        begin = reached[end][1]
        groups.append(list(range(begin, end)))
        end = begin
    return groups[::-1]


def by_continuity(streamed: Streamed, rows: Rows, keep: float, seed: int) -> list[float]:
    """Mean |cos| of leading singular vectors of one block and the next, on the side of the stream (arXiv 2605.04971).

    Raises:
        UserError: a pair of neighbours cannot be compared.
    """
    alike = continuity_of(streamed.checkpoint)
    missing = [index for index in range(1, len(streamed.blocks)) if index not in alike]
    if missing:
        raise UserError(f"continuity does not tell how block {missing[0]} is like the one before. Choose groups with --groups equal.")
    return [sum(alike[index].values()) / len(alike[index]) for index in range(1, len(streamed.blocks))]


def by_tail(streamed: Streamed, rows: Rows, keep: float, seed: int) -> list[float]:
    """Minus the energy that sharing with the next would lose (whitened tail energy), mean over roles; a pass over the text."""
    return [-sum(roles.values()) / len(roles) for roles in sharing_losses(streamed, rows, keep)]


def by_chance(streamed: Streamed, rows: Rows, keep: float, seed: int) -> list[float]:
    """Random numbers: what every rule has to beat."""
    return torch.rand(len(streamed.blocks) - 1, generator=torch.Generator().manual_seed(seed)).tolist()


GROUPS: dict[str, Likeness] = {"continuity": by_continuity, "tail": by_tail, "random": by_chance}
"""Rules by name, beside "equal"."""


def find_groups(
    streamed: Streamed, rows: Rows, keep: float, size: int, groups: str | Sequence[Sequence[int]] = "equal", seed: int = 0
) -> list[list[int]]:
    """The groups of a model's blocks.

    Args:
        size: of a group; in the mean, where a rule cuts.
        groups: "equal", a key of `GROUPS`, or the groups themselves.

    Raises:
        UserError: no such rule, or groups that are not the blocks in order, each once.
    """
    blocks = len(streamed.blocks)
    if isinstance(groups, str):
        equal = equal_groups(blocks, size)
        if check_name("way to find groups", groups, ["equal", *GROUPS]) == "equal" or len(equal) == 1:
            return equal
        return cut_where_least(GROUPS[groups](streamed, rows, keep, seed), size)
    if [index for group in groups for index in group] != list(range(blocks)) or not all(groups):
        raise UserError(f"groups are neighbouring blocks in order, each of the {blocks} in one; got {[list(group) for group in groups]}")
    return [list(group) for group in groups]
