"""A study: variants x learning rates x seeds, run as ordinary run folders until every figure is there.

What to run next is a pure function of what has been measured (`wanted`), so a study that was killed, finished in part, or
given more seeds simply goes on. Every variant has its learning rate tuned on a seed of its own, which the compared seeds
never use; a best rate at the edge of its grid moves the edge, because a grid that is too short is how baselines lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from gnomon.errors import UserError, check_name

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


class Finding(NamedTuple):
    """What the runs say to a claim: in words, whether it holds, and the figures that this rests on."""

    said: str
    holds: bool
    figures: Sequence[float]


@dataclass(frozen=True)
class Claim:
    """Something a paper says.

    Args:
        text, paper: the claim, and the paper's number.
        judge: what our runs say to it, given the `Results`. It is asked only where all variants it `needs` were run.
        needs: names of variants.
        pairs: comparisons (one variant, another) that `judge` asks `Results.against` for. They are declared, because the
            more a study compares, the more each comparison has to show.
    """

    text: str
    paper: str
    judge: Callable[[Any], Finding]
    needs: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Study:
    """Variants, seeds and claims.

    Args:
        name: also of the folder `gnomon study` makes.
        scale: as shown; a study of your own may say anything.
        tuning: share of a run's steps that tuning runs take.
        widen: how often a grid may grow.
        notes: Markdown for the end of the page.
        command: what repeats it, as shown; none for a study of your own.
        left_out: variants that were not asked for, of which claims say "not run".
        figures: adds the study's own pictures to a `Page`, given that and the `Results`.
    """

    name: str
    title: str
    scale: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning: float = 1.0
    widen: int = 2
    claims: tuple[Claim, ...] = ()
    notes: str = ""
    command: str = ""
    left_out: tuple[str, ...] = ()
    figures: Callable[[Any, Any], None] | None = None

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        for variant in self.variants:
            if variant.baseline is not None:
                check_name(f"baseline of {variant.name!r},", variant.baseline, names)
            if not variant.rates:
                raise UserError(f"variant {variant.name!r} has no learning rate: give rates=(…,)")
        if len({slug(name) for name in names}) < max(len(names), 1) or not self.seeds:
            raise UserError(f"a study needs variants whose names (as folders) differ, and seeds; got {names} and {self.seeds}")

    def only(self, names: Iterable[str]) -> Study:
        """The variants of these names, and the baselines they need."""
        kept, more = set[str](), set(names)
        while more - kept:
            kept |= more
            more = {variant.baseline for variant in self.variants if variant.name in kept and variant.baseline is not None}
        variants = tuple(variant for variant in self.variants if variant.name in kept)
        gone = tuple(variant.name for variant in self.variants if variant.name not in kept)
        return replace(self, variants=variants, left_out=self.left_out + gone)

    @property
    def comparisons(self) -> list[tuple[str, str]]:
        """Every comparison the study makes, once: of each variant with its baseline, and those of its claims."""
        names = {variant.name for variant in self.variants}
        pairs = [(variant.name, variant.baseline) for variant in self.variants if variant.baseline is not None]
        pairs += [pair for claim in self.claims for pair in claim.pairs]
        return [pair for pair in dict.fromkeys(pairs) if names.issuperset(pair)]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    variant: str
    rate: float
    seed: int
    recipe: Any = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.variant}, lr {self.rate:g}, seed {self.seed}"

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


Measured = Mapping[PlannedRun, Outcome]


def wanted(study: Study, variant: Variant, measured: Measured) -> list[PlannedRun]:
    """The runs of a variant as far as they can be known from what is measured: its tuning, then its compared seeds."""
    tuning = [_run(variant, rate, TUNING_SEED, study.tuning) for rate in rates(study, variant, measured)]
    if len(tuning) < 2:
        tuning = []
    elif not all(run in measured for run in tuning):
        return tuning
    best = best_rate(study, variant, measured)
    return tuning + [_run(variant, best, seed, 1.0) for seed in study.seeds]


def rates(study: Study, variant: Variant, measured: Measured) -> list[float]:
    """The grid, widened by its own step (at most `study.widen` times) while the best rate lies at an edge."""
    grid = list(variant.rates)
    for _ in range(study.widen if len(grid) > 1 else 0):
        scores = {r: measured[run].score for r in grid if (run := _run(variant, r, TUNING_SEED, study.tuning)) in measured}
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
    return min(grid, key=lambda rate: measured[_run(variant, rate, TUNING_SEED, study.tuning)].score)


def at_edge(study: Study, variant: Variant, measured: Measured) -> bool:
    """Whether the tuned rate is still at an edge of the widened grid: a flag, since it may not be the best."""
    grid = rates(study, variant, measured)
    return len(grid) > 1 and best_rate(study, variant, measured) in (grid[0], grid[-1])


def plan(study: Study) -> Iterator[PlannedRun]:
    """All runs before anything is known: every rate of every grid, and the compared seeds at the first guess."""
    for variant in study.variants:
        if len(variant.rates) > 1:
            yield from (_run(variant, rate, TUNING_SEED, study.tuning) for rate in variant.rates)
        middle = variant.rates[len(variant.rates) // 2]
        yield from (_run(variant, middle, seed, 1.0) for seed in study.seeds)


def _run(variant: Variant, rate: float, seed: int, share: float) -> PlannedRun:
    rate = float(f"{rate:.3g}")
    recipe = variant.recipe.at(rate, seed)
    return PlannedRun(variant.name, rate, seed, replace(recipe, steps=max(int(recipe.steps * share), 1)))


def slug(name: str) -> str:
    """A variant's name as a folder."""
    return "".join(c if c.isalnum() or c in ".=-" else "-" for c in name).strip("-").lower()
