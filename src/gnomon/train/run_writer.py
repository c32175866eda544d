"""The run folder: `recipe.json`, `environment.json`, `metrics.jsonl`, `checkpoints/`, `report.html`."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import gnomon
from gnomon.diagnosis import Diagnosis, RunWarning
from gnomon.errors import UserError
from gnomon.files import atomic, read_json, spelled, write_json
from gnomon.run_folder import ENVIRONMENT, METRICS, RECIPE, WARNINGS, checkpoint_folders, read_metrics, step_of
from gnomon.train.recipe import Recipe, difference, from_dict, to_dict
from gnomon.train.schedule import ratio
from gnomon.train.sinks import Sink

FREE = ("parallel.", "compute.device:")
EXTENDABLE = ("steps:", "schedule.", "watch.")


def check_run(folder: Path, recipe: Recipe, *, extend: bool = False) -> str:
    """Whether the recipe can be run, or gone on with, in a folder.

    How the run is shared out (`parallel.…`) and the device may change from start to start; `environment.json` tells which.

    Args:
        extend: a finished run may get more steps, and for these another schedule and other measurements.

    Returns:
        how it would be extended, in a line; "" where nothing differs or nothing is there.

    Raises:
        UserError: the folder holds another recipe (the message lists what differs), or other files.
    """
    if not (folder / RECIPE).exists():
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no recipe.json; give another --out")
        return ""
    old = load_recipe(folder)
    changes = [line for line in difference(old, recipe) if not line.startswith(FREE)]
    if not changes:
        return ""
    finished = [step_of(path) for path in checkpoint_folders(folder)][-1:] == [old.steps]
    longer = recipe.steps > old.steps and all(line.startswith(EXTENDABLE) for line in changes)
    if extend and finished and longer:
        return _extension(old, recipe)
    raise UserError(
        f"{folder} holds a run of another recipe:\n  " + "\n  ".join(changes) + "\n"
        "Give the same settings to continue it, or another --out for a new run"
        f" (with --set branch={folder} one that goes on from here)."
        + (" Once it is finished it can get more steps." if longer and extend else "")
    )


def open_run(folder: Path, recipe: Recipe, *, extend: bool = False) -> str:
    """`check_run`, and write the recipe where it is new; of an extended run the one until then is kept beside it."""
    extension, file = check_run(folder, recipe, extend=extend), folder / RECIPE
    if extension:
        old = load_recipe(folder)
        write_json(folder / f"recipe-until-{old.steps:08d}.json", to_dict(old))
    if extension or not file.exists():
        write_json(file, to_dict(recipe))
    return extension


def _extension(old: Recipe, new: Recipe) -> str:
    """The rate is a function of the step and of how many there are, so more steps change it from one step to the next."""
    ended = old.optim.lr * ratio(old.schedule, old.steps - 1, old.steps)
    goes_on = new.optim.lr * ratio(new.schedule, old.steps, new.steps)
    return (
        f"extended from {old.steps} to {new.steps} steps: schedule {new.schedule.name} over all of them, so the rate, "
        f"which ended at {ended:.3g}, goes on at {goes_on:.3g}"
    )


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
    """What the numbers were made with; `directory` is where the run was first started, which relative paths start from."""
    before = read_json(folder / ENVIRONMENT).get("directory") if (folder / ENVIRONMENT).exists() else None
    directory = before if before is not None and Path(before).is_dir() else str(Path.cwd())
    write_json(
        folder / ENVIRONMENT,
        {
            "gnomon": gnomon.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "directory": directory,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": " ".join(os.path.basename(a) if i == 0 else a for i, a in enumerate(sys.argv)),
            **facts,
        },
    )


class Metrics:
    """Appends records to `metrics.jsonl`, one JSON object a line, flushed line by line, and hands them to the sinks; warnings that
    begin with a record go to `warnings.jsonl`.

    A number that is not finite (a validation loss that overflowed) is spelled, since JSON has none: "nan", "inf".

    Opening drops the records after `step` (made by a process killed after its last checkpoint), and a line cut short.
    Of several processes one `writes`; the others only remember what is recent.

    Attributes:
        recent: the last fifty records.
        diagnosis: what rules say of the run so far.
    """

    def __init__(self, folder: Path, step: int, sinks: Sink | None = None, *, writes: bool = True):
        self._sinks, self._writes = sinks, writes
        self.path: Path = folder / METRICS
        self._warnings = folder / WARNINGS
        self.recent: list[dict[str, Any]] = []
        self.diagnosis: Diagnosis = Diagnosis()
        if self.path.exists():
            kept = [record for record in read_metrics(folder) if record["step"] <= step]
            begun = [warning for record in kept for warning in self.diagnosis.take(record)]
            if writes:
                with atomic(self.path, "w") as file:
                    file.writelines(json.dumps(spelled(record)) + "\n" for record in kept)
                self._warnings.unlink(missing_ok=True)
                self._write_warnings(begun)
            self.recent = kept[-50:]
        self._file = open(self.path if writes else os.devnull, "a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> list[RunWarning]:
        """Add a record; returns the warnings that begin with it."""
        self._file.write(json.dumps(spelled(record), allow_nan=False) + "\n")
        self._file.flush()
        if self._sinks is not None:
            self._sinks.write(record)
        self.recent = [*self.recent[-49:], record]
        begun = self.diagnosis.take(record)
        self._write_warnings(begun)
        return begun

    def _write_warnings(self, begun: Sequence[RunWarning]) -> None:
        if begun and self._writes:
            with open(self._warnings, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(spelled(dataclasses.asdict(one)), allow_nan=False) + "\n" for one in begun)

    def close(self) -> None:
        self._file.close()
        if self._sinks is not None:
            self._sinks.close()
