"""What to take for a planned run, by what was measured: residual, optimizer, settings, and how far all of it reaches.

The map measures one axis at a time from a common centre. So what a contestant gains at a planned run is forecast from main effects:
its difference to the tuned baseline at the centre, plus on every axis what that changes at the point nearest to the plan (nearest in
octaves). Intervals add in quadrature. No axis is assumed to act on another, and nothing is extrapolated: beyond the last point the last
point counts, and the distance is told. Where a contestant was not measured on an axis its effect is taken as none, give or take the
largest that any other showed there (or a contestant would gain by being measured less), and that is told.

The contestant with the lowest upper end of its forecast is recommended, on the text where it does worst, if that end is below zero
and the forecast below -`NOISE`; else the tuned baseline. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.errors import UserError
from gnomon.train.evidence import Row

BASELINE = "Pre-LN + Muon"
NOISE = 0.01
"""A forecast smaller than this (nats) recommends nothing; as in verdicts of studies."""

AXES = {"layers": "depth", "width": "width", "steps": "steps", "tokens": "tokens"}
"""Of a row and a plan -> the axis of the map along which it moves."""

REACH = 0.5
"""Octaves outside of what was measured up to which a preset takes a recommendation, or settings, unasked. Its own were found at its size:
with the table's settings for Pre-LN + Muon `tiny` ends at 1.756, as it is at 1.735 (one seed; docs/log.md, 2026-12-01)."""

FAR = 2.0
"""Octaves outside from which on a recommendation is called a guess."""

SEARCHED = 3
"""From so many tuning runs on the rate is searched; with fewer it may be off by an octave either way, and that is counted."""


class NothingMeasured(UserError):
    """There is no evidence on what was asked."""


@dataclass(frozen=True)
class Plan:
    """A planned run; `tokens` are those of a step."""

    layers: int
    width: int
    steps: int
    tokens: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise UserError(f"{name} of a planned run must be at least 1, got {value}")


def plan(layers: int, width: int, tokens: float, batch_tokens: int | None = None) -> Plan:
    """A plan by all its tokens. Without `batch_tokens` a step takes the power of two nearest to a twenty-thousandth of them, from 512
    to 524,288.

    Raises:
        UserError: a number below 1.
    """
    if not tokens >= 1:
        raise UserError(f"a run has at least one token, got {tokens:g}; write them out or as 10e9")
    if batch_tokens is None:
        each = 2 ** min(max(round(math.log2(tokens / 20_000)), 9), 19)
    else:
        each = batch_tokens
    return Plan(layers, width, max(round(tokens / max(each, 1)), 1), each)


@dataclass(frozen=True)
class Forecast:
    """What a contestant is expected to gain over the tuned baseline on one text, nats; negative is better.

    Args:
        used: the rows it rests on, the centre first.
        unmeasured: axes on which this contestant was not measured.
    """

    contestant: str
    text: str
    difference: float
    low: float
    high: float
    used: tuple[Row, ...]
    unmeasured: tuple[str, ...]

    @property
    def diverged(self) -> int:
        return sum(row.diverged for row in self.used)

    @property
    def rank(self) -> float:
        """The upper end; infinite where a run diverged or nothing was compared."""
        return math.inf if self.diverged or math.isnan(self.high) else self.high


