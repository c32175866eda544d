"""Reading records: a series by place, by block or by role, and how it has grown. Nothing here needs torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gnomon.series import known, split_place

Record = Mapping[str, Any]


def by_place(record: Record, key: str) -> dict[str, float]:
    """A series of a record, one number a place; heads are reduced as `gnomon.series` says. Older runs' lists count as blocks, or as
    sublayers two a block."""
    value = record.get(key)
    if isinstance(value, list):
        halves = known(key).over == "sublayer"
        names = [f"text.{i // 2}.{('attention', 'mlp')[i % 2]}" if halves else f"text.{i}.attention" for i in range(len(value))]
        value = dict(zip(names, value))
    if not isinstance(value, Mapping):
        return {}
    reduce = largest if known(key).heads == "max" else statistics.fmean
    return {place: reduce(item) if isinstance(item, list) else item for place, item in value.items() if item != []}


def largest(values: Sequence[float]) -> float:
    """The maximum; NaN where one of them is."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def by_block(values: Mapping[str, float], reduce: Callable[[list[float]], float] = largest) -> dict[str, float]:
    """`text.3.attention`, `text.3.mlp` -> `text.3`."""
    return _grouped(values, lambda place: ".".join(map(str, split_place(place)[:2])), reduce)


def by_role(values: Mapping[str, float], reduce: Callable[[list[float]], float] = largest) -> dict[str, float]:
    """`text.3.query`, `text.4.query` -> `query`; experts of a role count together."""
    return _grouped(values, role, reduce)


def role(place: str) -> str:
    return split_place(place)[2].rpartition(".")[2]


def _grouped(
    values: Mapping[str, float], name: Callable[[str], str], reduce: Callable[[list[float]], float]
) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    for place, value in values.items():
        groups.setdefault(name(place), []).append(value)
    return {group: reduce(inside) for group, inside in groups.items()}


def root_sum(values: Iterable[float]) -> float:
    """Root of the sum of squares: the norm of a whole from those of its parts."""
    return math.hypot(*values)


def ratio(now: float, before: float) -> float:
    """now / before; 1 where both are zero."""
    return now / before if before > 0 else 1.0 if now == before else math.inf


def usual(values: Sequence[float]) -> float:
    """The median of those that are finite."""
    return statistics.median([value for value in values if math.isfinite(value)] or [math.nan])


def spelled_places(places: Sequence[str], limit: int = 4) -> str:
    """Places in words: "query of text 3, 4 and 7"; at most `limit` groups are named."""
    groups: dict[tuple[str, str], list[int]] = {}
    others = []
    for place in places:
        try:
            stack, layer, name = split_place(place)
        except ValueError:
            stack, _, number = place.rpartition(".")
            if not (stack and number.isdigit()):
                others.append(place)
                continue
            layer, name = int(number), "block"
        groups.setdefault((name, stack), []).append(layer)
    said = [f"{name} {_listed(sorted(layers))} of {stack}" for (name, stack), layers in groups.items()] + others
    return ", ".join(said[:limit]) + (f" and {len(said) - limit} more" if len(said) > limit else "")


def _listed(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 5] -> "1–3, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in spans)
