"""A study: variants x learning rates x seeds, run as ordinary run folders until every figure is there.

What to run next is a pure function of what has been measured (`wanted`), so a study that was killed, finished in part, or
given more seeds simply goes on. Every variant has its learning rate tuned on a seed of its own, which the compared seeds
never use; a best rate at the edge of its grid moves the edge, because a grid that is too short is how baselines lose.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gnomon.studies import verdict
from gnomon.studies.verdict import Verdict

TUNING_SEED = 1000


@dataclass(frozen=True)
class Variant:
    """One contestant.

    Args:
        name: as shown.
        recipe: what runs; its learning rate is the first guess. A `Recipe` or an `MLPRecipe`.
        rates: learning rates to tune over, ascending; a single one is taken as it is.
        baseline: name of the variant it is compared with; None for a baseline.
        group: variants of one group are drawn together.
    """

    name: str
    recipe: Any
    rates: tuple[float, ...]
    baseline: str | None = None
    group: str = ""


@dataclass(frozen=True)
class Claim:
    """Something a paper says, and how to judge it: `judge(results)` returns our finding and a verdict, one of "reproduced",
    "not reproduced", "not testable at this scale". It is asked only where all variants it `needs` were run."""

    text: str
    paper: str
    judge: Callable[[Results], tuple[str, str]]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """Variants, seeds and claims. `tuning` is the share of a run's steps that tuning runs take; `widen` how often a grid may
    grow."""

    name: str
    title: str
    scale: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning: float = 1.0
    widen: int = 2
    claims: tuple[Claim, ...] = ()
    notes: str = ""


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    variant: str
    rate: float
    seed: int
    recipe: Any = field(compare=False, repr=False)

    @property
    def tuning(self) -> bool:
        return self.seed >= TUNING_SEED

    @property
    def folder(self) -> Path:
        return Path("runs") / slug(self.variant) / f"{'tune' if self.tuning else 'seed'}-{self.seed}-lr-{self.rate:g}"


@dataclass(frozen=True)
class Outcome:
    """What a finished run came to. `fate` is "learned", "stalled" or "diverged"."""

    fate: str
    value: float
    seconds: float
    folder: Path

    @property
    def score(self) -> float:
        """The value to tune by: worst where the run diverged."""
        return math.inf if self.fate == "diverged" else self.value


Measured = Mapping[Job, Outcome]


def wanted(study: Study, variant: Variant, measured: Measured) -> list[Job]:
    """The runs of a variant as far as they can be known from what is measured: its tuning, then its compared seeds."""
    tuning = [_job(variant, rate, TUNING_SEED, study.tuning) for rate in rates(study, variant, measured)]
    if len(tuning) < 2:
        tuning = []
    elif not all(job in measured for job in tuning):
        return tuning
    best = best_rate(study, variant, measured)
    return tuning + [_job(variant, best, seed, 1.0) for seed in study.seeds]


def rates(study: Study, variant: Variant, measured: Measured) -> list[float]:
    """The grid, widened by its own step (at most `study.widen` times) while the best rate lies at an edge."""
    grid = list(variant.rates)
    for _ in range(study.widen if len(grid) > 1 else 0):
        scores = {r: measured[j].score for r in grid if (j := _job(variant, r, TUNING_SEED, study.tuning)) in measured}
        if len(scores) < len(grid):
            break
        best = min(grid, key=lambda r: scores[r])
        if best == grid[0]:
            grid.insert(0, grid[0] ** 2 / grid[1])
        elif best == grid[-1]:
            grid.append(grid[-1] ** 2 / grid[-2])
        else:
            break
    return [float(f"{r:.3g}") for r in grid]


def best_rate(study: Study, variant: Variant, measured: Measured) -> float:
    """The tuned learning rate; the only one where there is no grid."""
    grid = rates(study, variant, measured)
    if len(grid) == 1:
        return grid[0]
    return min(grid, key=lambda rate: measured[_job(variant, rate, TUNING_SEED, study.tuning)].score)


def at_edge(study: Study, variant: Variant, measured: Measured) -> bool:
    """Whether the tuned rate is still at an edge of the widened grid: a flag, since it may not be the best."""
    grid = rates(study, variant, measured)
    return len(grid) > 1 and best_rate(study, variant, measured) in (grid[0], grid[-1])


def plan(study: Study) -> Iterator[Job]:
    """All runs before anything is known: every rate of every grid, and the compared seeds at the first guess."""
    for variant in study.variants:
        if len(variant.rates) > 1:
            yield from (_job(variant, rate, TUNING_SEED, study.tuning) for rate in variant.rates)
        middle = variant.rates[len(variant.rates) // 2]
        yield from (_job(variant, middle, seed, 1.0) for seed in study.seeds)


def _job(variant: Variant, rate: float, seed: int, share: float) -> Job:
    rate = float(f"{rate:.3g}")
    recipe = variant.recipe.at(rate, seed)
    return Job(variant.name, rate, seed, replace(recipe, steps=max(int(recipe.steps * share), 1)))


def slug(name: str) -> str:
    """A variant's name as a folder."""
    return "".join(c if c.isalnum() or c in ".=-" else "-" for c in name).strip("-").lower()