@dataclass(frozen=True)
class Advice:
    """A recommendation and what it rests on.

    Args:
        chosen: the forecast of the recommended contestant on the text where it does worst; the baseline's is all zeros.
        residual, residual_options, assignment: of the contestant.
        settings: of its recipe by dotted path, carried over to the plan.
        outside: octaves by which the plan lies outside of what was measured of the contestant, by axis; 0 inside.
        rate_moved: octaves by which the tuned rate moved from the centre to here, by axis.
        forecasts: of all contestants, best first.
        notes: what to know, in sentences.
    """

    planned: Plan
    chosen: Forecast
    residual: str
    residual_options: Mapping[str, Any]
    assignment: str
    settings: Mapping[str, Any]
    outside: Mapping[str, float]
    rate_moved: Mapping[str, float]
    forecasts: tuple[Forecast, ...]
    notes: tuple[str, ...]

    @property
    def reaches(self) -> bool:
        """Whether the plan lies within `REACH` of what was measured, on every axis."""
        return all(abs(octaves) <= REACH for octaves in self.outside.values())

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def advise(
    planned: Plan, rows: Iterable[Row], *, tuning: int = 0, block: str = "plain", pair: tuple[Any, ...] | None = None
) -> Advice:
    """The recommendation for a planned run.

    Args:
        rows: the evidence.
        tuning: runs that can be spent on tuning.
        block: "plain" or "modern".
        pair: residual, its options and assignment, where they are chosen already; the settings are what is asked for.

    Raises:
        NothingMeasured: nothing was measured of the baseline with this block, or of the pair.
    """
    table = [row for row in rows if row.block == block]
    texts = {row.text for row in table if row.axis == "centre" and row.difference is None}
    if not texts:
        raise NothingMeasured(
            f"nothing was compared with the {block} block yet, so there is no evidence to advise by. `gnomon study map` measures it, and "
            "`python -m gnomon.studies.map_evidence` makes the table from its outcomes."
        )
    by_text = {text: [row for row in table if row.text == text] for text in sorted(texts)}
    largest = {
        axis: max(_largest_change(planned, own, attribute, axis) for own in by_text.values()) for attribute, axis in AXES.items()
    }
    every = [found for own in by_text.values() for found in forecasts(planned, own, tuning, largest)]
    names = dict.fromkeys(found.contestant for found in every)
    worst = {name: max((f for f in every if f.contestant == name), key=lambda f: f.rank) for name in names}
    order = sorted(worst.values(), key=lambda f: (f.rank, f.contestant))
    asked = [f for f in order if f.used[0].pair == pair]
    if pair is not None and not asked:
        raise NothingMeasured(f"{pair[0]} with {pair[2]} was not measured with the {block} block")
    best = next((f for f in asked or order if asked or (f.rank < 0 and f.difference < -NOISE)), None)
    chosen = best or next(f for f in order if f.used[0].difference is None)
    moved = rate_moved(chosen)
    outside = {attribute: _outside(planned, attribute, table, chosen.contestant) for attribute in AXES}
    return Advice(
        planned, chosen, *chosen.used[0].pair, settings(planned, chosen, moved), outside, moved, tuple(order),
        tuple(_notes(chosen, best is None, outside, tuning, texts)),
    )  # fmt: skip


def forecasts(planned: Plan, rows: Sequence[Row], tuning: int, largest: Mapping[str, float]) -> list[Forecast]:
    """Of every contestant at the centre of one text; the baseline's is zero.

    Args:
        largest: axis -> the largest change that any contestant showed there, on any text.
    """
    found = []
    for centre in (row for row in rows if row.axis == "centre"):
        own = [row for row in rows if row.contestant == centre.contestant]
        used, unmeasured = [centre], []
        for attribute, axis in AXES.items():
            points = [centre, *(row for row in own if row.axis == axis)]
            nearest = _nearest(planned, points, attribute)
            used += [nearest] if nearest is not centre else []
            if len(points) == 1 and _octaves(getattr(planned, attribute), getattr(centre, attribute)):
                unmeasured.append(axis)
        doubt = math.hypot(*(largest[axis] for axis in unmeasured))
        off = [row for row in own if row.axis == "rate" and row.factor in (0.5, 2.0)]
        if tuning < SEARCHED:
            used += off
            unmeasured += ["rate"] if len(off) < 2 else []
        found.append(_forecast(centre, used, off if tuning < SEARCHED else [], tuple(unmeasured), doubt))
    return found


def _nearest(planned: Plan, points: Iterable[Row], attribute: str) -> Row:
    return min(points, key=lambda row: abs(_octaves(getattr(planned, attribute), getattr(row, attribute))))


def _largest_change(planned: Plan, rows: Sequence[Row], attribute: str, axis: str) -> float:
    """By how much at most a contestant's difference at its point nearest to the plan is another than at the centre, nats."""
    centres = {row.contestant: row for row in rows if row.axis == "centre"}
    changes = [0.0]
    for name, centre in centres.items():
        there = _nearest(planned, [centre, *(row for row in rows if row.axis == axis and row.contestant == name)], attribute)
        if there.difference is not None and centre.difference is not None:
            changes.append(abs(there.difference - centre.difference))
    return max(changes)


def _forecast(centre: Row, used: Sequence[Row], off: Sequence[Row], unmeasured: tuple[str, ...], doubt: float) -> Forecast:
    """Main effects: each point's difference, less that of the centre for every point beyond the first.

    Args:
        doubt: half width for what was not measured.
    """
    if centre.difference is None:
        return Forecast(centre.contestant, centre.text, 0.0, 0.0, 0.0, tuple(used), unmeasured)
    terms = [(row.difference or 0.0, _half(row)) for row in used[1:] if row not in off]
    if off:
        # At a rate that may be an octave off either way: the mean over that octave and the tuned rate.
        terms.append((_mean([centre, *off]), math.hypot(*map(_half, (centre, *off))) / (1 + len(off))))
    again = len(terms) - 1
    total = math.fsum(value for value, _ in terms) - again * centre.difference if terms else centre.difference
    half = math.hypot(*(part for _, part in terms), again * _half(centre)) if terms else _half(centre)
    half = math.hypot(half, doubt)
    return Forecast(centre.contestant, centre.text, total, total - half, total + half, tuple(used), unmeasured)


