"""Charts as plain functions: rows (lists of dicts) in, an altair chart out. Those with lines are in `line_charts`.

All share one theme, show values on hover, and hide a series when its legend entry is clicked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gnomon.report.chart_data import extent, groups, split_finite
from gnomon.report.chart_options import Axis, Series
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
    tips,
    unchecked,
    upright,
)


@unchecked
def heatmap(rows: Sequence[dict[str, Any]], x: str | Axis, y: str | Axis, value: str | Axis, title: str = "",
            domain: tuple[float, float] | None = None, *, width: int = WIDTH) -> Any:
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
        # Black where the colour's luminance is above 0.18, from where on it stands out more than white: either has 4.5 : 1 or more.
        number = f"datum[{json.dumps(field(value.key))}]"
        light = f"{number} > {0.79 * low} && {number} < {0.88 * high}" if diverging else f"{number} > {low + 0.43 * (high - low)}"
        layers.append(base.mark_text(fontSize=10).encode(
            alt.Text(field=field(value.key), type="quantitative", format=".2f"),
            color=alt.condition(light, alt.value("#000000"), alt.value("#ffffff"))))
    step = alt.Step(cell)
    return finish(alt.layer(*layers), title, left_out(lost, "cell"), width=step, height=step)


@unchecked
def scatter(rows: Sequence[dict[str, Any]], x: str | Axis, y: str | Axis, series: str | Series = "", title: str = "", *,
            told: Sequence[str] = (), size: tuple[int, int] = (WIDTH, 300)) -> Any:
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
    over = alt.Y(field=field(y.key), type="quantitative", title=y.shown, **upright(kept, [y.key], y.log))
    keys = [x.key, y.key, by.key, *told]
    dots = only(alt.Chart().encode(along(kept, x, True), over, tooltip=tips(kept, keys), **colour), shown)
    dots = dots.mark_point(size=60, filled=True, opacity=0.75)
    chart = alt.layer(dots.add_params(*shown), *rules(y.reference, "y"), data=data(kept, keys))
    return finish(chart, title, left_out(lost, "row"), width=size[0], height=size[1])


@unchecked
def intervals(rows: Sequence[dict[str, Any]], name: str, mean: str | Axis, low: str, high: str, series: str = "",
              title: str = "", *, names: Sequence[str] = (), beside: bool = True, width: int = WIDTH) -> Any:
    """A dot at `mean` and a line from `low` to `high` for every `name`, in the order of the rows.

    Args:
        series: key that gives colours; its values stand below each other within a name.
        names: all names there are, in order, so that one without a row shows as a gap.
        beside: False where a name has one row, whatever its series.

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
    names = list(names) or [key[0] for key in groups(kept, [name])]
    beside = beside and bool(series)
    rows_each = len(groups(kept, [series])) if beside else 1
    offset = alt.YOffset(field=field(series), type="nominal", sort=None) if beside else alt.Undefined
    base = only(alt.Chart().encode(
        alt.Y(field=field(name), type="nominal", sort=names, title=None, axis=alt.Axis(labelLimit=300),
              scale=alt.Scale(domain=names)),
        yOffset=offset, tooltip=tips(kept, keys), **colour), shown)

    def along(key: str) -> Any:
        return alt.X(field=field(key), type="quantitative", title=mean.shown,
                     scale=alt.Scale(zero=False, padding=12), axis=alt.Axis(grid=True))

    line = base.mark_rule(strokeWidth=2.5, opacity=0.55, strokeCap="round")
    dot = base.mark_point(size=70, opacity=1)
    layers = [line.encode(along(low), alt.X2(field=field(high))).add_params(*shown), dot.encode(along(mean.key))]
    chart = alt.layer(*layers, *rules(mean.reference, "x"), data=data(kept, keys))
    return finish(chart, title, left_out(lost, "row"), width=width, height=max(60, 26 * len(names) * rows_each))
