"""What the runs of a study came to, in one small text file from which the study goes on anywhere, without the run folders.

One JSON object a line, in the order of finishing: the recipe's fingerprint (by which a run is known again), what was varied, and
value, fate, seconds and a few points of the curve. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gnomon.errors import UserError
from gnomon.files import restored, spelled

FILE = "outcomes.jsonl"

# What may differ between two runs that must come out the same: how a run was shared out, and what was looked at.
_FREE = ("parallel", "name")
_LOOKS = ("log_every", "probe_every", "probe_tokens", "track_every", "save_every", "keep")


def fingerprint(recipe: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits of the settings (nested plain values) that decide what a run comes to."""
    kept = {key: value for key, value in recipe.items() if key not in _FREE}
    if isinstance(kept.get("watch"), Mapping):
        kept["watch"] = {key: value for key, value in kept["watch"].items() if key not in _LOOKS}
    if isinstance(kept.get("compute"), Mapping):
        kept["compute"] = {key: value for key, value in kept["compute"].items() if key != "device"}
    text = json.dumps(spelled(kept), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Fingerprint -> outcome; what was written last counts, and a last line cut short by a kill is left out.

    Raises:
        UserError: another line is not an outcome.
    """
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    found = {}
    for number, line in enumerate(lines, 1):
        try:
            record = restored(json.loads(line))
            found[record["fingerprint"]] = record
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise UserError(f"{path}, line {number}, is no outcome of a run ({error!r}); remove that line") from error
    return found


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add one outcome; what a killed process left of a line is dropped first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(spelled(dict(record)), allow_nan=False).encode() + b"\n"
    with open(path, "a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def thinned(points: Sequence[tuple[int, float]], limit: int = 12) -> list[tuple[int, float]]:
    """A curve at no more than `limit` of its points, both ends among them."""
    if len(points) <= limit:
        return list(points)
    return [points[round(i * (len(points) - 1) / (limit - 1))] for i in range(limit)]
