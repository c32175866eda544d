"""Charts as plain functions: rows (lists of dicts) in, an altair chart out.

All share one theme, show values on hover, and hide a series when its legend entry is clicked. Those with a
continuous x are moved by dragging, zoomed with Ctrl + wheel or a pinch, and reset by a double click.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from gnomon.report.chart_data import extent, groups, late_range, log_ticks, smooth, split_finite, thin
from gnomon.report.chart_options import Axis, Line, Series
from gnomon.report.chart_parts import (
    colours,
    data,
    field,
    finish,
    hover,
    left_out,
    need,
    nothing,
    only,
    rules,
    tips,
)
from gnomon.report.theme import DASHES

WIDTH = 680  # pixels, of a picture; a page stretches charts to its own width
PANELS = 820  # of a row of panels, which a page cannot stretch
PLAIN = Line()
POSITIVE = " (above zero, on a logarithmic axis)"


def curves(rows: Sequence[dict], x: str | Axis, y: str | Axis, series: str | Series = "", title: str = "", *,
           line: Line = PLAIN, panel: str = "", size: tuple[int, int] = (WIDTH, 260)):
    """Lines of `y` over `x`, one colour a series.

    Args:
        rows: one dict a point; a row without `x` or `y` is no point of this chart. Points that are not finite (not
            positive on a logarithmic axis) are left out, and the subtitle says how many.
        panel: key that puts its values into small charts side by side, each with its own y axis.
        size: width and height in pixels.

    Raises:
        UserError: no row can be drawn; the extra `report` is not installed.
    """
    alt = need("altair")
    x, y, by, edges = Axis.of(x), Axis.of(y), Series.of(series), list(line.band)
    kept, lost = split_finite(rows, [x.key, y.key, *edges], [x.key] * x.log + [y.key, *edges] * y.log)
    if not kept:
        raise nothing(title, [x.key, y.key, *edges], rows, POSITIVE * (x.log or y.log))
    mean = f"{y.key} (smoothed)" if line.half_life else y.key
    keys = [key for key in (by.key, by.dash, panel) if key]
    points = _lines(kept, x.key, y.key, mean, keys, line)
    notes = left_out(lost, "point", "not finite or not positive" if x.log or y.log else "not finite")
    window = late_range(points, x.key, mean, line.focus)
    if window:
        notes.append(f"the first values, up to {extent(points, [mean])[1]:.4g}, lie above the frame")

    colour, shown = colours(points, by, size[0])
    base = only(alt.Chart().encode(_along(points, x, line.dots), **colour), shown)
    y_scale, y_axis = _upright(points, [y.key, *edges], y.log, window)

    def over(key: str) -> Any:
        return alt.Y(field=field(key), type="quantitative", title=None if panel else y.shown, scale=y_scale, axis=y_axis)

    told = {"strokeDash": alt.StrokeDash(
        field=field(by.dash), type="nominal", sort=None, scale=alt.Scale(range=DASHES),
        legend=alt.Legend(orient="bottom"))} if by.dash else {}
    layers = []
    if edges:
        apart = alt.Detail(field=field(by.dash), type="nominal") if by.dash else alt.Undefined
        area = base.mark_area(opacity=0.16, clip=True)
        layers.append(area.encode(over(edges[0]), alt.Y2(field=field(edges[1])), detail=apart))
    if line.half_life:
        faint = base.mark_line(opacity=0.28, strokeWidth=1, clip=True)
        layers.append(faint.encode(over(y.key), **told))
    drawn = base.mark_line(clip=True, point=line.dots).encode(over(mean), **told)
    if not panel:
        drawn = drawn.add_params(alt.selection_interval(
            encodings=["x"], bind="scales", zoom="wheel![event.ctrlKey || event.altKey]"))
    layers += [drawn, hover(base, over(mean), [x.key, *keys]), *rules(y.reference, "y")]
    # Vega-Lite draws the legend of the first layer, so a click reaches only a selection that stands there.
    layers[0] = layers[0].add_params(*shown)
    chart = alt.layer(*layers, data=data(points, [x.key, *keys, *dict.fromkeys((mean, y.key)), *edges]))
    if not panel:
        return finish(chart, title, notes, width=size[0], height=size[1])
    names = [key[0] for key in groups(points, [panel])]
    across = min(3, len(names))
    facet = alt.Facet(field=field(panel), type="nominal", sort=names, title=None)
    chart = chart.properties(width=PANELS // across - 50, height=130).facet(facet, columns=across)
    chart = chart.resolve_scale(y="independent").resolve_axis(x="independent")
    return finish(chart, title, notes)


def profile(rows: Sequence[dict], x: str | Axis, y: str | Axis, series: str | Series = "", title: str = "", *,
            size: tuple[int, int] = (WIDTH, 260)):
    """A value over depth: `curves` with a dot at every index `x` and no thinning."""
    return curves(rows, x, y, series, title, line=Line(dots=True, limit=math.inf), size=size)


def heatmap(rows: Sequence[dict], x: str | Axis, y: str | Axis, value: str | Axis, title: str = "",
            domain: tuple[float, float] | None = None, *, width: int = WIDTH):
    """A coloured square for every pair (`x`, `y`); a pair that is missing or not finite stays empty.

    Args:
        domain: values at the ends of the colours; around zero (low < 0 < high) the colours diverge from zero.
        width: of all squares together, in pixels; large squares also show their number.

    Raises:
        UserError: no row can be drawn; the extra `report` is not installed.
    """
    alt = need("altair")
    x, y, value = Axis.of(x), Axis.of(y), Axis.of(value)
    kept, lost = split_finite(rows, [x.key, y.key, value.key], text=[x.key, y.key])
    if not kept:
        raise nothing(title, [value.key], rows)
    across, down = ([key[0] for key in groups(rows, [axis.key])] for axis in (x, y))
    low, high = domain or extent(kept, [value.key])
    cell = min(max(width // len(across), 4), 56)
    axis = alt.Axis(labelAngle=0, labelOverlap=True, domain=False, ticks=False)
    base = alt.Chart(data(kept, [x.key, y.key, value.key])).encode(
        alt.X(field=field(x.key), type="ordinal", sort=across, title=x.shown, axis=axis),
        alt.Y(field=field(y.key), type="ordinal", sort=down, title=y.shown, axis=axis),
        tooltip=tips(kept, [x.key, y.key, value.key]))
    diverging = low < 0 < high
    scheme = {"scheme": "blueorange", "domainMid": 0} if diverging else {}
    layers = [base.mark_rect().encode(alt.Color(
        field=field(value.key), type="quantitative", title=value.shown,
        scale=alt.Scale(domain=[low, high], clamp=True, **scheme)))]
    if cell >= 30:
        # Viridis is dark below its middle; the two-sided scale is light around its.
        number = f"datum[{json.dumps(field(value.key))}]"
        light = f"abs({number}) < {max(high, -low) / 2}" if diverging else f"{number} > {(low + high) / 2}"
        layers.append(base.mark_text(fontSize=10).encode(
            alt.Text(field=field(value.key), type="quantitative", format=".2f"),
            color=alt.condition(light, alt.value("#15171c"), alt.value("#ffffff"))))
    step = alt.Step(cell)
    return finish(alt.layer(*layers), title, left_out(lost, "cell"), width=step, height=step)


def scatter(rows: Sequence[dict], x: str | Axis, y: str | Axis, series: str | Series = "", title: str = "", *,
            told: Sequence[str] = (), size: tuple[int, int] = (WIDTH, 300)):
    """A dot at (`x`, `y`) for every row; series get colours and shapes.

    Args:
        told: more keys to show when a dot is pointed at.
        size: width and height in pixels.

    Raises:
        UserError: no row can be drawn; the extra `report` is not installed.
    """
    alt = need("altair")
    x, y, by = Axis.of(x), Axis.of(y), Series.of(series)
    kept, lost = split_finite(rows, [x.key, y.key], [x.key] * x.log + [y.key] * y.log)
    if not kept:
        raise nothing(title, [x.key, y.key], rows, POSITIVE * (x.log or y.log))
    colour, shown = colours(kept, by, size[0])
    if by.key:
        # As the colours, so that one legend tells both.
        colour["shape"] = alt.Shape(field=field(by.key), type="nominal", legend=colour["color"]["legend"],
                                    scale=alt.Scale(domain=colour["color"]["scale"]["domain"]))
    y_scale, y_axis = _upright(kept, [y.key], y.log, None)
    upright = alt.Y(field=field(y.key), type="quantitative", title=y.shown, scale=y_scale, axis=y_axis)
    keys = [x.key, y.key, by.key, *told]
    dots = only(alt.Chart().encode(_along(kept, x, True), upright, tooltip=tips(kept, keys), **colour), shown)
    dots = dots.mark_point(size=60, filled=True, opacity=0.75)
    chart = alt.layer(dots.add_params(*shown), *rules(y.reference, "y"), data=data(kept, keys))
    return finish(chart, title, left_out(lost, "row"), width=size[0], height=size[1])


def intervals(rows: Sequence[dict], name: str, mean: str | Axis, low: str, high: str, series: str = "",
              title: str = "", *, width: int = WIDTH):
    """A dot at `mean` and a line from `low` to `high` for every `name`, in the order of the rows.

    Args:
        series: key that gives colours; its values stand below each other within a name.

    Raises:
        UserError: no row can be drawn; the extra `report` is not installed.
    """
    alt = need("altair")
    mean = Axis.of(mean)
    keys = [name, series, mean.key, low, high]
    kept, lost = split_finite(rows, [name, mean.key, low, high], text=[name])
    if not kept:
        raise nothing(title, [mean.key, low, high], rows)
    colour, shown = colours(kept, Series(series), width)
    names = [key[0] for key in groups(kept, [name])]
    rows_each = len(groups(kept, [series])) if series else 1
    offset = alt.YOffset(field=field(series), type="nominal", sort=None) if series else alt.Undefined
    base = only(alt.Chart().encode(
        alt.Y(field=field(name), type="nominal", sort=names, title=None, axis=alt.Axis(labelLimit=300)),
        yOffset=offset, tooltip=tips(kept, keys), **colour), shown)

    def along(key: str) -> Any:
        return alt.X(field=field(key), type="quantitative", title=mean.shown,
                     scale=alt.Scale(zero=False, padding=12), axis=alt.Axis(grid=True))

    line = base.mark_rule(strokeWidth=2.5, opacity=0.55, strokeCap="round")
    dot = base.mark_point(size=70, opacity=1)
    layers = [line.encode(along(low), alt.X2(field=field(high))).add_params(*shown), dot.encode(along(mean.key))]
    chart = alt.layer(*layers, *rules(mean.reference, "x"), data=data(kept, keys))
    return finish(chart, title, left_out(lost, "row"), width=width, height=max(60, 26 * len(names) * rows_each))


def ridgeline(rows: Sequence[dict], layer: str | Axis, x: str | Axis, height: str, title: str = "", *,
              overlap: float = 2.5, width: int = WIDTH):
    """One filled outline a layer, below each other in the order of the rows, all on one scale of `height`.

    Args:
        overlap: height of the tallest outline, in distances between two layers.

    Raises:
        UserError: no row can be drawn; the extra `report` is not installed.
    """
    alt = need("altair")
    layer, x = Axis.of(layer), Axis.of(x)
    kept, lost = split_finite(rows, [layer.key, x.key, height], [x.key] * x.log, text=[layer.key])
    if not kept:
        raise nothing(title, [x.key, height], rows)
    tallest = max(abs(row[height]) for row in kept) or 1.0
    outlines = groups(kept, [layer.key])
    names = [str(key[0]) for key in outlines]
    points = [{**row, "base": i, "top": i - overlap * row[height] / tallest}
              for i, outline in enumerate(outlines.values())
              for row in sorted(outline, key=lambda row: row[x.key])]
    labelled = list(range(0, len(names), math.ceil(len(names) / 30)))
    # The list of names stands in the expression as JSON, which quotes whatever a name holds.
    axis = alt.Axis(values=labelled, tickCount=len(labelled), grid=False, labelOverlap=False,
                    labelExpr=f"{json.dumps(names)}[datum.value]")
    scale = alt.Scale(domain=[len(names) - 0.9, -overlap], nice=False)
    chart = alt.Chart(data(points, [layer.key, x.key, height, "base", "top"])).mark_area(
        fillOpacity=0.75, line={"strokeWidth": 1}).encode(
        alt.X(field=field(x.key), type="quantitative", title=x.shown,
              scale=alt.Scale(type="log" if x.log else "linear", nice=False, zero=False)),
        alt.Y(field="top", type="quantitative", title=layer.shown, axis=axis, scale=scale),
        alt.Y2(field="base"),
        alt.Color(field="base", type="quantitative", legend=None),
        alt.Detail(field="base", type="quantitative"),
        tooltip=tips(points, [layer.key]))
    return finish(chart, title, left_out(lost, "point"), width=width, height=min(560, 60 + 26 * len(names)))


def _lines(rows: Sequence[dict], x: str, y: str, mean: str, keys: Sequence[str], how: Line) -> list[dict]:
    """The points of every line in the order of x, with the smoothed value under `mean`, thinned."""
    points = []
    for line in groups(rows, keys).values():
        line = sorted(line, key=lambda row: row[x])
        means = smooth([row[y] for row in line], how.half_life)
        points += [{**line[i], mean: means[i]} for i in thin([row[y] for row in line], how.limit)]
    return points


def _along(points: Sequence[dict], x: Axis, dots: bool) -> Any:
    alt = need("altair")
    whole = {"tickMinStep": 1} if all(isinstance(row[x.key], int) for row in points) else {}
    # "500µ" is no way to tell a learning rate.
    small = x.log and extent(points, [x.key])[0] < 1e-3
    return alt.X(field=field(x.key), type="quantitative", title=x.shown,
                 axis=alt.Axis(format="~e" if small else "~s", labelOverlap=True, **whole),
                 scale=alt.Scale(type="log" if x.log else "linear", nice=False, zero=False, padding=8 * dots))


def _upright(points: Sequence[dict], keys: Sequence[str], log: bool,
             window: list[float] | None) -> tuple[Any, Any]:
    """Scale and axis of y: from zero when the values come near it, else with a little room at both ends."""
    alt = need("altair")
    low, high = extent(points, keys)
    near_zero = not log and not window and 0 <= low < 0.15 * high
    room = {"domain": window} if window else {} if near_zero else {"padding": 6}
    ticks = log_ticks(low, high) if log else []
    few = {"values": ticks, "tickCount": len(ticks)} if ticks else {}
    small = {"format": ".1~e"} if high < 1e-3 or log and low < 1e-3 else {}
    return alt.Scale(type="log" if log else "linear", zero=near_zero, **room), alt.Axis(**few, **small)
