"""The parts that charts are put together from: fields, data, axes, colours, legend, rules."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from gnomon.errors import MissingExtra, UserError
from gnomon.report.chart_data import extent, groups, log_ticks, short
from gnomon.report.chart_options import Axis, Series
from gnomon.report.theme import DASHES, SERIES, theme

# One by one, as type checkers ask.
P = ParamSpec("P")
R = TypeVar("R")
WIDTH = 680  # pixels, of a picture; a page stretches charts to its own width
POSITIVE = " (above zero, on a logarithmic axis)"


def need(module: str) -> Any:
    """Import a package of the extra `report`, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(f"reports need the package {module!r}, which cannot be imported ({error}). "
                        'Install it: pip install "gnomon[report]"') from error


def unchecked(draw: Callable[P, R]) -> Callable[P, R]:
    """A chart drawn without altair's check of every part against its schema, a third of the time: tests check each kind whole."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> R:
        need("altair")  # or say how to install it
        with importlib.import_module("altair.utils.schemapi").debug_mode(False):
            return draw(*args, **kwargs)

    return drawn


def field(name: str) -> str:
    """A column name as Vega-Lite may have it: it reads dots and brackets as paths into nested objects."""
    return "".join("_" if c in ".[]\\\"':" else c for c in name)


def data(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> Any:
    """These columns of the rows, cut to the digits an eye can see.

    As one JSON text, which Vega reads: altair would check and copy thousands of dicts, value by value, for seconds.
    """
    names = {key: field(key) for key in keys if key}
    cut = [{name: short(row[key]) for key, name in names.items() if key in row} for row in rows]
    alt = need("altair")
    return alt.Data(values=json.dumps(cut), format=alt.JsonDataFormat(type="json"))


def tips(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[Any]:
    """Tooltip entries."""
    alt = need("altair")
    found = []
    for key in dict.fromkeys(key for key in keys if key):
        numbers = all(isinstance(row.get(key), float) for row in rows)
        form = {"type": "quantitative", "format": ".5~g"} if numbers else {"type": "nominal"}
        found.append(alt.Tooltip(field=field(key), title=key, **form))
    return found


def colours(rows: Sequence[dict[str, Any]], series: Series, width: int) -> tuple[dict[str, Any], list[Any]]:
    """The channels that tell `series` apart, and the selection behind the legend: the series that are shown."""
    alt = need("altair")
    if not series.key:
        return {}, []
    names = [key[0] for key in groups(rows, [series.key])]
    domain = list(dict.fromkeys([*series.order, *names]))
    fit = max(1, width // (45 + 7 * max(len(str(name)) for name in names)))
    legend = alt.Legend(columns=fit, values=names) if len(domain) > 1 else None
    channel = {"field": field(series.key), "type": "nominal", "legend": legend}
    channels = {"color": alt.Color(**channel, scale=alt.Scale(domain=domain))}
    if len(domain) > len(SERIES["light"]):
        # Colours start over; the dash tells the first round from the next.
        patterns = [DASHES[i // len(SERIES["light"]) % len(DASHES)] for i in range(len(domain))]
        channels["strokeDash"] = alt.StrokeDash(**channel, scale=alt.Scale(domain=domain, range=patterns))
    shown = alt.selection_point(fields=[field(series.key)], bind="legend", toggle="true",
                                value=[{field(series.key): name} for name in names])
    return channels, [shown] if legend else []


def only(chart: Any, shown: Sequence[Any]) -> Any:
    """The chart without the series that the reader has switched off."""
    for selection in shown:
        chart = chart.transform_filter(selection)
    return chart


def rules(reference: Mapping[str, float], axis: str) -> list[Any]:
    """Dotted lines across the chart at given values, with their names."""
    alt = need("altair")
    beside = {"y": {"align": "right", "dy": -5, "x": "width"}, "x": {"align": "center", "y": -7}}[axis]
    layers = []
    for label, value in reference.items():
        base = alt.Chart(alt.Data(values=[{}])).encode(**{axis: alt.datum(value)})
        layers += [base.mark_rule(strokeDash=[2, 3], strokeWidth=1.3), base.mark_text(text=label, **beside)]
    return layers


def left_out(count: int, what: str, why: str = "not finite") -> list[str]:
    return [f"left out: {count} {what}{'s' * (count > 1)}, {why}"] if count else []


def nothing(title: str, keys: Sequence[str], rows: Sequence[dict[str, Any]], why: str = "") -> UserError:
    wanted = ", ".join(map(repr, keys))
    present = ", ".join(map(repr, rows[0])) if rows else "none"
    return UserError(f"chart {title or keys[-1]!r} has nothing to draw: none of its {len(rows)} rows has "
                     f"finite {wanted}{why}. Keys of the first row: {present}.")


def along(points: Sequence[dict[str, Any]], x: Axis, dots: bool, column: str = "") -> Any:
    """The channel x; `column` where its numbers stand under another name in the chart."""
    alt = need("altair")
    whole = {"tickMinStep": 1} if all(isinstance(row[x.key], int) for row in points) else {}
    # "500µ" is no way to tell a learning rate.
    small = x.log and extent(points, [x.key])[0] < 1e-3
    zero = {} if x.log else {"zero": False}
    return alt.X(field=column or field(x.key), type="quantitative", title=x.shown,
                 axis=alt.Axis(format="~e" if small else "~s", labelOverlap=True, **whole),
                 scale=alt.Scale(type="log" if x.log else "linear", nice=False, padding=8 * dots, **zero))


def upright(points: Sequence[dict[str, Any]], keys: Sequence[str], log: bool,
            window: list[float] | None = None) -> dict[str, dict[str, Any]]:
    """Scale and axis of y: from zero when the values come near it, else with a little room at both ends."""
    low, high = extent(points, keys)
    small = {"format": ".1~e"} if high < 1e-3 or log and low < 1e-3 else {}
    if log:
        ticks = log_ticks(low, high)
        return {"scale": {"type": "log", "nice": False, "padding": 6}, "axis": {"values": ticks, "tickCount": len(ticks), **small}}
    near_zero = not window and 0 <= low < 0.15 * high
    room: dict[str, Any] = {"domain": window} if window else {} if near_zero else {"padding": 6}
    if high - low < 1e-3 * abs(high):
        # Ticks between numbers that all but agree would be rounded to one another, or to none of them.
        room = {"domain": sorted((0.9 * low, 1.1 * high))}
    return {"scale": {"type": "linear", "zero": near_zero, **room}, "axis": small}


def finish(chart: Any, title: str, notes: Sequence[str], choices: Mapping[str, Any] | None = None, **size: Any) -> Any:
    """Title, notes as subtitle, size and the house theme; `choices` is what a page lets its reader change."""
    subtitle = {"subtitle": "; ".join(notes)} if notes else {}
    alt = need("altair")
    head = {"title": alt.TitleParams(title, **subtitle)} if title or notes else {}
    # The mark lets a page swap the colours for dark paper without touching charts made elsewhere.
    told = {"usermeta": {"theme": "gnomon", **(choices or {})}, "config": alt.Config(**theme()), **head, **size}
    for key, value in told.items():
        chart[key] = value  # altair's own methods copy all layers, each time
    return chart
