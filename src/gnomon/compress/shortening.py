"""`shorten`: a model with fewer blocks, checked against the model that passes over them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gnomon.compress.block_choice import BY
from gnomon.compress.budget import open_whole
from gnomon.compress.shorter_folder import write
from gnomon.errors import UserError, check_name
from gnomon.files import atomic_folder
from gnomon.progress import Progress
from gnomon.running.block_worth import loss_through
from gnomon.running.streamed import Streamed, open_streamed
from gnomon.running.token_rows import Rows, read_rows


class NumberedBlocks(UserError):
    """What a block does depends on its number, so none can be left out."""


CLOSE = 1e-4
"""Of a loss in nats: what rounding may change."""


@dataclass(frozen=True)
class Shortened:
    """What was made.

    Attributes:
        folder: where it lies.
        removed: blocks of the old model that are gone, in the order they were chosen.
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
    tokens: int = 4096,
    length: int | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Shortened:
    """Leave blocks out of a model and write the rest as a folder that transformers opens.

    Args:
        source: what `gnomon.checkpoints.open_checkpoint` takes; it is only read.
        out: the folder to make; it appears whole or not at all.
        text: on which the blocks are chosen and both losses measured.
        keep: share of the blocks that stay; 1 keeps all. Not read where `by` says which go.
        by: a key of `BY`: "loss", "change", "continuity" or "random"; or the blocks that go.
        tokens, length: of the text, and of a row of it.
        seed: of the choice at random.
        config: used instead of config.json.
        progress: show progress with an ETA on stderr.

    Raises:
        UserError: `out` is there already, `keep` leaves no block, the model cannot be run or does not predict the next token.
        NumberedBlocks: its blocks depend on their number, so that the shorter model is not the old one with blocks passed over.
    """
    if isinstance(by, str):
        check_name("rule", by, BY)
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
        removed = BY[by](streamed, rows, count - left, seed, tell) if isinstance(by, str) else list(by)
    kept = [index for index in range(count) if index not in removed]
    after = _loss(streamed, rows, removed)
    with atomic_folder(out) as folder:
        write(streamed, kept, folder)
        _check(folder, rows, after)
    sizes = [streamed.nbytes(name) // 4 for name in streamed.block_names]
    return Shortened(out, tuple(removed), left, sum(sizes[index] for index in kept), sum(sizes), after, before)


def _loss(streamed: Streamed, rows: Rows, gone: Collection[int] = ()) -> float:
    return loss_through(streamed, rows, lambda index, h_BTD, block: block(h_BTD), gone)


@torch.no_grad()
def _check(folder: Path, rows: Rows, expected: float) -> None:
    """The folder is opened anew, and must lose on the text what the old model loses that passes over the blocks."""
    found = _loss(open_streamed(folder), rows)
    if not abs(found - expected) <= CLOSE * max(1.0, abs(expected)):
        raise NumberedBlocks(
            f"the shorter model loses {found:.4f} nats a token where the model that passes over the same blocks loses {expected:.4f}: "
            "what its blocks do depends on their number (as with the steps of a sphere, which decay with it), so they cannot be "
            "taken out of this architecture."
        )
