"""The report of one run, or of several side by side.

A metric is drawn by its type, so that one nobody has heard of gets a chart too: a number as a curve, a list
over depth as a profile and as a curve of its extreme (also a dict of which `gnomon.series` says so), another dict
(matrix -> number) as one small chart for every group of matrices that differ only by their layer.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon import series
from gnomon.files import flatten
from gnomon.report.chart_data import drawable, noisy
from gnomon.report.chart_options import Axis, Line, Series
from gnomon.report.line_charts import curves, profile
from gnomon.report.page import Page
from gnomon.report.runs import Run, numbers, read_runs, side_by_side, summary, summary_table

# Bookkeeping and places rather than results; the two losses have a section of their own.
_NOT_MEASURES = {"step", "tokens", "seconds", "loss", "val_loss", "unigram", "massive_channel", "massive_position"}
_STEP = Axis("step")
_OTHERS = (Axis("tokens"), Axis("seconds", "seconds of training"))
_HALF, _THIRD = (330, 210), (220, 150)


def run_report(folders: Sequence[Path], out: Path, title: str | None = None, figures: bool = True) -> Path:
    """Write the report of one or several run folders, side by side.

    Args:
        out: the HTML file to write; in a folder it is called `report.html`.
        figures: also write PNG, SVG and CSV of every chart into `figures/` beside it.

    Returns: the path of the HTML file.

    Raises:
        UserError: a run folder without metrics; the extra `report` is not installed.
    """
    out = Path(out)
    page = run_page(read_runs(folders), title)
    return page.write(out if out.suffix == ".html" else out / "report.html", figures)


def run_page(runs: Sequence[Run], title: str | None = None) -> Page:
    """The page that `run_report` writes, for callers that add to it first."""
    page = Page(title or _title(runs), f"{len(runs)} runs" if len(runs) > 1 else "")
    for run in runs:
        if run.postmortem is not None:
            told = {key: value for key, value in flatten(run.postmortem).items() if not isinstance(value, list)}
            page.flags([f"{key.replace('_', ' ')}: {value}" for key, value in told.items()],
                       title=f"{run.name} stopped before the update", level="error")
    for run in runs:
        for level, title in (("warning", "warnings"), ("remark", "remarks")):
            said = [str(one) for one in run.warnings if one.level == level]
            page.flags(said, title=f"{run.name}: {title}, when they began", level="warning" if level == "warning" else "note")
    page.flags([note for run in runs for note in run.notes], title="Read with care")
    _overview(page, runs)
    differing, common = _settings(runs)
    if len(runs) > 1:
        page.table(differing, title="Settings that differ")
    _losses(page, runs)
    keys = series.in_order(_measured(runs))
    for section in series.SECTIONS:
        here = [key for key in keys if series.known(key).section == section]
        if here:
            page.section(section)
        for key in here:
            _draw(page, runs, key, series.known(key))
    page.section("Settings")
    page.table(common, title="Shared by all runs" if len(runs) > 1 else "Recipe", folded=True)
    for run in runs:
        if run.environment:
            page.facts(run.environment, title=f"Environment of {run.name}", folded=True)
    return page


def tensor_group(name: str) -> str:
    """A tensor's name, or a place, without its depth: `layers.3.mlp.up.weight` -> `mlp.up`, `text.3.expert7.up` -> `up`."""
    parts = re.sub(r"\.expert\d+(?=\.)|\.weight$", "", name).split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[last + 1 :]) or name


def _overview(page: Page, runs: Sequence[Run]) -> None:
    """What runs came to, a column for each: a line of a dozen figures has no room on most screens. Many runs get a line each."""
    rows = [summary(run) for run in runs]
    told = side_by_side(rows)
    if len(runs) == 1:
        page.facts({title: text for title, by_run in told.items() for text in by_run.values()})
    elif len(runs) <= 4:
        page.table([{"": title} | by_run for title, by_run in told.items()])
    else:
        page.table(rows, **summary_table(rows))


