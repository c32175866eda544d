"""Equal tuning: every contestant gets as many runs over the same space, by random search with successive halving.

A trial is a point of the space. All of them run for a share of the steps, the best quarter for all of the steps, on seeds that
no comparison uses (arXiv 1502.07943; rungs as whole runs, each with a schedule of its own length). Short runs favour high rates,
so the rate of the best is then halved and doubled at all of the steps, and on where the edge is best, as in the studies that tune
a rate alone; the best of all whole runs is the contestant's setting. The first trial is the recipe as it stands, so nobody loses
by tuning. The draws are stratified: of n trials each n-th of a knob's range holds one (a Latin hypercube), and they are the same
for all contestants that have the knob.

What runs next is a pure function of what has been measured, as in `gnomon.studies.study`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
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

RATE = "optim.lr"

Trial = tuple[tuple[str, Any], ...]
"""One point of a space: settings by path. The recipe as it stands is the empty trial."""


@dataclass(frozen=True)
class Budget:
    """How much tuning each contestant gets.

    Args:
        trials: points of the space, the recipe as it stands among them.
        share: of the steps, in the first rung.
        keep: of the trials go on to the second rung, which has all steps; a fraction.
        widen: how often the grid of rates around the best of those may grow.
    """

    trials: int = 16
    share: float = 0.25
    keep: float = 0.25
    widen: int = 2

    @property
    def finalists(self) -> int:
        return max(1, round(self.trials * self.keep))

    @property
    def runs(self) -> float:
        """What the tuning costs in whole runs, at most."""
        return self.trials * self.share + self.finalists + 2 + self.widen


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


Score = Callable[[Rung], "float | None"]
"""What a rung came to: lower is better, inf for a failure, None before it is measured."""


def wanted(space: Space, budget: Budget, score: Score, rate: float) -> list[Rung]:
    """The tuning runs as far as they can be known; `rate` is the recipe's own."""
    short = [Rung(trial, 0, budget.share) for trial in draws(space, budget)]
    scores = [score(rung) for rung in short]
    if any(found is None for found in scores):
        return short
    order = sorted(range(len(short)), key=lambda i: (scores[i], i))
    finals = [Rung(short[i].trial, 1, 1.0) for i in order[: budget.finalists]]
    winner = _lowest(finals, score)
    if winner is None or RATE not in space:
        return short + finals
    return short + list(dict.fromkeys(finals + _rates(winner.trial, budget, score, rate)))


def best(space: Space, budget: Budget, score: Score, rate: float) -> Trial | None:
    """The winner; None before all rungs are measured. The recipe as it stands wins where every whole run failed."""
    whole = [rung for rung in wanted(space, budget, score, rate) if rung.number == 1]
    winner = _lowest(whole, score)
    if winner is None:
        return None
    return winner.trial if math.isfinite(score(winner) or 0.0) else ()


def _lowest(rungs: list[Rung], score: Score) -> Rung | None:
    """The best of them, the first of equals; None before all are measured."""
    scores = [found for found in map(score, rungs) if found is not None]
    if not rungs or len(scores) < len(rungs):
        return None
    return rungs[min(range(len(rungs)), key=scores.__getitem__)]


def _rates(trial: Trial, budget: Budget, score: Score, rate: float) -> list[Rung]:
    """A trial at half and twice its rate, and on by factors of two while the best one known is at the edge."""
    start = dict(trial).get(RATE, rate)

    def at(factor: float) -> Rung:
        moved = {**dict(trial), RATE: float(f"{start * factor:.3g}")}
        return Rung(trial if factor == 1.0 else tuple(moved.items()), 1, 1.0)

    return [at(factor) for factor in widened((0.5, 1.0, 2.0), lambda factor: score(at(factor)), budget.widen)]


def widened(grid: Sequence[float], score: Callable[[float], float | None], times: int) -> list[float]:
    """An ascending grid, made longer by its own step, at most so many times, while the best of its values is at an edge."""
    grid = list(grid)
    for _ in range(times if len(grid) > 1 else 0):
        scores = [found for value in grid if (found := score(value)) is not None]
        if len(scores) < len(grid):
            break
        best = scores.index(min(scores))
        if best == 0:
            grid.insert(0, grid[0] ** 2 / grid[1])
        elif best == len(grid) - 1:
            grid.append(grid[-1] ** 2 / grid[-2])
        else:
            break
    return grid
