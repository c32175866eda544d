"""A rule looks at the records of a run so far and says where something is wrong: a statistic of each place, and its limit.

Rules are values and pure: the same records give the same warnings, in the loop, in a callback of someone else's trainer, or years
later from `metrics.jsonl`. Nothing here needs torch. What a record holds tells `gnomon.series`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gnomon.diagnosis.readings import spelled_places

Record = Mapping[str, Any]
Scores = dict[str, float]
"""Place (`text.3.query`, `text.3`, "run") -> the statistic there."""


@dataclass(frozen=True)
class RunWarning:
    """What a rule found at one record.

    Args:
        rule: its name.
        level: "warning", of what ends badly if nothing is done; or "remark", of what a healthy run may have too.
        step: of the record.
        since: first step at which it was seen, without a break until `step`.
        places: where, worst first.
        value: the statistic at the worst place.
        what: where, since when, and how much, in words.
        why: what follows from it.
        remedy: what to do.
        evidence: the page that shows it.
    """

    rule: str
    level: str
    step: int
    since: int
    places: tuple[str, ...]
    value: float
    what: str
    why: str
    remedy: str
    evidence: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.rule}: {self.what}. {self.why}. What to do: {self.remedy}. See {self.evidence}"

    @property
    def headline(self) -> str:
        """The short form, for a progress line."""
        return f"{self.rule}: {self.what}"


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        name: of the rule, and of its section on the page with the evidence.
        reads: series without which it says nothing.
        statistic: of the records that hold all these, the newest last; {} where nothing can be said yet.
        limit: it speaks where the statistic reaches this, from below.
        what, why, remedy: the message; `what` is filled with `where`, `value` and `limit`.
        below: it speaks where the statistic falls to the limit instead.
        lasting: only of what is so at this many such records in a row.
        memory: so many records it looks back at.
        level: see `RunWarning`.
    """

    name: str
    reads: tuple[str, ...]
    statistic: Callable[[Sequence[Record]], Scores]
    limit: float
    what: str
    why: str
    remedy: str
    below: bool = False
    lasting: int = 2
    memory: int = 32
    level: str = "warning"

    @property
    def evidence(self) -> str:
        return f"docs/results/warnings.md#{self.name}"

    def reached(self, value: float) -> bool:
        # What is not finite is past every limit.
        return not math.isfinite(value) or (value <= self.limit if self.below else value >= self.limit)

    def warning(self, scores: Scores, step: int, since: int) -> RunWarning:
        """What there is to say of statistics of which one at least has reached the limit."""
        past = {place: value for place, value in scores.items() if self.reached(value)}
        places = tuple(sorted(past, key=lambda place: self._badness(past[place]), reverse=True))
        value = past[places[0]]
        what = self.what.format(where=spelled_places(places), value=value, limit=self.limit)
        if since < step:
            what += f", since step {since}"
        return RunWarning(
            self.name, self.level, step, since, places, value, what, self.why, self.remedy, self.evidence
        )

    def _badness(self, value: float) -> float:
        return math.inf if not math.isfinite(value) else -value if self.below else value
