"""Pictures of the map, from whatever part of it is measured; what is not measured shows as a gap.

Legend: a point is a place on an axis; a row is a contestant at a point (`gnomon.train.evidence.Row`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gnomon import report
from gnomon.studies.map_evidence import AXES, place, rows
from gnomon.studies.recipe_study import share
from gnomon.studies.results import Results
from gnomon.studies.study import Variant
from gnomon.train.evidence import Row

ALONG = {"depth": ("layers", "layers"), "width": ("width", "width"), "steps": ("steps", "steps"), "tokens": ("tokens", "tokens a step")}
"""Axis -> the row's attribute, and what it reads."""

BASIN = 0.02
"""Nats above the best within which a rate counts as in the basin."""

UNTUNED = (0.5, 2.0)
"""Times the tuned rate: what may happen to who cannot tune."""

GAIN = "against the tuned baseline (nats)"


def draw(page: report.Page, results: Results) -> None:
    """All of them."""
    measured = rows(results, "")
    if not any(row.difference is not None for row in measured):
        return
    _what_to_take(page, results, measured)
    for axis in ALONG:
        _along(page, axis, measured)
    _tokens_saved(page, results)
    _basins(page, results, measured)


def points(results: Results) -> list[tuple[str, list[Variant]]]:
    """Every point there is, measured or not, with the variants at it: by block and axis, the centre first. Of the rates those an octave
    off, as they are where nobody tunes; the others are a matter of the basin."""
    found: dict[str, list[Variant]] = {}
    order = sorted(results.study.variants, key=lambda v: (place(v)[1] == "modern", AXES.index(place(v)[2] or AXES[-1])))
    for variant in order:
        _, block, axis = place(variant)
        if axis and (axis != "rate" or variant.rates[0] in UNTUNED):
            found.setdefault(_point(variant.name, variant.like or variant.name, block), []).append(variant)
    return list(found.items())


def _point(variant: str, contestant: str, block: str) -> str:
    """What stands behind the contestant's name."""
    where = variant.removeprefix(contestant).lstrip(", ") or "centre"
    return where if block == "plain" else f"modern, {where}"


def best(results: Results, measured: Sequence[Row]) -> list[dict[str, Any]]:
    """By point, the contestant whose interval ends lowest; points without one have no numbers."""
    by_variant = {_key(row): row for row in measured}
    found = []
    for point, variants in points(results):
        here = [row for v in variants if (row := by_variant.get(_key_of(results, v))) is not None]
        compared = [row for row in here if row.difference is not None]
        told: dict[str, Any] = {"point": point, "contestants": f"{len(here)} of {len(variants)}"}
        if compared:
            row = min(compared, key=lambda row: math.inf if row.diverged or row.high is None else row.high)
            told |= {"take": row.contestant if (row.high or 0) < 0 else "not told apart from the baseline", "best": row.contestant,
                     "mean": row.difference, "low": row.low, "high": row.high, "seeds": row.seeds, "verdict": row.word}  # fmt: skip
        found.append(told)
    return found


def _key(row: Row) -> tuple[Any, ...]:
    return row.contestant, row.block, row.axis, row.place, row.factor


def _key_of(results: Results, variant: Variant) -> tuple[Any, ...]:
    name, block, axis = place(variant)
    r = variant.recipe
    return name, block, axis, (r.model.layers, r.model.width, r.steps, r.tokens_per_step), variant.rates[0] if axis == "rate" else 1.0


def _what_to_take(page: report.Page, results: Results, measured: Sequence[Row]) -> None:
    found = best(results, measured)
    page.section("What to take").text(
        "At every point the contestant whose interval ends lowest, and its difference to the tuned baseline of that point. Right of "
        "zero nothing is told apart. At a multiple of the rate nobody tuned. A point without a line is not measured."
    )
    lines = [{**row, "name": f"{row['point']}: {row['best']}" if "best" in row else row["point"]} for row in found]
    drawn = [row for row in lines if "mean" in row]
    zero = report.Axis("mean", GAIN, reference={"baseline": 0.0})
    names = [row["name"] for row in lines]
    page.chart(report.intervals(drawn, "name", zero, "low", "high", "best", "What to take, and what it gains", names=names, beside=False),
               "Line: 95 % t interval of the paired difference, for that comparison alone.", "take")  # fmt: skip
    page.table(found, {"point": "point", "take": "take", "mean": "gain (nats)", "low": "from", "high": "to", "seeds": "seeds",
                       "verdict": "verdict", "contestants": "contestants measured"},
               formats={"mean": "+.4f", "low": "+.4f", "high": "+.4f"})  # fmt: skip


