"""Lines over steps, depth or rates: thinned, smoothed, and read by a cursor that all charts of a page share."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from gnomon.report.chart_data import drawable, extent, groups, late_range, split_finite, thin
from gnomon.report.chart_options import Axis, Line, Series
from gnomon.report.chart_parts import (
    POSITIVE,
    WIDTH,
    along,
    colours,
    data,
    field,
    finish,
    left_out,
    need,
    nothing,
    only,
    rules,
    unchecked,
    upright,
)
from gnomon.report.tables import number
from gnomon.report.theme import DASHES

PLAIN = Line()
# Columns that Vega makes: what lies along x (a page lets the reader choose), and the mean that is drawn.
ALONG, DRAWN = "along", "drawn"
CURSOR = "at"  # parameter: where on x the values are read; null for nowhere


@unchecked
def curves(rows: Sequence[dict[str, Any]], x: str | Axis, y: str | Axis, series: str | Series = "", title: str = "", *,
           line: Line = PLAIN, others: Sequence[Axis] = (), size: tuple[int, int] = (WIDTH, 260)) -> Any:
    """Lines of `y` over `x`, one colour a series.

    On a page they are read by a cursor, on a logarithmic axis if all values are positive, and smoothed as the reader likes.

    Args:
        rows: one dict a point; a row without `x` or `y` is no point of this chart. Points that are not finite (not
            positive on a logarithmic axis) are left out, and the subtitle says how many.
        others: what the reader of a page may put along the axis instead of `x`; left out where a point lacks it.
        size: width and height in pixels.

    Raises:
        UserError: no row can be drawn; the extra `report` is not installed.
    """
    alt = need("altair")
    x, y, by, edges = Axis.of(x), Axis.of(y), Series.of(series), list(line.band)
    kept, lost = split_finite(rows, [x.key, y.key, *edges], [x.key] * x.log + [y.key, *edges] * y.log)
    if not kept:
        raise nothing(title, [x.key, y.key, *edges], rows, POSITIVE * (x.log or y.log))
    keys = [key for key in (by.key, by.dash) if key]
    mean = f"{y.key} (mean)"
    points, longest, thinned = _lines(kept, x.key, y.key, mean, keys, line.limit)
    averaged = mean if thinned else y.key
    notes = left_out(lost, "point", "not finite or not positive" if x.log or y.log else "not finite")
    window = late_range(points, x.key, averaged, line.focus)
    low, high = extent(points, [y.key, *edges])
    if window:
        notes.append(f"the first values, up to {extent(points, [averaged])[1]:.4g}, lie above the frame")
    elif low == high and len(points) > 1:
        notes.append(f"constant: {number(low)}")

    colour, shown = colours(points, by, size[0])
    axes = [x, *(other for other in others if all(drawable(row.get(other.key)) for row in points))]
    each_way = {way: upright(points, [y.key, *edges], way == "log", window) for way in ("linear", "log")
                if way == "linear" or low > 0}
    frame = round(line.smooth * longest)
    base = only(alt.Chart().encode(along(points, x, line.dots, ALONG), **colour), shown)

    def over(key: str) -> Any:
        return alt.Y(field=field(key), type="quantitative", title=y.shown, **each_way["log" if y.log else "linear"])

    told = {"strokeDash": alt.StrokeDash(
        field=field(by.dash), type="nominal", sort=None, scale=alt.Scale(range=DASHES),
        legend=alt.Legend(orient="bottom"))} if by.dash else {}
    layers = []
    if edges:
        apart = alt.Detail(field=field(by.dash), type="nominal") if by.dash else alt.Undefined
        area = base.mark_area(opacity=0.16, clip=True)
        layers.append(area.encode(over(edges[0]), alt.Y2(field=field(edges[1])), detail=apart))
    faint = base.mark_line(opacity=0.28 if frame else 0, strokeWidth=1, clip=True)
    layers.append(faint.encode(over(y.key), **told).properties(name="raw"))
    zoom = alt.selection_interval(encodings=["x"], bind="scales", zoom="wheel![event.ctrlKey || event.altKey]")
    drawn = base.mark_line(clip=True, point=line.dots).encode(over(DRAWN), **told)
    layers.append(drawn.add_params(zoom))
    # Vega-Lite draws the legend of the first layer, so a click reaches only a selection that stands there.
    layers[0] = layers[0].add_params(*shown)
    columns = [*(axis.key for axis in axes), *keys, y.key, *[mean] * thinned, *edges]
    steps = alt.Chart().transform_calculate(ALONG, f"datum[{json.dumps(field(x.key))}]").transform_window(
        [alt.WindowFieldDef(op="mean", field=field(averaged if frame else y.key), **{"as": DRAWN})],
        frame=[-frame, frame], groupby=[field(key) for key in keys], sort=[alt.SortField(ALONG)])
    cursor = alt.param(name=CURSOR, value=None)
    chart = alt.layer(*layers, data=data(points, columns), params=[cursor.param], transform=steps.transform)
    chart.layer += [_readout(colour, shown, keys), *rules(y.reference, "y")]  # here, since `alt.layer` copies all it is given, twice
    choices = {"x": [{"field": field(axis.key), "title": axis.shown} for axis in axes], "y": each_way, "log": y.log,
               "raw": field(y.key), "mean": field(averaged), "points": longest, "series": field(by.key), "width": size[0]}
    return finish(chart, title, notes, choices, width=size[0], height=size[1])


def profile(rows: Sequence[dict[str, Any]], x: str | Axis, y: str | Axis, series: str | Series = "", title: str = "", *,
            size: tuple[int, int] = (WIDTH, 260)) -> Any:
    """A value over depth: `curves` with a dot at every index `x` and no thinning."""
    return curves(rows, x, y, series, title, line=Line(dots=True, limit=math.inf), size=size)


def _lines(rows: Sequence[dict[str, Any]], x: str, y: str, mean: str, keys: Sequence[str], limit: float) -> tuple[list[dict], int, bool]:
    """The points of every line in the order of x, thinned; how many the longest has; whether any was left out.

    Under `mean` stands the mean of the stretch that a point was kept for: extremes alone would smooth to something else.
    """
    points, longest, thinned = [], 0, False
    lines = groups(rows, keys).values()
    for line in lines:
        line = sorted(line, key=lambda row: row[x])
        values = [row[y] for row in line]
        places = thin(values, max(limit / len(lines) ** 0.5, 200))
        edges = [0, *((a + b + 1) // 2 for a, b in zip(places, places[1:])), len(line)]
        means = [math.fsum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
        points += [{**line[place], mean: value} for place, value in zip(places, means)]
        longest, thinned = max(longest, len(places)), thinned or len(places) < len(line)
    return points, longest, thinned


def _readout(colour: dict, shown: Sequence[Any], keys: Sequence[str]) -> Any:
    """Layers that show, where the cursor is, the nearest point of each line and its value; nothing without a cursor.

    They place themselves by the scales of the lines; as encodings they would take part in the range of the axes.
    """
    alt = need("altair")
    names = "".join(f" + '  ' + datum[{json.dumps(field(key))}]" for key in keys)
    x = alt.expr(f"scale('x', datum.{ALONG})")
    # Beside the cursor, on the side where there is more room; one line below the other.
    right = f"{CURSOR} > (domain('x')[0] + domain('x')[1]) / 2"
    beside = {"x": x, "align": alt.expr(f"{right} ? 'right' : 'left'"), "dx": alt.expr(f"{right} ? -8 : 8"),
              "fontWeight": 600, "baseline": "top"}
    plain = alt.Chart()
    line = plain.encode(text="told:N").mark_text(y=alt.expr("14 * datum.row"), **beside)
    once = plain.transform_filter("datum.row == 1")
    rule = once.mark_rect(x=x, width=1, y=alt.expr("height / 2"), height=alt.expr("height"), opacity=0.5)
    head = once.encode(text="where:N").mark_text(y=0, **beside)
    dot = plain.mark_point(x=x, y=alt.expr(f"scale('y', datum.{DRAWN})"), size=70).encode(**colour)
    halo = line.mark_text(style="halo", y=alt.expr("14 * datum.row"), **beside)
    steps = only(plain.transform_filter(f"isValid({CURSOR})"), shown).transform_calculate(
        "away", f"abs(datum.{ALONG} - {CURSOR})").transform_aggregate(
        best="argmin(away)", groupby=[field(key) for key in keys]).transform_calculate(
        ALONG, f"datum.best.{ALONG}").transform_calculate(DRAWN, f"datum.best.{DRAWN}").transform_window(
        row="row_number()").transform_calculate("told", f"format(datum.{DRAWN}, '.5~g'){names}").transform_calculate(
        "where", f"format(datum.{ALONG}, ',.6~g')")
    return alt.layer(rule, head.mark_text(style="halo", y=0, **beside), head, dot, halo, line.encode(**colour), transform=steps.transform)
