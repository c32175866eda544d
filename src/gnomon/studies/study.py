"""A study: variants x learning rates x seeds, run as ordinary run folders until every figure is there.

What to run next is a pure function of what has been measured (`wanted`), so a study that was killed, finished in part, or
given more seeds simply goes on. Every variant is tuned on seeds of its own, which the compared seeds never use: its learning
rate over a grid, or all that its `space` holds by `gnomon.studies.search`. A best rate at the edge of its grid moves the edge,
because a grid that is too short is how baselines lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from gnomon.errors import UserError, check_name
from gnomon.studies import search
from gnomon.studies.search import Budget, Rung, Space, Trial
from gnomon.train import replace as changed

TUNING_SEED = 1000


@dataclass(frozen=True)
class Variant:
    """One contestant.

    Args:
        name: as shown.
        recipe: what runs; its learning rate is the first guess. A `Recipe`; or what has its `at`, `shortened`,
            `steps` and `tokens_per_step`, and `train(folder)`, `to_dict()` and `expected()`, as an `MLPRecipe`.
        rates: learning rates to tune over, ascending; a single one is taken as it is.
        baseline: name of the variant it is compared with; None for a baseline.
        group: variants of one group are drawn together.
        space: what is tuned by random search, in place of `rates`; the budget is the study's.
        like: name of a variant whose search it builds on: the settings that won there, then `moved`, then `share` of the
            steps; `rates` are factors on the rate that won. `recipe` is the same of the settings before the search.
    """

    name: str
    recipe: Any
    rates: tuple[float, ...]
    baseline: str | None = None
    group: str = ""
    space: Space | None = None
    like: str | None = None
    moved: Mapping[str, Any] = field(default_factory=dict[str, Any])
    share: float = 1.0


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
        budget: of every variant that has a space.
        notes: Markdown for the end of the page.
        command: what repeats it, as shown; none for a study of your own.
        left_out: variants that were not asked for, of which claims say "not run".
        figures: adds the study's own pictures to a `Page`, given that and the `Results`.
        kept: series of a run's records that its line in the outcomes file keeps, at a few of the steps that have the first of them:
            what claims and pictures need besides losses.
    """

    name: str
    title: str
    scale: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning: float = 1.0
    widen: int = 2
    budget: Budget = Budget()
    claims: tuple[Claim, ...] = ()
    notes: str = ""
    command: str = ""
    left_out: tuple[str, ...] = ()
    figures: Callable[[Any, Any], None] | None = None
    kept: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        for variant in self.variants:
            if variant.baseline is not None:
                check_name(f"baseline of {variant.name!r},", variant.baseline, names)
            if variant.like is not None:
                check_name(f"model of {variant.name!r},", variant.like, [v.name for v in self.variants if v.space is not None])
            if not variant.rates:
                raise UserError(f"variant {variant.name!r} has no learning rate: give rates=(…,)")
        if len({slug(name) for name in names}) < max(len(names), 1) or not self.seeds:
            raise UserError(f"a study needs variants whose names (as folders) differ, and seeds; got {names} and {self.seeds}")

    def only(self, names: Iterable[str]) -> Study:
        """The variants of these names or groups, and those they need: baselines, and what they build on."""
        kept, asked = set[str](), set(names)
        more = {variant.name for variant in self.variants if asked & {variant.name, variant.group}}
        while more - kept:
            kept |= more
            needed = [name for v in self.variants if v.name in kept for name in (v.baseline, v.like)]
            more = {name for name in needed if name is not None}
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
    trial: Trial | None = None
    """Settings that a search gave the variant; None where only the rate is tuned."""

    def __str__(self) -> str:
        return f"{self.variant}, lr {self.rate:g}, seed {self.seed}"

    @property
    def tuning(self) -> bool:
        return self.seed >= TUNING_SEED

    @property
    def folder(self) -> Path:
        known_by = f"lr-{self.rate:g}" if self.trial is None else f"trial-{search.label(self.trial)}"
        return Path("runs") / slug(self.variant) / f"{'tune' if self.tuning else 'seed'}-{self.seed}-{known_by}"


@dataclass(frozen=True)
class Outcome:
    """What a finished run came to.

    Args:
        fate: "learned", "stalled" or "diverged".
        value: final validation loss, nats.
        folder: of the run; it may lie on another machine, and then `points` and `records` are what there is of the curve.
        points: (step, tokens, validation loss).
        records: of a few steps, what the study keeps besides.
    """

    fate: str
    value: float
    seconds: float
    folder: Path
    points: tuple[tuple[int, int, float], ...] = ()
    records: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)

    @property
    def score(self) -> float:
        """The value to tune by: worst where the run diverged."""
        return math.inf if self.fate == "diverged" else self.value


Measured = Mapping[PlannedRun, Outcome]


