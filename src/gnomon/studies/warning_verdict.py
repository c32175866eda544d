"""Do warnings come in time, and only then? Judged on runs that were made to fail and runs that were not. No torch here.

A run has *failed* where it ends `RISE` nats above its twin (the same run with what makes it fail mended), or in a number that is not
finite. Its failure *shows* at the first measured step at which its validation loss is `RISE` above its own lowest so far,
or that lowest has not fallen by `RISE` for `PATIENCE` of the run. It is *caught* where a warning began before that.
Who has the twin as well sees more: the run is *behind* from the step on at which it stays `RISE` above it, which no user can know and
which is told beside. A run that was not made to fail gives a *false alarm* where any warning begins. A run that was made to fail and
did not is told, and judged neither way.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.diagnosis import RULES, Rule, RunWarning, diagnose

RISE = 0.1
"""Nats."""

PATIENCE = 0.25
"""Share of a run's steps after which a loss that stands still shows it."""


@dataclass(frozen=True)
class WatchedRun:
    """A finished run.

    Args:
        name, seed: the case, and its seed.
        half: the part it belongs to: "set", "judged" or "fresh", see `warnings_study`.
        kind: how it was made to fail; "healthy" where it was not.
        twin: name of the run in which that is mended.
        records: all of it.
    """

    name: str
    seed: int
    half: str
    kind: str
    twin: str
    records: tuple[Mapping[str, Any], ...]

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(step, validation loss)."""
        return [(record["step"], record["val_loss"]) for record in self.records if record.get("val_loss") is not None]


@dataclass(frozen=True)
class Judged:
    """What warnings were worth in one run.

    Args:
        fate: "failed", "unharmed" (made to fail, and did not) or "healthy".
        shown: step at which the loss shows the failure; None where there is none.
        behind: step from which it stays behind its twin; None where there is no failure.
        warnings: what began, remarks included, in order.
    """

    run: WatchedRun
    fate: str
    shown: int | None
    behind: int | None
    warnings: tuple[RunWarning, ...]

    @property
    def first(self) -> RunWarning | None:
        """The first of level "warning"."""
        return next((one for one in self.warnings if one.level == "warning"), None)

    @property
    def lead(self) -> int | None:
        """Steps from the first warning to where the loss shows it; negative where it came after."""
        return None if self.shown is None or self.first is None else self.shown - self.first.step

    @property
    def caught(self) -> bool:
        return self.lead is not None and self.lead > 0

    @property
    def ahead(self) -> bool:
        """Whether a warning began before the run fell behind its twin for good."""
        return self.first is not None and self.behind is not None and self.first.step < self.behind


def judge(runs: Sequence[WatchedRun], rules: Sequence[Rule] = RULES) -> list[Judged]:
    """Every run against its twin."""
    by_name = {(run.name, run.seed): run for run in runs}
    found = []
    for run in runs:
        warnings = tuple(diagnose(run.records, rules))
        if run.kind == "healthy":
            found.append(Judged(run, "healthy", None, None, warnings))
            continue
        twin = by_name[run.twin, run.seed].losses
        if failed(run.losses, twin):
            found.append(Judged(run, "failed", failure_shows(run.losses), falls_behind(run.losses, twin), warnings))
        else:
            found.append(Judged(run, "unharmed", None, None, warnings))
    return found


Losses = Sequence[tuple[int, float]]


def failed(losses: Losses, twin: Losses) -> bool:
    end = losses[-1][1]
    return not math.isfinite(end) or end > twin[-1][1] + RISE


def failure_shows(losses: Losses) -> int:
    """The step at which the loss of a failed run shows it to who has this run alone; its last where nothing does before."""
    begin, end = losses[0][0], losses[-1][0]
    lowest = {step: min(loss for at, loss in losses if at <= step) for step, _ in losses}
    for step, loss in losses:
        before = step - PATIENCE * end
        stands = before >= begin and lowest[step] > lowest[max(at for at in lowest if at <= before)] - RISE
        if not loss <= lowest[step] + RISE or stands:
            return step
    return end


def falls_behind(losses: Losses, twin: Losses) -> int:
    """The step from which a failed run stays `RISE` above its twin."""
    beside, behind = dict(twin), losses[-1][0]
    for step, loss in reversed(losses):
        if loss <= beside.get(step, -math.inf) + RISE:
            break
        behind = step
    return behind


def shares(judged: Sequence[Judged], half: str) -> dict[str, float]:
    """`failed` and `healthy`: how many; `caught`, `ahead` and `false`: which share of these; `lead`: median steps of those caught."""
    here = [one for one in judged if one.run.half == half]
    failed, healthy = ([one for one in here if one.fate == fate] for fate in ("failed", "healthy"))
    leads = [one.lead for one in failed if one.caught and one.lead is not None]
    return {
        "failed": len(failed),
        "healthy": len(healthy),
        "caught": statistics.fmean(one.caught for one in failed) if failed else math.nan,
        "ahead": statistics.fmean(one.ahead for one in failed) if failed else math.nan,
        "false": statistics.fmean(one.first is not None for one in healthy) if healthy else math.nan,
        "lead": statistics.median(leads) if leads else math.nan,
    }


def by_kind(judged: Sequence[Judged], half: str) -> list[dict[str, Any]]:
    """A row for each way to fail."""
    rows = []
    for kind in dict.fromkeys(one.run.kind for one in judged if one.run.kind != "healthy"):
        here = [one for one in judged if one.run.kind == kind and one.run.half == half]
        failed = [one for one in here if one.fate == "failed"]
        first = sorted({one.first.rule for one in failed if one.caught and one.first is not None})
        rows.append({
            "made to fail by": kind, "runs": len(here), "failed": len(failed), "caught": sum(one.caught for one in failed),
            "loss shows it at step": _spread([one.shown for one in failed]),
            "before it fell behind its twin": sum(one.ahead for one in failed),
            "warned so many steps before": _spread([one.lead for one in failed if one.caught]),
            "first warning": ", ".join(first),
        })  # fmt: skip
    return rows


def by_rule(judged: Sequence[Judged], rules: Sequence[Rule] = RULES) -> list[dict[str, Any]]:
    """A row for each rule: its limit, and in how many runs it spoke."""
    rows = []
    for rule in rules:
        row: dict[str, Any] = {"rule": rule.name, "level": rule.level, "limit": f"{'≤' if rule.below else '≥'} {rule.limit:g}"}
        for half in ("set", "judged", "fresh"):
            for fate in ("failed", "healthy"):
                here = [one for one in judged if one.run.half == half and one.fate == fate]
                spoke = sum(any(w.rule == rule.name for w in one.warnings) for one in here)
                row[f"{fate}, {half}"] = f"{spoke} of {len(here)}"
        rows.append(row)
    return rows


def missed(judged: Sequence[Judged], half: str) -> list[dict[str, Any]]:
    """Failed runs that were not caught, false alarms, and runs that did not fail though they should have."""
    rows = []
    for one in judged:
        if one.run.half != half or one.caught or (one.fate == "healthy" and one.first is None):
            continue
        word = {"failed": "missed", "healthy": "false alarm", "unharmed": "did not fail"}[one.fate]
        said = "no warning" if one.first is None else f"{one.first.rule} at step {one.first.step}"
        rows.append({"run": one.run.name, "seed": one.run.seed, "kind": one.run.kind, "what": word,
                     "loss shows it at step": one.shown or "", "first warning": said})  # fmt: skip
    return rows


def _spread(values: Sequence[int | None]) -> str:
    found = sorted(value for value in values if value is not None)
    return "" if not found else str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"
