"""A smaller model of `gnomon study compression` after healing: written as a folder, trained there as `gnomon compress --heal` does."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from gnomon.compress import compressed_folder, shorter_folder
from gnomon.compress.healing import HELD_OUT, heal
from gnomon.compress.merging import groups_without
from gnomon.errors import UserError
from gnomon.running.block_worth import loss_through
from gnomon.running.streamed import Streamed, open_streamed
from gnomon.running.token_rows import Rows
from gnomon.studies.compression_methods import Made, present

BATCH, LENGTH = 2, 256
"""Rows of a step, and tokens of a row: so few that a hundred steps of a small model take minutes on a CPU."""


@contextlib.contextmanager
def healed(streamed: Streamed, made: Made, text: str, steps: int, seed: int, rows: Rows) -> Iterator[Streamed]:
    """While open, there is a folder of the smaller model, trained for so many steps on the beginning of the text; no row comes up more
    than once in the mean.

    Args:
        seed: of the order of rows.
        rows: to check by the first of them that the folder is the model it should be.

    Raises:
        UserError: it is not, since what its blocks do depends on their number.
    """
    with tempfile.TemporaryDirectory(prefix="gnomon-heal-") as place:
        folder = Path(place) / "made"
        folder.mkdir()
        if made.gone:
            shorter_folder.write(streamed, groups_without(len(streamed.blocks), made.gone, made.merge), folder)
        else:
            compressed_folder.write(streamed, made.load, folder)
        one = replace(rows, tokens_BT=rows.tokens_BT[:1])
        with present(streamed, made) as visit:
            expected = loss_through(streamed, one, visit)
        written = open_streamed(folder)
        found = loss_through(written, one, lambda _, h_BTD, block: block(h_BTD))
        if not abs(found - expected) <= 1e-3 * max(1.0, expected):
            raise UserError(f"in a folder the smaller model loses {found:.4f} nats and not {expected:.4f}, so it cannot be healed there")
        del written
        tokens = max(steps * BATCH, HELD_OUT) * LENGTH * HELD_OUT // (HELD_OUT - 1)
        with torch.enable_grad():  # the study measures without
            heal(folder, text, steps, batch=BATCH, length=LENGTH, tokens=tokens, seed=seed, source=streamed.checkpoint)
        yield open_streamed(folder)
