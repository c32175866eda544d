"""The records of many watched runs in one small file, from which warnings are judged again without a run.

One JSON object a line, gzipped: a run's name, seed, half, kind and twin; the loss of every step; and, as columns over the measured
records, all that a rule reads, to three digits, heads reduced as `gnomon.series` says.
"""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gnomon.diagnosis import RULES
from gnomon.diagnosis.readings import by_place, role
from gnomon.errors import UserError
from gnomon.files import atomic, restored, spelled
from gnomon.series import known
from gnomon.studies.warning_verdict import WatchedRun

EVERY_STEP = ("loss", "grad_norm")
MEASURED = tuple(dict.fromkeys(key for rule in RULES for key in rule.reads if key not in (*EVERY_STEP, "unigram")))

ROLES = {"sigma_max": ("query", "key")}
"""Of these series rules look at these roles alone."""


def pack(runs: Iterable[WatchedRun], file: Path) -> None:
    """Write the runs to a file; the same runs make the same bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed:
        for run in runs:
            packed.write(json.dumps(spelled(_packed(run)), allow_nan=False, separators=(",", ":")).encode() + b"\n")
    with atomic(file, "wb") as whole:
        whole.write(buffer.getvalue())


def unpack(file: Path) -> list[WatchedRun]:
    """The runs of a file.

    Raises:
        UserError: it is not such a file.
    """
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            return [_unpacked(restored(json.loads(line))) for line in lines]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} holds no records of watched runs ({error}); make it with gnomon.studies.warning_page") from error


def _packed(run: WatchedRun) -> dict[str, Any]:
    measured = [record for record in run.records if any(key in record for key in MEASURED) or "val_loss" in record]
    series: dict[str, Any] = {"val_loss": [_short(record.get("val_loss")) for record in measured]}
    for key in MEASURED:
        if known(key).over == "run":
            series[key] = [_short(record.get(key)) for record in measured]
            continue
        found = [by_place(record, key) for record in measured]
        places = dict.fromkeys(place for values in found for place in values if role(place) in ROLES.get(key, (role(place),)))
        series[key] = {place: [_short(values.get(place)) for values in found] for place in places}
    return {
        "name": run.name, "seed": run.seed, "half": run.half, "kind": run.kind, "twin": run.twin,
        "unigram": _short(next((record["unigram"] for record in run.records if "unigram" in record), None)),
        "steps": [record["step"] for record in run.records],
        **{key: [_short(record.get(key)) for record in run.records] for key in EVERY_STEP},
        "measured": [record["step"] for record in measured], "series": series,
    }  # fmt: skip


def _unpacked(line: dict[str, Any]) -> WatchedRun:
    records: dict[int, dict[str, Any]] = {step: {"step": step} for step in line["steps"]}
    for key in EVERY_STEP:
        for record, value in zip(records.values(), line[key], strict=True):
            record[key] = value
    if records and line["unigram"] is not None:
        next(iter(records.values()))["unigram"] = line["unigram"]
    for index, step in enumerate(line["measured"]):
        for key, columns in line["series"].items():
            if isinstance(columns, list):
                records[step][key] = columns[index]
            elif at := {place: column[index] for place, column in columns.items() if column[index] is not None}:
                records[step][key] = at
    return WatchedRun(line["name"], line["seed"], line["half"], line["kind"], line["twin"], tuple(records.values()))


def _short(value: float | None) -> float | None:
    return float(f"{value:.3g}") if value is not None and math.isfinite(value) else value
