"""Equal tuning: every contestant gets as many runs over the same space, by random search with successive halving.

A trial is a point of the space. All of them run for a share of the steps, the best quarter for all of the steps, on seeds that
no comparison uses; the best of those is the contestant's setting (arXiv 1502.07943; rungs as whole runs, each with a schedule of
its own length). The first trial is the recipe as it stands, so nobody loses by tuning. The draws are stratified: of n trials
each n-th of a knob's range holds one (a Latin hypercube), and they are the same for all contestants that have the knob.

What runs next is a pure function of what has been measured, as in `gnomon.studies.study`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Log:
    """Any number from `low` to `high`, evenly on a logarithmic scale; two digits, since more would tell nothing."""

    low: float
    high: float

    def at(self, place: float) -> float:
        """The value at `place` of the range, from 0 to 1."""
        return float(f"{self.low * (self.high / self.low) ** place:.2g}")


@dataclass(frozen=True)
class Choice:
    """One of a few values, each as likely."""

    values: tuple[Any, ...]

    def at(self, place: float) -> Any:
        return self.values[min(int(place * len(self.values)), len(self.values) - 1)]


Space = Mapping[str, Log | Choice]
"""Setting by dotted path -> where its values come from."""

Trial = tuple[tuple[str, Any], ...]
"""One point of a space: settings by path. The recipe as it stands is the empty trial."""


@dataclass(frozen=True)
class Budget:
    """How much tuning each contestant gets.

    Args:
        trials: points of the space, the recipe as it stands among them.
        share: of the steps, in the first rung.
        keep: of the trials go on to the second rung, which has all steps; a fraction.
    """

    trials: int = 16
    share: float = 0.25
    keep: float = 0.25

    @property
    def finalists(self) -> int:
        return max(1, round(self.trials * self.keep))

    @property
    def runs(self) -> float:
        """What the tuning costs, in whole runs."""
        return self.trials * self.share + self.finalists


@dataclass(frozen=True)
class Rung:
    """A trial at one length: `number` 0 is the short rung, 1 the whole run."""

    trial: Trial
    number: int
    share: float


def label(trial: Trial) -> str:
    """A trial as part of a folder's name."""
    return hashlib.sha256(json.dumps(trial).encode()).hexdigest()[:8] if trial else "as-it-stands"


def draws(space: Space, budget: Budget) -> list[Trial]:
    """The trials of a space: the recipe as it stands, then a Latin hypercube."""
    return list(_draws(tuple(space.items()), budget.trials - 1))


@functools.cache
def _draws(space: tuple[tuple[str, Log | Choice], ...], count: int) -> tuple[Trial, ...]:
    columns: dict[str, list[Any]] = {}
    for path, knob in space:
        # A stream of its own for each knob, so that contestants with more knobs share the draws of the common ones.
        stream = random.Random(f"gnomon {path}")
        places = [(i + stream.random()) / count for i in range(count)]
        stream.shuffle(places)
        columns[path] = [knob.at(place) for place in places]
    return ((), *(tuple((path, column[i]) for path, column in columns.items()) for i in range(count)))


def wanted(space: Space, budget: Budget, score: Callable[[Rung], float | None]) -> list[Rung]:
    """The tuning runs as far as they can be known; `score` tells a measured one's (lower is better, inf for a failure), or None."""
    short = [Rung(trial, 0, budget.share) for trial in draws(space, budget)]
    scores = [score(rung) for rung in short]
    if any(found is None for found in scores):
        return short
    order = sorted(range(len(short)), key=lambda i: (scores[i], i))
    return short + [Rung(short[i].trial, 1, 1.0) for i in order[: budget.finalists]]


def best(space: Space, budget: Budget, score: Callable[[Rung], float | None]) -> Trial | None:
    """The winner; None before all rungs are measured. The recipe as it stands wins where every finalist failed."""
    finals = [rung for rung in wanted(space, budget, score) if rung.number == 1]
    scores = [score(rung) for rung in finals]
    if not finals or any(found is None for found in scores):
        return None
    found, trial = min(((s, i) for i, s in enumerate(scores)), key=lambda pair: pair[0])
    return finals[trial].trial if math.isfinite(found) else ()
