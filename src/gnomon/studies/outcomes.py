"""What the runs of a study came to, in one small text file from which the study goes on anywhere, without the run folders.

One JSON object a line, in the order of finishing: the recipe's fingerprint (by which a run is known again), what was varied, and
value, fate, seconds, a few points of the curve, and of a few steps what the study keeps besides. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon.files import append_record, read_records, restored, spelled
from gnomon.run_folder import read_metrics
from gnomon.studies.study import Outcome, PlannedRun

FILE = "outcomes.jsonl"

# What may differ between two runs that must come out the same: how a run was shared out, and when it was looked at.
_FREE = {
    "parallel", "name", "compute.device", "watch.log_every", "watch.eval_every", "watch.probe_every", "watch.probe_tokens",
    "watch.track_every", "watch.save_every", "watch.keep",
}  # fmt: skip


def fingerprint(recipe: Any) -> str:
    """Sixteen hexadecimal digits of the settings of a recipe (a dataclass) that decide what a run comes to.

    Only settings away from their defaults count, so that a setting added later, which old runs had at its default, changes no
    fingerprint. A default that is changed makes old lines mean another run: then they have to go.
    """
    text = json.dumps(spelled(_chosen(recipe)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _chosen(settings: Any, above: str = "") -> Any:
    """Nested plain values of the settings that are not at their defaults; `above` is the path to them."""
    if not dataclasses.is_dataclass(settings):
        return settings
    kept = {}
    for field in dataclasses.fields(settings):
        value, made = getattr(settings, field.name), field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        if above + field.name not in _FREE and value != default:
            kept[field.name] = _chosen(value, f"{above}{field.name}.")
    # A part that differs only in what is free does not differ.
    return {name: value for name, value in kept.items() if value != {}}


class OutcomesFile:
    """What is known of finished runs, by the fingerprint of their recipes.

    Raises:
        UserError: a line before the last is not an outcome. A last line cut short by a kill is left out.
    """

    def __init__(self, path: Path):
        self.path = path
        known = read_records(path, "outcome of a run", lambda record: (record["fingerprint"], restored(record)))
        self._records: dict[str, dict[str, Any]] = dict(known)

    def __len__(self) -> int:
        return len(self._records)

    def outcome(self, run: PlannedRun, folder: Path) -> Outcome | None:
        """What a run of the same recipe came to, as far as a line tells; `folder` is where it would lie here."""
        record = self._records.get(fingerprint(run.recipe))
        if record is None:
            return None
        points = tuple((int(step), int(tokens), value) for step, tokens, value in record["curve"])
        return Outcome(record["fate"], record["value"], record["seconds"], folder, points, tuple(record.get("records", ())))

    def remember(self, run: PlannedRun, outcome: Outcome, kept: Sequence[str] = ()) -> None:
        """Add a finished run that is not there.

        Args:
            kept: series of its records to keep, where the first of them is there.
        """
        known_by = fingerprint(run.recipe)
        if known_by in self._records:
            return
        self._records[known_by] = {
            "fingerprint": known_by, "variant": run.variant, "lr": run.rate, "seed": run.seed,
            "trial": dict(run.trial or ()), "steps": run.recipe.steps, "fate": outcome.fate, "value": outcome.value,
            "seconds": round(outcome.seconds, 1), "curve": [list(point) for point in outcome.points],
        }  # fmt: skip
        if records := _records(outcome.folder, kept):
            self._records[known_by]["records"] = records
        append_record(self.path, self._records[known_by])


def _records(folder: Path, kept: Sequence[str]) -> list[dict[str, Any]]:
    """Those of a run's records that have the first of the series, at a few steps and to four digits."""
    found = [record for record in read_metrics(folder) if kept[0] in record] if kept else []
    return [_short({key: record[key] for key in ("step", *kept) if key in record}) for record in thinned(found)]


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def thinned(points: Sequence[Any], limit: int = 12) -> list[Any]:
    """A curve at no more than `limit` of its points, both ends among them."""
    if len(points) <= limit:
        return list(points)
    return [points[round(i * (len(points) - 1) / (limit - 1))] for i in range(limit)]
