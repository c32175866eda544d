"""A folder opened by a stranger: a process of its own, with transformers and without gnomon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gnomon.errors import UserError
from gnomon.files import read_json

# Run as a program, never imported: it needs transformers.
_PROGRAM = Path(__file__).with_name("fresh_process.py")


def in_fresh_process(folder: Path, work: Path, tokens_BT: Tensor, text: str | None = None) -> tuple[Tensor, dict[str, Any]]:
    """Logits (B, T, V), fp32, of the model in `folder`, and what its tokenizer makes of `text`: {"class", "ids", "text"}.

    Args:
        work: an empty folder for what goes to and fro.

    Raises:
        UserError: the folder cannot be opened; the message has the last words of the process.
    """
    save_file({"tokens": tokens_BT.contiguous()}, work / "tokens.safetensors")
    if text is not None:
        (work / "text.txt").write_text(text, encoding="utf-8")
    # Code from the folder is copied into a cache, which here is thrown away.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(work / "modules")}
    done = subprocess.run(
        [sys.executable, "-P", str(_PROGRAM), str(folder), str(work), str(torch.get_num_threads())],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise UserError(
            "a fresh process cannot open the folder; nothing was written. Its last words:\n  "
            + "\n  ".join(lines[-4:])
        )
    return load_file(work / "logits.safetensors")["logits"], read_json(work / "told.json")
