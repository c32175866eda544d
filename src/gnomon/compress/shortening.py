"""`shorten`: a model with fewer blocks, left out or merged with a neighbour, checked against the old model that does the same.

Legend: B rows, T tokens, D channels of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.compress.block_choice import BY
from gnomon.compress.budget import open_whole
from gnomon.compress.merging import MERGED_BY, groups_without, merged, pairs_by
from gnomon.compress.shorter_folder import write
from gnomon.errors import UserError, check_name
from gnomon.files import atomic_folder
from gnomon.progress import Progress
from gnomon.running.block_worth import loss_through
from gnomon.running.streamed import Block, Streamed, open_streamed
from gnomon.running.token_rows import Rows, read_rows


class NumberedBlocks(UserError):
    """What a block does depends on its number, so none can be left out or merged."""


CLOSE = 1e-4
"""Of a loss in nats: what rounding may change."""


@dataclass(frozen=True)
class Shortened:
    """What was made.

    Attributes:
        folder: where it lies.
        removed: blocks of the old model that are gone, in the order they were chosen; of merged pairs the second.
        blocks: how many are left.
        parameters, parameters_before: weights of the blocks.
        loss, loss_before: nats a token on the calibration text, which chose the blocks: that of another text is higher.
    """

    folder: Path
    removed: tuple[int, ...]
    blocks: int
    parameters: int
    parameters_before: int
    loss: float
    loss_before: float


def shorten(
    source: Any,
    out: str | Path,
    text: str | Path,
    keep: float = 0.8,
    *,
    by: str | Sequence[int] = "loss",
    merge: bool = False,
    tokens: int = 4096,
    length: int | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Shortened:
    """Leave blocks out of a model, or merge each with the one before it, and write the result as a folder that transformers opens.

    Args:
        source: what `gnomon.checkpoints.open_checkpoint` takes; it is only read.
        out: the folder to make; it appears whole or not at all.
        text: on which the blocks are chosen and both losses measured.
        keep: share of the blocks that stay; 1 keeps all. Not read where `by` says which go.
        by: a key of `BY`: "loss", "change", "continuity" or "random"; or the blocks that go. Of merging, a key of `MERGED_BY`: "change",
            "continuity" or "random"; or the second blocks of the pairs.
        merge: whether each block that goes and the one before it become one, the mean of their weights.
        tokens, length: of the text, and of a row of it.
        seed: of the choice at random.
        config: used instead of config.json.
        progress: show progress with an ETA on stderr.

    Raises:
        UserError: `out` is there already, `keep` leaves no block, the model cannot be run or does not predict the next token.
            Merging leaves half of the blocks at least.
        NumberedBlocks: its blocks depend on their number, so that the shorter model is not the old one with blocks passed over.
    """
    if isinstance(by, str):
        check_name("rule", by, MERGED_BY if merge else BY)
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists already; remove it or choose another name")
    streamed = open_whole(source, config)
    count = len(streamed.blocks)
    left = round(keep * count) if isinstance(by, str) else count - len(set(by) & set(range(count)))
    if not 0 < keep <= 1 or left < 1:
        raise UserError(
            f"--keep {keep} of {count} blocks leaves {max(left, 0)}: give a share above {0.5 / count:.3g} and at most 1"
        )
    rows = read_rows(streamed, text, tokens, length)
    before = _loss(streamed, rows)
    with Progress("choosing", count - left, "blocks") as bar:
        tell = (lambda block: bar.advance(1, f"without block {block}")) if progress else (lambda block: None)
        if not isinstance(by, str):
            removed = list(by)
        elif merge:
            removed = [second for _, second in pairs_by(by, streamed, rows, count - left, seed)]
        else:
            removed = BY[by](streamed, rows, count - left, seed, tell)
    groups = groups_without(count, removed, merge)
    after = _loss(streamed, rows, groups)
    with atomic_folder(out) as folder:
        write(streamed, groups, folder)
        _check(folder, rows, after)
    sizes = [streamed.nbytes(name) // 4 for name in streamed.block_names]
    return Shortened(out, tuple(removed), left, sum(sizes[group[0]] for group in groups), sum(sizes), after, before)


def _loss(streamed: Streamed, rows: Rows, groups: Sequence[Sequence[int]] | None = None) -> float:
    """Through all blocks, or through one for each group, which is the mean of it."""
    of = {group[0]: group for group in groups} if groups is not None else {index: [index] for index in range(len(streamed.blocks))}

    def visit(index: int, h_BTD: Tensor, block: Block) -> Tensor:
        with merged(streamed, of[index]):
            return block(h_BTD)

    return loss_through(streamed, rows, visit, set(range(len(streamed.blocks))) - of.keys())


@torch.no_grad()
def _check(folder: Path, rows: Rows, expected: float) -> None:
    """The folder is opened anew, and must lose on the text what the old model loses that passes over the blocks."""
    found = _loss(open_streamed(folder), rows)
    if not abs(found - expected) <= CLOSE * max(1.0, abs(expected)):
        raise NumberedBlocks(
            f"the shorter model loses {found:.4f} nats a token where the old model with the same blocks loses {expected:.4f}: "
            "what its blocks do depends on their number (as with the steps of a sphere, which decay with it), so they cannot be "
            "taken out of this architecture, nor merged."
        )