def _along(page: report.Page, axis: str, measured: Sequence[Row]) -> None:
    """Gain and tuned rate of every contestant that was measured at more than one place of the axis."""
    attribute, title = ALONG[axis]
    lines = {}
    for name in dict.fromkeys((row.contestant, row.block) for row in measured):
        line = [row for row in measured if (row.contestant, row.block) == name and row.axis in ("centre", axis)]
        if len(line) > 1:
            lines[name[0] if name[1] == "plain" else f"{name[0]}, modern"] = line
    if not lines:
        return
    x = report.Axis(attribute, title, log=True)
    names = [*lines]
    gains = [
        {attribute: getattr(row, attribute), "difference": row.difference, "low": row.low, "high": row.high, "contestant": name}
        for name, line in lines.items() for row in line if row.difference is not None and row.low is not None
    ]  # fmt: skip
    page.section(f"Along {axis}")
    if gains:
        page.chart(report.curves(gains, x, report.Axis("difference", GAIN, reference={"baseline": 0.0}),
                                 report.Series("contestant", names), f"Difference to the tuned baseline, along {axis}",
                                 line=report.Line(dots=True, band=("low", "high"))),
                   "Band: 95 % t interval. Only the points with a dot were measured.", f"gain-{axis}")  # fmt: skip
    moved = [
        {attribute: getattr(row, attribute), "rate": row.settings["optim.lr"], "contestant": name}
        for name, line in lines.items() for row in line
    ]  # fmt: skip
    page.chart(report.curves(moved, x, report.Axis("rate", "tuned learning rate", log=True), report.Series("contestant", names),
                             f"The rate that won, along {axis}", line=report.Line(dots=True)),
               "Searched over factors of two from the one that won at the centre.", f"rate-{axis}")  # fmt: skip


def savings(results: Results) -> list[dict[str, Any]]:
    """At every depth measured: the share of a baseline's tokens after which a contestant has that baseline's final loss."""
    found = []
    for variant in results.study.variants:
        name, block, axis = place(variant)
        if axis not in ("centre", "depth") or not results.compared(variant.name):
            continue
        for baseline in ("Pre-LN + AdamW", "Pre-LN + Muon"):
            other = variant.name.replace(name, baseline, 1)
            if other != variant.name and other in results and results.compared(other):
                found.append({
                    "contestant": name if block == "plain" else f"{name}, modern", "layers": variant.recipe.model.layers,
                    "baseline": baseline, "share": share(results, variant.name, other),
                })  # fmt: skip
    return found


def _tokens_saved(page: report.Page, results: Results) -> None:
    found = savings(results)
    if not any(math.isfinite(row["share"]) for row in found):
        return
    page.section("Tokens to a baseline's final loss").text(
        "Share of the baseline's tokens after which a contestant's validation loss first is the baseline's last one, mean over seeds. It "
        "is read off the curve of a whole run, whose rate is still high there, so a run made to end there would need fewer. Contestants "
        "that never get there are not drawn."
    )
    for baseline in dict.fromkeys(row["baseline"] for row in found):
        own = [row for row in found if row["baseline"] == baseline]
        if any(math.isfinite(row["share"]) for row in own):
            y = report.Axis("share", f"of the tokens of {baseline}", reference={"as many": 1.0})
            page.chart(report.curves(own, report.Axis("layers", "layers", log=True), y, report.Series("contestant"),
                                     f"Tokens to the final loss of tuned {baseline}", line=report.Line(dots=True)),
                       "", f"tokens-{baseline.rpartition(' ')[2].lower()}")  # fmt: skip
    page.table(found, formats={"share": ".2f"})


def basins(results: Results, measured: Iterable[Row]) -> list[dict[str, Any]]:
    """Of every contestant whose rate was moved: octaves of rates, around the tuned one, that end within `BASIN` of the best, and the
    share of runs that learned. A basin that reaches the last rate tried is at least as wide."""
    found = []
    rated = [row for row in measured if row.axis in ("centre", "rate") and row.block == "plain"]
    for name in dict.fromkeys(row.contestant for row in rated if row.axis == "rate"):
        line = sorted((row for row in rated if row.contestant == name), key=lambda row: row.factor)
        least = min(row.mean for row in line if not math.isnan(row.mean))
        centre = next(i for i, row in enumerate(line) if row.factor == 1.0)
        low = high = centre
        while low and line[low - 1].mean <= least + BASIN:
            low -= 1
        while high + 1 < len(line) and line[high + 1].mean <= least + BASIN:
            high += 1
        runs = [out for v in results.study.variants if place(v)[0] == name and place(v)[2] in ("centre", "rate")
                and place(v)[1] == "plain" for out in results.compared(v.name).values()]  # fmt: skip
        found.append({
            "contestant": name, "octaves": math.log2(line[high].factor / line[low].factor),
            "to the edge": low == 0 or high == len(line) - 1, "rates": len(line),
            "learned": sum(out.fate == "learned" for out in runs) / len(runs),
        })  # fmt: skip
    return found


def _basins(page: report.Page, results: Results, measured: Sequence[Row]) -> None:
    found = basins(results, measured)
    if not found:
        return
    names = [row["contestant"] for row in found]
    line = [
        {"contestant": row.contestant, "factor": row.factor, "loss": row.mean} for row in measured
        if row.contestant in names and row.axis in ("centre", "rate") and row.block == "plain"
    ]  # fmt: skip
    page.section("How wide the basin of rates is")
    page.chart(report.curves(line, report.Axis("factor", "times the tuned rate", log=True), report.Axis("loss", "final loss (nats)"),
                             report.Series("contestant", names), "Final loss over the rate", line=report.Line(dots=True)),
               "Mean over the compared seeds that did not diverge.", "basin")  # fmt: skip
    page.table(found, {"contestant": "contestant", "octaves": f"octaves within {BASIN} nats", "to the edge": "reaches the last rate tried",
                       "rates": "rates", "learned": "runs that learned"}, formats={"octaves": ".0f", "learned": ".0%"})  # fmt: skip