def _title(runs: Sequence[Run]) -> str:
    return " against ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"


def _settings(runs: Sequence[Run]) -> tuple[list[dict], list[dict]]:
    """Settings that differ between the runs (one column a run), and those they share."""
    # As their owner wrote them: 0.003, not 0.003000.
    flats = [{key: value if isinstance(value, str) else json.dumps(value)
              for key, value in flatten(run.recipe).items() if key != "name"} for run in runs]
    differing, common = [], []
    for key in dict.fromkeys(key for flat in flats for key in flat):
        values = [flat.get(key) for flat in flats]
        if all(value == values[0] for value in values):
            common.append({"setting": key, "value": values[0]})
        else:
            differing.append({"setting": key, **{run.name: value for run, value in zip(runs, values)}})
    return differing, common


def _measured(runs: Sequence[Run]) -> list[str]:
    keys = dict.fromkeys(key for run in runs for row in run.metrics for key in row if numbers(row[key]))
    return [key for key in keys if key not in _NOT_MEASURES]


def _units(runs: Sequence[Run]) -> tuple[str, dict[str, float]]:
    """The unit in which the runs' losses compare, and by what each run's nats a token are multiplied."""
    sizes = {run.name: run.environment.get("bytes_per_token") for run in runs}
    if len(set(sizes.values())) == 1 or None in sizes.values():
        return "nats a token", dict.fromkeys(sizes, 1.0)
    return "bits a byte", {name: 1 / (size * math.log(2)) for name, size in sizes.items() if size}


def _losses(page: Page, runs: Sequence[Run]) -> None:
    unit, factors = _units(runs)
    words = {run.recipe.get("data", {}).get("tokenizer") for run in runs}
    if unit == "nats a token" and len(words) > 1:
        page.flags([f"Losses are nats a token of different tokenizers ({', '.join(map(str, words))}), which do not compare."])
    smoothing = 0.015 if min(len(run.metrics) for run in runs) >= 100 else 0
    first = True
    for key, name in (("loss", "Training loss"), ("val_loss", "Validation loss")):
        rows = [{**row, key: row[key] * factors[row["run"]]} for row in _rows(runs, key)]
        if not _lines(rows, key):
            continue
        if first:
            page.section("Loss")
        first = False
        noisy_one = key == "loss"
        line = Line(len(rows) < 60 * len(runs), smooth=smoothing * noisy_one, focus=0.05)
        chart = curves(rows, _STEP, Axis(key, f"loss ({unit})"), _by_run(runs), name, line=line, others=_OTHERS, size=(330, 260))
        page.chart(chart, "Thick: mean of neighbouring points. Faint: every point." if line.smooth else "", key, 0.5)


def _draw(page: Page, runs: Sequence[Run], key: str, known: series.Series) -> None:
    kinds = {type(row[key]) for run in runs for row in run.metrics if numbers(row.get(key))}
    if list in kinds or dict in kinds and known.over in ("sublayer", "head"):
        _draw_depth(page, runs, key, known)
    elif dict in kinds:
        _draw_tensors(page, runs, key, known)
    else:
        smoothing = 0.015 if any(noisy(run.column(key)) for run in runs) else 0
        rows = _rows(runs, key)
        chart = curves(rows, _STEP, Axis(key, _y(known), _wide(rows, key)), _by_run(runs), known.title, others=_OTHERS,
                       line=Line(focus=0.02, smooth=smoothing), size=_HALF)
        page.chart(chart, known.meaning, key, 0.5)


