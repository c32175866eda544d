"""What happens to the numbers of a chart before they are drawn: leave out, smooth, thin. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any

from gnomon.report.tables import is_number


def split_finite(rows: Sequence[dict[str, Any]], keys: Sequence[str], log: Sequence[str] = (),
                 text: Sequence[str] = ()) -> tuple[list[dict[str, Any]], int]:
    """The rows that can be drawn, and how many had to be left out.

    A row without one of `keys` never was a point and is not counted. One whose value is None, NaN or
    infinite, or not positive where the axis (`log`) is logarithmic, is counted. `text` may hold anything.
    """
    points = [row for row in rows if all(key in row for key in keys)]
    numbers = [key for key in keys if key not in text]
    kept = [row for row in points if all(drawable(row[key], key in log) for key in numbers)]
    return kept, len(points) - len(kept)


def drawable(value: Any, log: bool = False) -> bool:
    return is_number(value) and math.isfinite(value) and (value > 0 or not log)


def thin(y: Sequence[float], limit: float) -> list[int]:
    """Indices of at most `limit` points that draw the same line: extremes of equal stretches, and both ends.

    A spike of a single step survives, which averaging or every-nth would lose.
    """
    count = len(y)
    if count <= max(limit, 4):
        return list(range(count))
    stretches = int(limit - 2) // 2
    kept = {0, count - 1}
    for i in range(stretches):
        stretch = range(i * count // stretches, (i + 1) * count // stretches)
        kept.add(min(stretch, key=y.__getitem__))
        kept.add(max(stretch, key=y.__getitem__))
    return sorted(kept)


def smooth(y: Sequence[float], half_life: float) -> list[float]:
    """Exponential mean to both sides: a point `half_life` away counts half. It does not lag behind the curve.

    s_t = Σ_i d^|t-i| y_i / Σ_i d^|t-i| with d = 2^(-1/half_life).
    """
    if half_life <= 0:
        return list(y)
    decay = 0.5 ** (1 / half_life)
    sums, weights = _both_sides(y, decay), _both_sides([1.0] * len(y), decay)
    return [total / weight for total, weight in zip(sums, weights)]


def _both_sides(y: Sequence[float], decay: float) -> list[float]:
    """Σ_i decay^|t-i| y_i for every t."""
    behind = list(accumulate(y, lambda total, value: total * decay + value))
    ahead = list(accumulate(y[::-1], lambda total, value: total * decay + value))[::-1]
    return [b + a - value for b, a, value in zip(behind, ahead, y)]


def noisy(y: Sequence[float]) -> bool:
    """Whether a line goes up and down so much, many times its range, that only a mean makes it readable."""
    return len(y) > 100 and sum(abs(b - a) for a, b in zip(y, y[1:])) > 10 * (max(y) - min(y))


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers for a logarithmic axis: powers of ten, with 2 and 5 between where those are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if high <= 100 * low else (1,)
    every = max(1, (last - first) // 6)
    return [float(f"{step}e{power}") for power in range(first, last + 1, every) for step in steps]


def extent(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> tuple[float, float]:
    values = [row[key] for row in rows for key in keys]
    return min(values), max(values)


def late_range(rows: Sequence[dict[str, Any]], x: str, y: str, share: float) -> list[float] | None:
    """The range of `y` after the first `share` of `x`; None when leaving that out would gain little."""
    start, end = extent(rows, [x])
    low, high = extent([row for row in rows if row[x] >= start + share * (end - start)], [y])
    margin = 0.06 * (high - low)
    if not share or not margin or extent(rows, [y])[1] <= high + 4 * margin:
        return None
    return [low - margin, high + margin]


def groups(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by the values of `keys`, in order of first appearance."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return found


def short(value: Any) -> Any:
    """A number for JSON, floats cut to what an eye can see of them, which halves the size of a page."""
    if not is_number(value):
        return value
    return int(value) if isinstance(value, Integral) else float(f"{value:.6g}")
