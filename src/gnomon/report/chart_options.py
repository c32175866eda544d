"""What a chart is asked for besides its rows: what lies along an axis, what tells lines apart, how lines are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Axis:
    """An axis. Wherever a chart takes one, the key alone will do.

    Args:
        key: of the rows, what lies along the axis.
        title: with the unit; the key if not given.
        log: logarithmic. Numbers that are not positive are then left out.
        reference: label -> number on the axis, drawn as a dotted rule across the chart (a level of chance, a target).
    """

    key: str
    title: str = ""
    log: bool = False
    reference: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, given: str | Axis) -> Axis:
        return cls(given) if isinstance(given, str) else given

    @property
    def shown(self) -> str:
        return self.title or self.key


@dataclass(frozen=True)
class Series:
    """What tells lines or dots apart. The key alone will do.

    Args:
        key: whose values get a colour each; none for one colour.
        order: all values there are, so that a colour means the same in charts that lack one of them.
        dash: another key, whose values get a dash each (lines only).
    """

    key: str = ""
    order: Sequence[str] = ()
    dash: str = ""

    @classmethod
    def of(cls, given: str | Series) -> Series:
        return cls(given) if isinstance(given, str) else given


@dataclass(frozen=True)
class Line:
    """How lines are drawn.

    Args:
        dots: mark every point.
        band: keys of the lower and upper edge of a shaded band around each line.
        smooth: draw the mean over this share of the line to each side (the raw line stays, faint); 0 for none.
        focus: choose the range of y without the first `focus` share of x; the subtitle says so.
        limit: points a line may have, fewer where there are several; longer ones are thinned, keeping extremes and both ends.
    """

    dots: bool = False
    band: tuple[str, str] | tuple[()] = ()
    smooth: float = 0
    focus: float = 0
    limit: float = 1000