def _draw_depth(page: Page, runs: Sequence[Run], key: str, known: series.Series) -> None:
    profiles, extremes = [], []
    pick = max if known.worst == "max" else min
    for run in runs:
        probes = [(row, values) for row in run.metrics if numbers(values := series.over_depth(key, row.get(key)))]
        extremes += [{**_when(row), "run": run.name, key: pick(numbers(values))} for row, values in probes]
        for moment, place in _moments(len(probes), len(runs)):
            profiles += [{"depth": i, "run": run.name, "probe": moment, key: value}
                         for i, value in enumerate(probes[place][1])]
    # One run: the moments get the colours. Several: the runs do, and dashes tell the moments apart.
    by = Series("run", _names(runs), dash="probe") if len(runs) > 1 else Series("probe")
    depths = profile(profiles, Axis("depth", "depth (index)"), Axis(key, _y(known), _wide(profiles, key)), by,
                     f"{known.title} over depth", size=_HALF)
    page.chart(depths, known.meaning, f"{key}-depth", 0.5)
    if not _lines(extremes, key):
        return
    over_steps = curves(extremes, _STEP, Axis(key, _y(known), _wide(extremes, key)), _by_run(runs),
                        f"{known.title}: {known.worst} over depth", others=_OTHERS, size=_HALF)
    page.chart(over_steps, "", f"{key}-{known.worst}", 0.5)


def _draw_tensors(page: Page, runs: Sequence[Run], key: str, known: series.Series) -> None:
    rows: dict[str, list[dict]] = {}
    for run in runs:
        for row in run.metrics:
            values: dict[str, list[float]] = {}
            for name, value in row[key].items() if isinstance(row.get(key), dict) else ():
                if drawable(value):
                    values.setdefault(tensor_group(name), []).append(value)
            for group, inside in values.items():
                rows.setdefault(group, []).append({**_when(row), "run": run.name, key: statistics.median(inside),
                                                   "smallest": min(inside), "largest": max(inside)})
    # A group that is zero throughout has no place on a logarithmic axis.
    wide = any(_wide(here, edge) for here in rows.values() for edge in ("smallest", "largest"))
    wide &= all(any(row["smallest"] > 0 for row in here) for here in rows.values())
    told = f"{known.meaning} Line: median over layers. Band: smallest to largest.".strip()
    for number, (group, here) in enumerate(rows.items()):
        chart = curves(here, _STEP, Axis(key, _y(known), wide), _by_run(runs), f"{known.title}: {group}", others=_OTHERS,
                       line=Line(band=("smallest", "largest")), size=_THIRD)
        page.chart(chart, "" if number else told, f"{key}-{group}", 1 / 3)


def _moments(count: int, runs: int) -> list[tuple[str, int]]:
    """Which probes a profile shows; with many runs only the last, or nobody could tell the lines apart."""
    last = {count - 1: "last probe"}
    places = {0: "first probe", count // 2: "middle probe", **last} if runs <= 4 else last
    return [(name, place) for place, name in places.items()] if count else []


def _names(runs: Sequence[Run]) -> list[str]:
    return [run.name for run in runs]


def _by_run(runs: Sequence[Run]) -> Series:
    return Series("run", _names(runs))


def _when(row: dict[str, Any]) -> dict[str, Any]:
    return {x: row[x] for x in ("step", "tokens", "seconds") if x in row}


def _rows(runs: Sequence[Run], key: str) -> list[dict[str, Any]]:
    return [{**_when(row), key: row[key], "run": run.name} for run in runs for row in run.metrics if key in row]


def _lines(rows: Sequence[dict[str, Any]], key: str) -> bool:
    """Whether some run has two points to draw a line between; a single one is in the table."""
    counts = Counter(row["run"] for row in rows if drawable(row[key]))
    return max(counts.values(), default=0) > 1


def _y(known: series.Series) -> str:
    return known.unit or known.title


def _wide(rows: Sequence[dict[str, Any]], key: str) -> bool:
    """Whether the values ask for a logarithmic axis: all above zero, most of them a factor of 30 apart."""
    values = sorted(row[key] for row in rows if drawable(row[key]))
    edge = len(values) // 20
    return bool(values) and values[0] > 0 and values[-1 - edge] > 30 * values[edge]
