"""Charts as plain functions: rows (lists of dicts) in, an altair chart out.

All share one theme, show values on hover, and hide a series when its legend entry is clicked. Those with a
continuous x are moved by dragging, zoomed with Ctrl + wheel or a pinch, and reset by a double click.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.report.chart_data import extent, groups, late_range, log_ticks, smooth, split_finite, thin
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


def curves(rows: Sequence[dict], x: str, y: str, series: str | None = None, *, log_x: bool = False,
           log_y: bool = False, title: str | None = None, x_title: str | None = None,
           y_title: str | None = None, band: tuple[str, str] | None = None, dash: str | None = None,
           panel: str | None = None, order: Sequence[str] = (), half_life: float = 0, focus: float = 0,
           reference: Mapping[str, float] | None = None, dots: bool = False, limit: int = 1500,
           width: int = WIDTH, height: int = 260):
    """Lines of `y` over `x`, one colour a series.

    Args:
        rows: one dict a point; a row without `x` or `y` is no point of this chart.
        x, y: keys of numbers; points that are not finite (not positive on a logarithmic axis) are left out,
            and the subtitle says how many.
        series, dash: keys that tell lines apart, by colour and by dash.
        band: keys of the lower and upper edge of a shaded band around each line.
        panel: key that puts its values into small charts side by side, each with its own y axis.
        order: all series there are, so that a colour means the same in charts that lack one of them.
        half_life: smooth over so many points (the raw line stays, faint); 0 for none.
        focus: choose the range of y without the first `focus` share of x; the subtitle says so.
        reference: label -> value of y, drawn as a dotted rule (a null level, a target).
        dots: mark every point.
        limit: points a line may have; longer ones are thinned, keeping extremes and both ends.

    Raises:
        UserError: no row can be drawn; the extra `report` is not installed.
    """
    alt = need("altair")
    edges = list(band or ())
    kept, lost = split_finite(rows, [x, y, *edges], [x] * log_x + [y, *edges] * log_y)
    if not kept:
        raise nothing(title, [x, y, *edges], rows, " (above zero, on a logarithmic axis)" * (log_x or log_y))
    mean = f"{y} (smoothed)" if half_life else y
    keys = [key for key in (series, dash, panel) if key]
    points = _lines(kept, x, y, mean, keys, half_life, limit)
    notes = left_out(lost, "point", "not finite or not positive" if log_x or log_y else "not finite")
    window = late_range(points, x, mean, focus)
    if window:
        notes.append(f"the first values, up to {extent(points, [mean])[1]:.4g}, lie above the frame")

    colour, shown = colours(points, series, order, width)
    base = only(alt.Chart().encode(_along(points, x, x_title, log_x, dots), **colour), shown)
    y_scale, y_axis = _upright(points, [y, *edges], log_y, window)

    def over(key: str) -> Any:
        return alt.Y(field=field(key), type="quantitative", title=None if panel else y_title or y,
                     scale=y_scale, axis=y_axis)

    told = {"strokeDash": alt.StrokeDash(
        field=field(dash), type="nominal", sort=None, scale=alt.Scale(range=DASHES),
        legend=alt.Legend(orient="bottom"))} if dash else {}
    layers = []
    if band:
        apart = alt.Detail(field=field(dash), type="nominal") if dash else alt.Undefined
        area = base.mark_area(opacity=0.16, clip=True)
        layers.append(area.encode(over(band[0]), alt.Y2(field=field(band[1])), detail=apart))
    if half_life:
        faint = base.mark_line(opacity=0.28, strokeWidth=1, clip=True)
        layers.append(faint.encode(over(y), **told))
    line = base.mark_line(clip=True, point=dots).encode(over(mean), **told)
    if not panel:
        line = line.add_params(alt.selection_interval(
            encodings=["x"], bind="scales", zoom="wheel![event.ctrlKey || event.altKey]"))
    layers += [line, hover(base, over(mean), [x, *keys]), *rules(reference, "y")]
    # Vega-Lite draws the legend of the first layer, so a click reaches only a selection that stands there.
    layers[0] = layers[0].add_params(*shown)
    chart = alt.layer(*layers, data=data(points, [x, *keys, *dict.fromkeys((mean, y)), *edges]))
    if not panel:
        return finish(chart, title, notes, width=width, height=height)
    names = [key[0] for key in groups(points, [panel])]
    across = min(3, len(names))
    facet = alt.Facet(field=field(panel), type="nominal", sort=names, title=None)
    chart = chart.properties(width=PANELS // across - 50, height=130).facet(facet, columns=across)
    chart = chart.resolve_scale(y="independent").resolve_axis(x="independent")
    return finish(chart, title, notes)


def profile(rows: Sequence[dict], x: str, y: str, series: str | None = None, **options):
    """A value over depth: `curves` with a dot at every index `x` and no thinning; options as there."""
    return curves(rows, x, y, series, **{"dots": True, "limit": len(rows) + 4, **options})


def heatmap(rows: Sequence[dict], x: str, y: str, value: str, title: str | None = None,
            domain: tuple[float, float] | None = None, *, x_title: str | None = None,
            y_title: str | None = None, value_title: str | None = None, width: int = WIDTH):
    """A coloured square for every pair (`x`, `y`); a pair that is missing or not finite stays empty.

    Args:
        domain: values at the ends of the colours; around zero (low < 0 < high) the colours diverge from zero.
        width: of all squares together, in pixels; large squares also show their number.

    Raises:
        UserError: no row can be drawn; the extra `report` is not installed.
    """
    alt = need("altair")
    kept, lost = split_finite(rows, [x, y, value], text=[x, y])
    if not kept:
        raise nothing(title, [value], rows)
    across, down = ([key[0] for key in groups(rows, [axis])] for axis in (x, y))
    low, high = domain or extent(kept, [value])
    cell = min(max(width // len(across), 4), 56)
    axis = alt.Axis(labelAngle=0, labelOverlap=True, domain=False, ticks=False)
    base = alt.Chart(data(kept, [x, y, value])).encode(
        alt.X(field=field(x), type="ordinal", sort=across, title=x_title or x, axis=axis),
        alt.Y(field=field(y), type="ordinal", sort=down, title=y_title or y, axis=axis),
        tooltip=tips(kept, [x, y, value]))
    diverging = low < 0 < high
    scheme = {"scheme": "blueorange", "domainMid": 0} if diverging else {}
    layers = [base.mark_rect().encode(alt.Color(
        field=field(value), type="quantitative", title=value_title or value,
        scale=alt.Scale(domain=[low, high], clamp=True, **scheme)))]
    if cell >= 30:
        # Viridis is dark below its middle; the two-sided scale is light around its.
        number = f"datum[{json.dumps(field(value))}]"
        light = f"abs({number}) < {max(high, -low) / 2}" if diverging else f"{number} > {(low + high) / 2}"
        layers.append(base.mark_text(fontSize=10).encode(
            alt.Text(field=field(value), type="quantitative", format=".2f"),
            color=alt.condition(light, alt.value("#15171c"), alt.value("#ffffff"))))
    step = alt.Step(cell)
    return finish(alt.layer(*layers), title, left_out(lost, "cell"), width=step, height=step)


def scatter(rows: Sequence[dict], x: str, y: str, series: str | None = None, *, log_x: bool = False, log_y: bool = False,
            title: str | None = None, x_title: str | None = None, y_title: str | None = None, told: Sequence[str] = (),
            reference: Mapping[str, float] | None = None, width: int = WIDTH, height: int = 300):
    """A dot at (`x`, `y`) for every row.

    Args:
        series: key that gives colours and shapes.
        told: more keys to show when a dot is pointed at.
        reference: label -> value of y, drawn as a dotted rule.

    Raises:
        UserError: no row can be drawn; the extra `report` is not installed.
    """
    alt = need("altair")
    kept, lost = split_finite(rows, [x, y], [x] * log_x + [y] * log_y)
    if not kept:
        raise nothing(title, [x, y], rows, " (above zero, on a logarithmic axis)" * (log_x or log_y))
    colour, shown = colours(kept, series, (), width)
    if series:
        # As the colours, so that one legend tells both.
        names = [key[0] for key in groups(kept, [series])]
        colour["shape"] = alt.Shape(field=field(series), type="nominal", legend=colour["color"]["legend"],
                                    scale=alt.Scale(domain=names))
    y_scale, y_axis = _upright(kept, [y], log_y, None)
    upright = alt.Y(field=field(y), type="quantitative", title=y_title or y, scale=y_scale, axis=y_axis)
    dots = alt.Chart().encode(_along(kept, x, x_title, log_x, True), upright, tooltip=tips(kept, [x, y, series, *told]), **colour)
    dots = only(dots, shown).mark_point(size=60, filled=True, opacity=0.75)
    chart = alt.layer(dots.add_params(*shown), *rules(reference, "y"), data=data(kept, [x, y, series, *told]))
    return finish(chart, title, left_out(lost, "row"), width=width, height=height)


def intervals(rows: Sequence[dict], name: str, mean: str, low: str, high: str,
              reference: Mapping[str, float] | None = None, *, series: str | None = None,
              title: str | None = None, x_title: str | None = None, width: int = WIDTH):
    """A dot at `mean` and a line from `low` to `high` for every `name`, in the order of the rows.

    Args:
        reference: label -> value of x, drawn as a dotted rule.
        series: key that gives colours; its values stand below each other within a name.

    Raises:
        UserError: no row can be drawn; the extra `report` is not installed.
    """
    alt = need("altair")
    kept, lost = split_finite(rows, [name, mean, low, high], text=[name])
    if not kept:
        raise nothing(title, [mean, low, high], rows)
    colour, shown = colours(kept, series, (), width)
    names = [key[0] for key in groups(kept, [name])]
    rows_each = len(groups(kept, [series])) if series else 1
    offset = alt.YOffset(field=field(series), type="nominal", sort=None) if series else alt.Undefined
    base = only(alt.Chart().encode(
        alt.Y(field=field(name), type="nominal", sort=names, title=None, axis=alt.Axis(labelLimit=300)),
        yOffset=offset, tooltip=tips(kept, [name, series, mean, low, high]), **colour), shown)

    def along(key: str) -> Any:
        return alt.X(field=field(key), type="quantitative", title=x_title or mean,
                     scale=alt.Scale(zero=False, padding=12), axis=alt.Axis(grid=True))

    line = base.mark_rule(strokeWidth=2.5, opacity=0.55, strokeCap="round")
    dot = base.mark_point(size=70, opacity=1)
    layers = [line.encode(along(low), alt.X2(field=field(high))).add_params(*shown), dot.encode(along(mean))]
    chart = alt.layer(*layers, *rules(reference, "x"), data=data(kept, [name, series, mean, low, high]))
    tall = max(60, 26 * len(names) * rows_each)
    return finish(chart, title, left_out(lost, "row"), width=width, height=tall)


def ridgeline(rows: Sequence[dict], layer: str, x: str, height: str, *, title: str | None = None,
              x_title: str | None = None, layer_title: str | None = None, log_x: bool = False,
              overlap: float = 2.5, width: int = WIDTH):
    """One filled outline a layer, below each other in the order of the rows, all on one scale of `height`.

    Args:
        overlap: height of the tallest outline, in distances between two layers.

    Raises:
        UserError: no row can be drawn; the extra `report` is not installed.
    """
    alt = need("altair")
    kept, lost = split_finite(rows, [layer, x, height], [x] * log_x, text=[layer])
    if not kept:
        raise nothing(title, [x, height], rows)
    tallest = max(abs(row[height]) for row in kept) or 1.0
    outlines = groups(kept, [layer])
    names = [str(key[0]) for key in outlines]
    points = [{**row, "base": i, "top": i - overlap * row[height] / tallest}
              for i, outline in enumerate(outlines.values())
              for row in sorted(outline, key=lambda row: row[x])]
    labelled = list(range(0, len(names), math.ceil(len(names) / 30)))
    # The list of names stands in the expression as JSON, which quotes whatever a name holds.
    axis = alt.Axis(values=labelled, tickCount=len(labelled), grid=False, labelOverlap=False,
                    labelExpr=f"{json.dumps(names)}[datum.value]")
    scale = alt.Scale(domain=[len(names) - 0.9, -overlap], nice=False)
    chart = alt.Chart(data(points, [layer, x, height, "base", "top"])).mark_area(
        fillOpacity=0.75, line={"strokeWidth": 1}).encode(
        alt.X(field=field(x), type="quantitative", title=x_title or x,
              scale=alt.Scale(type="log" if log_x else "linear", nice=False, zero=False)),
        alt.Y(field="top", type="quantitative", title=layer_title or layer, axis=axis, scale=scale),
        alt.Y2(field="base"),
        alt.Color(field="base", type="quantitative", legend=None),
        alt.Detail(field="base", type="quantitative"),
        tooltip=tips(points, [layer]))
    tall = min(560, 60 + 26 * len(names))
    return finish(chart, title, left_out(lost, "point"), width=width, height=tall)


def _lines(rows: Sequence[dict], x: str, y: str, mean: str, keys: Sequence[str], half_life: float,
           limit: int) -> list[dict]:
    """The points of every line in the order of x, with the smoothed value under `mean`, thinned."""
    points = []
    for line in groups(rows, keys).values():
        line = sorted(line, key=lambda row: row[x])
        means = smooth([row[y] for row in line], half_life)
        points += [{**line[i], mean: means[i]} for i in thin([row[y] for row in line], limit)]
    return points


def _along(points: Sequence[dict], x: str, title: str | None, log: bool, dots: bool) -> Any:
    alt = need("altair")
    whole = {"tickMinStep": 1} if all(isinstance(row[x], int) for row in points) else {}
    # "500µ" is no way to tell a learning rate.
    small = log and extent(points, [x])[0] < 1e-3
    return alt.X(field=field(x), type="quantitative", title=title or x,
                 axis=alt.Axis(format="~e" if small else "~s", labelOverlap=True, **whole),
                 scale=alt.Scale(type="log" if log else "linear", nice=False, zero=False, padding=8 * dots))


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