def wanted(study: Study, variant: Variant, measured: Measured) -> list[PlannedRun]:
    """The runs of a variant as far as they can be known from what is measured: its tuning, then its compared seeds."""
    known = resolved(study, variant, measured)
    if known is None:
        return []
    variant = known
    if variant.space is not None:
        rungs = search.wanted(variant.space, study.budget, _score(variant, measured), variant.recipe.optim.lr)
        winner = tuned(study, variant, measured)
        seeds = study.seeds if winner is not None else ()
        return [_rung(variant, one) for one in rungs] + [_trial(variant, winner or (), seed, 1.0) for seed in seeds]
    tuning = [_run(variant, rate, TUNING_SEED, study.tuning) for rate in rates(study, variant, measured)]
    if len(tuning) < 2:
        tuning = []
    elif not all(run in measured for run in tuning):
        return tuning
    best = best_rate(study, variant, measured)
    return tuning + [_run(variant, best, seed, 1.0) for seed in study.seeds]


def resolved(study: Study, variant: Variant, measured: Measured) -> Variant | None:
    """The variant as it runs: one that builds on another's search with what won there; None before that is known."""
    if variant.like is None:
        return variant
    model = next(v for v in study.variants if v.name == variant.like)
    won = tuned(study, model, measured)
    if won is None:
        return None
    recipe = changed(changed(model.recipe, dict(won)), variant.moved).shortened(variant.share)
    rates = tuple(recipe.optim.lr * factor for factor in variant.rates)
    return replace(variant, recipe=recipe, rates=rates, like=None)


def tuned(study: Study, variant: Variant, measured: Measured) -> Trial | None:
    """The settings that won the search of a variant's space; None before it is done, or where there is no space."""
    if variant.space is None:
        return None
    return search.best(variant.space, study.budget, _score(variant, measured), variant.recipe.optim.lr)


def rates(study: Study, variant: Variant, measured: Measured) -> list[float]:
    """The grid, widened by its own step (at most `study.widen` times) while the best rate lies at an edge."""
    variant = resolved(study, variant, measured) or variant

    def score(rate: float) -> float | None:
        found = measured.get(_tuning_run(variant, rate))
        return None if found is None else found.score

    grid = search.widened(variant.rates, score, study.widen)
    return [float(f"{r:.3g}") for r in grid]


def best_rate(study: Study, variant: Variant, measured: Measured) -> float:
    """The tuned learning rate; the only one where there is no grid."""
    variant = resolved(study, variant, measured) or variant
    if variant.space is not None:
        return _trial(variant, tuned(study, variant, measured) or (), 0, 1.0).rate
    grid = rates(study, variant, measured)
    if len(grid) == 1:
        return grid[0]
    return min(grid, key=lambda rate: measured[_tuning_run(variant, rate)].score)


def at_edge(study: Study, variant: Variant, measured: Measured) -> bool:
    """Whether the tuned rate is still at an edge of the widened grid: a flag, since it may not be the best."""
    if variant.space is not None:
        return False
    grid = rates(study, variant, measured)
    return len(grid) > 1 and best_rate(study, variant, measured) in (grid[0], grid[-1])


def plan(study: Study) -> Iterator[PlannedRun]:
    """All runs before anything is known: every rate of every grid, and the compared seeds at the first guess."""
    for variant in study.variants:
        if variant.space is not None:
            rungs = search.wanted(variant.space, study.budget, lambda rung: None if rung.number else 0.0, variant.recipe.optim.lr)
            yield from (_rung(variant, one) for one in rungs)
            yield from (_trial(variant, (), seed, 1.0) for seed in study.seeds)
            continue
        if variant.like is not None:
            variant = replace(variant, rates=tuple(variant.recipe.optim.lr * factor for factor in variant.rates))
        if len(variant.rates) > 1:
            yield from (_run(variant, rate, TUNING_SEED, study.tuning) for rate in variant.rates)
        middle = variant.rates[len(variant.rates) // 2]
        yield from (_run(variant, middle, seed, 1.0) for seed in study.seeds)


def _run(variant: Variant, rate: float, seed: int, share: float) -> PlannedRun:
    rate = float(f"{rate:.3g}")
    return PlannedRun(variant.name, rate, seed, variant.recipe.at(rate, seed).shortened(share))


def _tuning_run(variant: Variant, rate: float) -> PlannedRun:
    """To look a tuning run up by: recipes are not compared, and making one takes a millisecond of checks."""
    return PlannedRun(variant.name, float(f"{rate:.3g}"), TUNING_SEED, None)


def _score(variant: Variant, measured: Measured) -> Callable[[Rung], float | None]:
    def score(rung: Rung) -> float | None:
        rate = dict(rung.trial).get("optim.lr", variant.recipe.optim.lr)
        found = measured.get(PlannedRun(variant.name, rate, TUNING_SEED + rung.number, None, rung.trial))
        return None if found is None else found.score

    return score


def _rung(variant: Variant, rung: Rung) -> PlannedRun:
    return _trial(variant, rung.trial, TUNING_SEED + rung.number, rung.share)


def _trial(variant: Variant, trial: Trial, seed: int, share: float) -> PlannedRun:
    # Of a tuning run only the last value counts; looking on the way costs as much as half the training of a small model.
    looks = {"watch.eval_every": 0} if seed >= TUNING_SEED else {}
    recipe = replace(changed(variant.recipe, {**dict(trial), **looks}), seed=seed).shortened(share)
    return PlannedRun(variant.name, recipe.optim.lr, seed, recipe, trial)


def slug(name: str) -> str:
    """A variant's name as a folder."""
    return "".join(c if c.isalnum() or c in ".=-" else "-" for c in name).strip("-").lower()
