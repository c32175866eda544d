"""What lies where in a run folder, and which of its checkpoints is the newest.

RUN/recipe.json          what was asked for
RUN/settings.json        in place of the recipe, where another trainer was watched: what it was asked for
RUN/environment.json     where it ran
RUN/metrics.jsonl        what came out: one JSON object a line, written line by line
RUN/warnings.jsonl       only where there was one: what `gnomon.diagnosis` said of these records, and when
RUN/postmortem.json      only where numbers stopped being finite
RUN/checkpoints/step-00000300/
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from gnomon.errors import UserError
from gnomon.files import restored

RECIPE = "recipe.json"
SETTINGS = "settings.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
WARNINGS = "warnings.jsonl"
POSTMORTEM = "postmortem.json"
CHECKPOINTS = "checkpoints"


def is_run(folder: Path) -> bool:
    return (folder / RECIPE).is_file() and (folder / CHECKPOINTS).is_dir()


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoint_folders(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first. A folder under its final name is whole; the link `latest` is not counted."""
    found = [path for path in (run / CHECKPOINTS).glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=step_of)


def newest_checkpoint(run: Path) -> Path:
    """The checkpoint with the highest step.

    Raises:
        UserError: there is none.
    """
    if not (found := checkpoint_folders(run)):
        why = "a run without a checkpoint yet; let it reach its first" if is_run(run) else "no run folder"
        raise UserError(f"{run} holds no checkpoint: it is {why}. Give a run folder, or a checkpoint in it.")
    return found[-1]


def run_of(checkpoint: Path) -> Path:
    """The run folder that a checkpoint was saved in."""
    return checkpoint.resolve().parent.parent


def locate(path: Path) -> tuple[Path, Path]:
    """The run folder and the checkpoint that a path means: a run and its newest checkpoint, or the checkpoint itself.

    Raises:
        UserError: there is no checkpoint.
    """
    if (path / "model.safetensors").exists():
        return run_of(path), path
    return path, newest_checkpoint(path)


def read_metrics(run: Path, notes: list[str] | None = None) -> list[dict[str, Any]]:
    """The records of a run, each step once and in order; none where it has not written any yet.

    A resumed run may repeat the steps after its checkpoint: what it wrote last counts. Numbers that are not finite
    come back as such; in runs of older versions they are null, which reads as NaN. A last line cut short by a kill is left out.

    Args:
        notes: where given, lines that cannot be read are skipped, and what was skipped is added here.

    Raises:
        UserError: a line that cannot be read before the last, and no `notes` to tell it in.
    """
    path = run / METRICS
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records: dict[Any, dict[str, Any]] = {}
    bad: list[int] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not math.isfinite(record["step"]):
                raise ValueError("its step is not finite")
        except (ValueError, TypeError, KeyError) as error:
            if line.strip():
                bad.append(number)
                if notes is None and number < len(lines):
                    raise UserError(
                        f"{path}, line {number}, is no JSON object with a step ({error}); remove that line"
                    ) from error
            continue
        records[record["step"]] = {key: math.nan if value is None else restored(value) for key, value in record.items()}
    if bad and notes is not None:
        shown = ", ".join(map(str, bad[:5])) + (" …" if len(bad) > 5 else "")
        notes.append(
            f"{run.name}/{METRICS}: {len(bad)} unreadable line{'s' * (len(bad) > 1)} skipped (line {shown}); a run "
            "killed while writing leaves one behind"
        )
    return [records[step] for step in sorted(records)]
