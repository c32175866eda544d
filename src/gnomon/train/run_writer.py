"""The run folder: `recipe.json`, `environment.json`, `metrics.jsonl`, `checkpoints/`, `report.html`."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import gnomon
from gnomon.errors import UserError
from gnomon.files import atomic, read_json, spelled, write_json
from gnomon.run_folder import ENVIRONMENT, METRICS, RECIPE, read_metrics
from gnomon.train.recipe import Recipe, difference, from_dict, to_dict
from gnomon.train.sinks import Sink

FREE = ("parallel.", "compute.device:")


def open_run(folder: Path, recipe: Recipe) -> None:
    """Create the folder with its recipe, or check that the one there is a run of the same recipe.

    How the run is shared out (`parallel.…`) and the device may change from start to start; `environment.json` tells which.

    Raises:
        UserError: the folder holds another recipe (the message lists what differs), or other files.
    """
    file = folder / RECIPE
    if file.exists():
        changes = [line for line in difference(load_recipe(folder), recipe) if not line.startswith(FREE)]
        if changes:
            raise UserError(
                f"{folder} holds a run of another recipe:\n  " + "\n  ".join(changes) + "\n"
                "Give the same settings to continue it, or another --out for a new run."
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no recipe.json; give another --out")
    write_json(file, to_dict(recipe))


def load_recipe(folder: Path) -> Recipe:
    """The recipe of a run folder.

    Raises:
        UserError: there is none.
    """
    file = folder / RECIPE
    if not file.exists():
        raise UserError(
            f"{folder} is not a run folder: it has no recipe.json. Make one with `gnomon train --out {folder}`."
        )
    return from_dict(read_json(file))


def write_environment(folder: Path, **facts: Any) -> None:
    """What the numbers were made with."""
    write_json(
        folder / ENVIRONMENT,
        {
            "gnomon": gnomon.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": " ".join(os.path.basename(a) if i == 0 else a for i, a in enumerate(sys.argv)),
            **facts,
        },
    )


class Metrics:
    """Appends records to `metrics.jsonl`, one JSON object a line, flushed line by line, and hands them to the sinks.

    A number that is not finite (a validation loss that overflowed) is spelled, since JSON has none: "nan", "inf".

    Opening drops the records after `step` (made by a process killed after its last checkpoint), and a line cut short.
    Of several processes one `writes`; the others only remember what is recent.
    """

    def __init__(self, folder: Path, step: int, sinks: Sink | None = None, *, writes: bool = True):
        self._sinks = sinks
        self.path = folder / METRICS
        self.recent: list[dict[str, Any]] = []
        if self.path.exists():
            kept = [record for record in read_metrics(folder) if record["step"] <= step]
            if writes:
                with atomic(self.path, "w") as file:
                    file.writelines(json.dumps(spelled(record)) + "\n" for record in kept)
            self.recent = kept[-50:]
        self._file = open(self.path if writes else os.devnull, "a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(spelled(record), allow_nan=False) + "\n")
        self._file.flush()
        if self._sinks is not None:
            self._sinks.write(record)
        self.recent = [*self.recent[-49:], record]

    def close(self) -> None:
        self._file.close()
        if self._sinks is not None:
            self._sinks.close()