def _mean(rows: Sequence[Row]) -> float:
    return statistics.fmean(row.difference for row in rows)  # type: ignore[type-var]


def _half(row: Row) -> float:
    return math.nan if row.low is None or row.high is None else (row.high - row.low) / 2


def rate_moved(chosen: Forecast) -> dict[str, float]:
    """Octaves by which the rate that was tuned at each point used differs from that of the centre."""
    centre, *others = chosen.used
    here = centre.settings["optim.lr"]
    return {row.axis: _octaves(row.settings["optim.lr"], here) for row in others if row.axis != "rate"}


def settings(planned: Plan, chosen: Forecast, moved: Mapping[str, float]) -> dict[str, Any]:
    """The contestant's settings at the plan: tuned ones of the centre; the rate times what it moved by along every axis; under AdamW,
    beyond the width that was measured, less in proportion to the width (arXiv 2203.03466: the rate of hidden matrices); warm-up as
    a share of the steps; matrices drawn with 1/sqrt(width)."""
    centre = chosen.used[0]
    widest = max(row.width for row in chosen.used)
    beyond = min(widest / planned.width, 1.0) if centre.assignment == "adamw" else 1.0
    rate = centre.settings["optim.lr"] * 2 ** sum(moved.values()) * beyond
    return {
        **centre.settings,
        "optim.lr": float(f"{rate:.2g}"),
        "schedule.warmup": max(round(centre.warmup * planned.steps), 1),
        "model.init_std": float(f"{planned.width**-0.5:.2g}"),
    }


def to_try(found: Mapping[str, Any], tuning: int) -> list[dict[str, Any]]:
    """Settings of so many tuning runs, the recommendation first: the rate an octave either way, then weight decay, then the rate of
    AdamW's part, then the rate further out. They are whole runs: short ones favour rates that are too high."""
    rate, decay = found["optim.lr"], found.get("optim.weight_decay", 0.1)
    changes = [{}, *({"optim.lr": float(f"{rate * f:.2g}")} for f in (0.5, 2.0))]
    changes += [{"optim.weight_decay": value} for value in (0.01, 0.1, 0.0) if value != decay]
    if "optim.adamw_lr" in found:
        changes += [{"optim.adamw_lr": float(f"{found['optim.adamw_lr'] * f:.2g}")} for f in (0.5, 2.0)]
    changes += [{"optim.lr": float(f"{rate * f:.2g}")} for f in (0.25, 4.0)]
    return changes[:tuning]


def _octaves(value: float, of: float) -> float:
    return math.log2(value / of)


def _outside(planned: Plan, attribute: str, rows: Sequence[Row], contestant: str) -> float:
    """Octaves below the least or above the greatest that was measured of the contestant; negative for below."""
    values = [getattr(row, attribute) for row in rows if row.contestant == contestant and row.seeds > 1]
    here = getattr(planned, attribute)
    return _octaves(here, max(values)) if here > max(values) else min(_octaves(here, min(values)), 0.0)


def _notes(chosen: Forecast, fell_back: bool, outside: Mapping[str, float], tuning: int, texts: Iterable[str]) -> Iterable[str]:
    if fell_back:
        yield f"No contestant is told apart from tuned {chosen.contestant} here, so that is recommended: it is the simplest."
    if chosen.unmeasured:
        yield f"Not measured of it: {', '.join(chosen.unmeasured)}; taken as none, give or take the largest effect that any other had."
    far = [f"{axis} by {abs(octaves):.1f}" for axis, octaves in outside.items() if octaves]
    if far:
        yield f"Outside of what was measured, in octaves: {', '.join(far)}. There nothing is extrapolated; the nearest point counts."
    if any(abs(octaves) > FAR for octaves in outside.values()):
        yield "That is far: take it as a first guess to tune from, not as a finding."
    if tuning < SEARCHED:
        yield f"With fewer than {SEARCHED} tuning runs the rate may be off by an octave; `--tuning {SEARCHED}` counts on a search of it."
    yield f"All of it on: {'; '.join(sorted(texts))}."
