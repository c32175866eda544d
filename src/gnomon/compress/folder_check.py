"""The proof that a folder is the model that was made."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from gnomon.compress.in_place import visiting
from gnomon.compress.replacements import Replacement
from gnomon.errors import UserError
from gnomon.models.hf.reopening import in_fresh_process
from gnomon.running.streamed import Streamed
from gnomon.running.token_rows import Rows

CLOSE = 1e-4
"""Of the largest logit: what another order of sums may change."""


@torch.no_grad()
def check_folder(streamed: Streamed, load: Callable[[int], Mapping[str, Replacement]], rows: Rows, folder: Path) -> float:
    """Logits of a fresh process, with transformers and without gnomon, against those of the model in memory.

    Returns:
        the largest difference as a share of the largest logit.

    Raises:
        UserError: they differ by more than `CLOSE`.
    """
    tokens_BT = rows.tokens_BT[:2, :128]
    expected = streamed.run(tokens_BT, visiting(streamed, load)).logits
    with tempfile.TemporaryDirectory() as work:
        fresh, _ = in_fresh_process(folder, Path(work), tokens_BT)
    difference = float((fresh - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny))
    if not difference <= CLOSE:
        raise UserError(
            f"the folder is not the model that was made: logits of a fresh process differ by {difference:.3g} of the largest (allowed: "
            f"{CLOSE:g}). Nothing was written. Please report it with the model and the version of transformers."
        )
    return difference