class Results:
    """What a study measured, asked by variant name."""

    def __init__(self, study: Study, measured: Measured):
        self.study, self.measured = study, measured
        self._variants = {variant.name: variant for variant in study.variants}

    def __contains__(self, name: str) -> bool:
        return name in self._variants

    def recipe(self, name: str) -> Any:
        """What the variant runs, at its first guess of a rate."""
        return self._variants[name].recipe

    def rate(self, name: str) -> float:
        """The tuned learning rate."""
        return best_rate(self.study, self._variants[name], self.measured)

    def compared(self, name: str) -> dict[int, Outcome]:
        """Seed -> outcome of the compared runs."""
        found = {job.seed: outcome for job, outcome in self.measured.items() if job.variant == name and not job.tuning}
        return {seed: found[seed] for seed in self.study.seeds if seed in found}

    def tuned(self, name: str) -> dict[float, Outcome]:
        """Rate -> outcome of the tuning runs."""
        found = {job.rate: outcome for job, outcome in self.measured.items() if job.variant == name and job.tuning}
        return dict(sorted(found.items()))

    def values(self, name: str) -> dict[int, float]:
        """Seed -> final value of the compared runs that did not diverge."""
        return {seed: out.value for seed, out in self.compared(name).items() if out.fate != "diverged"}

    def mean(self, name: str) -> float:
        """Mean final value over seeds; NaN when all diverged."""
        return statistics.fmean(found) if (found := list(self.values(name).values())) else math.nan

    def fates(self, name: str, fate: str) -> int:
        """How many compared runs met that fate."""
        return sum(outcome.fate == fate for outcome in self.compared(name).values())

    def against(self, name: str, baseline: str) -> Verdict:
        return verdict.compare(self.values(name), self.values(baseline))

    def row(self, name: str) -> dict[str, Any]:
        """The variant's line in the table."""
        variant, values = self._variants[name], list(self.values(name).values())
        row: dict[str, Any] = {
            "variant": name,
            "lr": self.rate(name),
            "edge": at_edge(self.study, variant, self.measured),
            "seeds": len(self.compared(name)),
            "mean": self.mean(name),
            "sd": verdict.spread(values),
            "diverged": self.fates(name, "diverged"),
            "stalled": self.fates(name, "stalled"),
            "baseline": variant.baseline,
            "difference": None,
            "low": None,
            "high": None,
            "verdict": "baseline" if variant.baseline is None else None,
        }
        if variant.baseline is not None and variant.baseline in self._variants:
            found = self.against(name, variant.baseline)
            row |= {"difference": found.mean, "low": found.low, "high": found.high, "verdict": found.word}
        return row

    def rows(self) -> list[dict[str, Any]]:
        return [self.row(variant.name) for variant in self.study.variants]

    def claims(self) -> list[dict[str, str]]:
        """One row for each claim: claim, paper's number, ours, seeds, verdict."""
        found = []
        for claim in self.study.claims:
            there = all(name in self and self.compared(name) for name in claim.needs)
            ours, word = claim.judge(self) if there else ("not run", "not testable at this scale")
            found.append({"claim": claim.text, "paper": claim.paper, "ours": ours, "seeds": str(len(self.study.seeds)),
                          "verdict": word})  # fmt: skip
        return found
