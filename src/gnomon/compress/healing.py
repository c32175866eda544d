"""`heal`: a smaller model trained briefly on the text it was fitted to, to mend what fitting one matrix after the other could not.

Legend: B rows of a step, T tokens of a row.
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.checkpoints import open_checkpoint
from gnomon.errors import UserError
from gnomon.progress import Progress
from gnomon.running.architecture import library, quietly
from gnomon.running.streamed import open_streamed
from gnomon.running.token_rows import read_rows

HELD_OUT = 8
"""One row in so many is not trained on and tells what healing was worth."""
WEIGHTS = "model*.safetensors*"


@dataclass(frozen=True)
class Healed:
    """What training was worth.

    Attributes:
        steps: of training.
        loss, loss_before: nats a token on rows of the calibration text that were not trained on.
        rows: how many those were.
    """

    steps: int
    loss: float
    loss_before: float
    rows: int


def heal(
    folder: str | Path,
    text: str | Path,
    steps: int,
    *,
    rate: float = 1e-4,
    batch: int = 2,
    tokens: int = 65536,
    length: int | None = 512,
    seed: int = 0,
    source: Any = None,
    progress: bool = False,
) -> Healed:
    """Train every weight of a folder that `compress` or `shorten` wrote, in place, by AdamW (arXiv 1711.05101) with a rate that rises
    over a tenth of the steps and falls along a cosine; betas 0.9 and 0.95, no decay, gradients clipped to norm 1.

    The weights are written over by renames once all steps are done: a kill before that leaves the folder as it was. Where the folder
    brings code, that is loaded, so give no folder but one that was made here.

    Args:
        folder: opened by transformers.
        text: to train on, most likely the calibration text.
        steps: of `batch` rows each.
        rate: the largest.
        tokens, length: of the text, and of a row of it.
        seed: of the order of rows.
        source: the model it was made from, whose tokenizer reads the text; None where the folder has one.
        progress: show progress with an ETA on stderr.

    Raises:
        UserError: no steps, too few rows, or the loss became infinite; nothing is written then.
    """
    folder = Path(folder)
    if steps < 1 or batch < 1:
        raise UserError(f"--heal {steps} with {batch} rows a step: both must be 1 or more")
    rows = read_rows(open_streamed(folder if source is None else source), text, tokens, length)
    held_BT, train_BT = _apart(rows.tokens_BT)
    if len(train_BT) < 1:
        raise UserError(f"{rows.text} makes one row of {rows.tokens_BT.shape[1]} tokens; healing needs one to train on and one to judge by")
    model = _opened(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device=device, dtype=torch.float32)
    before = _loss(model, held_BT, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    order = torch.Generator().manual_seed(seed)
    warmup = max(steps // 10, 1)
    model.train()
    with Progress("healing", steps, "steps") as bar:
        for step in range(steps):
            factor = min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)))
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            some_BT = train_BT[torch.randint(len(train_BT), (batch,), generator=order)].to(device)
            loss = model(input_ids=some_BT, labels=some_BT).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not math.isfinite(norm.item()):
                raise UserError(f"healing went astray at step {step} with a rate of {rate:g}: try a smaller one. The folder is as it was.")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if progress:
                bar.advance(1, f"loss {loss.item():.3f}")
    model.eval()
    after = _loss(model, held_BT, device)
    _write(model.cpu(), folder)
    return Healed(steps, after, before, len(held_BT))


def _apart(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Every eighth row, the first among them, and the others."""
    held = torch.arange(len(tokens_BT)) % HELD_OUT == 0
    return tokens_BT[held], tokens_BT[~held]


@torch.no_grad()
def _loss(model: Any, tokens_BT: Tensor, device: str) -> float:
    return sum(model(input_ids=row.to(device), labels=row.to(device)).loss.item() for row in tokens_BT.split(1)) / len(tokens_BT)


def _opened(folder: Path) -> Any:
    with quietly():
        return library().AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def _write(model: Any, folder: Path) -> None:
    """New weights beside the old ones, in the number type of the file, then renamed over them."""
    kinds = {entry.dtype for entry in open_checkpoint(folder).entries.values()}
    if kinds in ({"BF16"}, {"F16"}):
        model.to(torch.bfloat16 if kinds == {"BF16"} else torch.float16)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as made, quietly():
        model.save_pretrained(made)
        new = sorted(Path(made).glob(WEIGHTS))
        old = {file.name: file for file in folder.glob(WEIGHTS)}
        if {file.name for file in new} != set(old):
            raise UserError(f"{folder} holds {', '.join(sorted(old))} and the healed model would be {', '.join(f.name for f in new)}")
        for file in new:
            file.chmod(old[file.name].stat().st_mode)
            os.replace(file, old[file.name])
