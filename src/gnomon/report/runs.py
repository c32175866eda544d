"""Reading a run folder: what was asked for (recipe), where it ran (environment), what came out (metrics)."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon.diagnosis import RunWarning, diagnose
from gnomon.errors import UserError
from gnomon.files import read_json
from gnomon.progress import duration, quantity
from gnomon.report.chart_data import drawable, smooth
from gnomon.report.tables import cells, is_number
from gnomon.run_folder import ENVIRONMENT, METRICS, POSTMORTEM, RECIPE, SETTINGS, read_metrics

_COLUMNS = {
    "name": "run", "state": "state", "parameters": "parameters", "tokens": "tokens",
    "loss": "train loss (nats/token)", "val_loss": "final val loss (nats/token)",
    "best_val_loss": "best val loss (nats/token)", "bits_per_byte": "final val loss (bits/byte)",
    "tokens_per_second": "tokens/s", "max_stream_norm": "max stream norm (‖h‖)",
    "max_attention_logit": "max attention logit (nats)", "first_warning": "first warning",
    "seconds": "wall time (h:mm:ss)",
}  # fmt: skip
_FORMATS: dict[str, Any] = {
    "parameters": quantity, "tokens": quantity, "tokens_per_second": quantity, "seconds": duration,
    "loss": ".4f", "val_loss": ".4f", "best_val_loss": ".4f", "bits_per_byte": ".4f",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run folder, read. `metrics` holds each step once, in order; `notes` says what was amiss."""

    folder: Path
    name: str
    recipe: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    postmortem: dict[str, Any] | None
    notes: list[str]

    def column(self, key: str) -> list[float]:
        """The finite numbers that were recorded under `key`."""
        return [row[key] for row in self.metrics if drawable(row.get(key))]

    @functools.cached_property
    def warnings(self) -> list[RunWarning]:
        """What `gnomon.diagnosis` says of these records: the first of each rule, in order."""
        first: dict[str, RunWarning] = {}
        for one in diagnose(self.metrics):
            first.setdefault(one.rule, one)
        return list(first.values())

    def last(self, key: str) -> Any:
        """What was recorded last under `key`, NaN included; None when nothing ever was."""
        return next((row[key] for row in reversed(self.metrics) if key in row), None)


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        UserError: no folder, or `metrics.jsonl` missing or without a single readable line.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no run folder at {folder}. A run folder is what `gnomon train --out` writes.")
    notes: list[str] = []
    metrics = read_metrics(folder, notes)
    if not metrics:
        why = "is missing" if not (folder / METRICS).is_file() else "holds no line that is a JSON object with a \"step\""
        raise UserError(f"{folder / METRICS} {why}, so there is nothing to report. Is {folder} a run folder, and did the "
                        "run reach its first step?")
    # Of a run that another trainer made there are settings, and no recipe.
    asked = RECIPE if (folder / RECIPE).is_file() else SETTINGS
    recipe, environment, postmortem = (_read_dict(folder / name, notes) for name in (asked, ENVIRONMENT, POSTMORTEM))
    name = str((recipe or {}).get("name") or folder.resolve().name)
    return Run(folder, name, recipe or {}, environment or {}, metrics, postmortem, notes)


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Read several, with names that differ: the recipe's name, else the folder's, else its whole path."""
    runs = [read_run(Path(folder)) for folder in folders]
    if not runs:
        raise UserError("a report needs at least one run folder; none was given")
    choices: list[Callable[[Run], str]] = [
        lambda run: run.name,
        lambda run: run.folder.resolve().name,
        lambda run: str(run.folder.resolve()),
    ]
    for choice in choices:
        names = [choice(run) for run in runs]
        if len(set(names)) == len(names):
            return [dataclasses.replace(run, name=name) for run, name in zip(runs, names)]
    raise UserError(f"the same run folder is given twice: {', '.join(map(str, folders))}")


def summary(folder: Path | Run) -> dict[str, Any]:
    """The row that stands for one run; show rows with `report.show(rows, **report.summary_table(rows))`.

    Keys: name, state, parameters, tokens, loss (training, smoothed; nats a token), val_loss (last; nats a token),
    best_val_loss, bits_per_byte (of val_loss, by the average bytes a token of the validation text: it compares
    runs whose tokenizers differ), tokens_per_second (median), max_stream_norm, max_attention_logit, first_warning,
    seconds. What was not recorded is None.

    Raises:
        UserError: as `read_run`.
    """
    run = folder if isinstance(folder, Run) else read_run(Path(folder))
    losses = run.column("loss")
    # A run that ended in NaN says so; its last finite loss would look like a result.
    settled = smooth(losses, len(losses) / 100)[-1] if drawable(run.last("loss")) else run.last("loss")
    return {
        "name": run.name,
        "state": _state(run),
        "parameters": run.environment.get("parameters", run.recipe.get("parameters")),
        "tokens": run.last("tokens"),
        "loss": settled,
        "val_loss": run.last("val_loss"),
        "best_val_loss": min(run.column("val_loss"), default=None),
        "bits_per_byte": _bits_per_byte(run),
        "tokens_per_second": _throughput(run),
        "max_stream_norm": _largest(run, "stream_norm"),
        "max_attention_logit": _largest(run, "attention_logit_max"),
        "first_warning": next((f"{one.rule}, step {one.step}" for one in run.warnings if one.level == "warning"), None),
        "seconds": run.last("seconds"),
    }


def summary_table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How rows of `summary` are shown: keywords for `report.show`, `report.table` and `Page.table`. What no run recorded has no column."""
    columns = {key: title for key, title in _COLUMNS.items() if any(row[key] is not None for row in rows)}
    return {"columns": columns, "formats": {key: form for key, form in _FORMATS.items() if key in columns}}


def side_by_side(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Measure -> run -> its figure as text, of rows of `summary`; what no run recorded is left out."""
    columns, formats = summary_table(rows).values()
    names, *texts = zip(*([cell.text for cell in line] for line in cells(rows, columns, formats)))
    return {title: dict(zip(names, told)) for title, told in zip(list(columns.values())[1:], texts)}


def _read_dict(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = read_json(path)
    except ValueError as error:
        notes.append(f"{path} is not valid JSON and was skipped ({error})")
        return None
    return value if isinstance(value, dict) else {"content": value}


def _state(run: Run) -> str:
    if run.postmortem is not None:
        return "stopped: not finite"
    asked, done = run.recipe.get("steps"), run.metrics[-1]["step"]
    if not is_number(asked):  # another trainer's: nobody has told how far it is to go
        return f"at step {done:,}"
    return "finished" if done >= asked else f"at step {done:,} of {asked:,}"


def _bits_per_byte(run: Run) -> float | None:
    size, loss = run.environment.get("bytes_per_token"), run.last("val_loss")
    return None if size is None or loss is None else loss / size / math.log(2)


def _throughput(run: Run) -> float | None:
    rates = run.column("tokens_per_second")
    if not rates:
        timed = [row for row in run.metrics if drawable(row.get("tokens")) and drawable(row.get("seconds"))]
        rates = [(after["tokens"] - before["tokens"]) / (after["seconds"] - before["seconds"])
                 for before, after in zip(timed, timed[1:]) if after["seconds"] > before["seconds"]]
    return statistics.median(rates) if rates else None


def _largest(run: Run, key: str) -> float | None:
    values: Sequence[float] = [value for row in run.metrics for value in numbers(row.get(key))]
    return max(values, default=None)


def numbers(value: Any) -> list[float]:
    """The finite numbers in a number, a list, or a dict of numbers and lists."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    inside = value if isinstance(value, list) else [value]
    return [item for item in inside if drawable(item)]
