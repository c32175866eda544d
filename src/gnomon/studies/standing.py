"""Where a study stands: what is known of it, and how much is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gnomon.studies.study import Measured, Outcome, PlannedRun, Study, plan, wanted


@dataclass(frozen=True)
class Left:
    """Of one variant: runs that are known and runs that are not, and the steps of the latter."""

    known: int
    runs: int
    steps: int


def settle(
    study: Study, known: Callable[[PlannedRun], Outcome | None], measured: Measured | None = None
) -> dict[PlannedRun, Outcome]:
    """Outcomes of the runs the study wants that `known` tells, and of those that these bring up; without `measured`, what is
    settled already."""
    old, fresh = dict(measured or {}), dict[PlannedRun, Outcome]()
    while True:
        missing = [run for variant in study.variants for run in wanted(study, variant, old | fresh) if run not in old | fresh]
        found = {run: outcome for run in missing if (outcome := known(run)) is not None}
        if not found:
            return fresh
        fresh |= found


def left(study: Study, measured: Measured) -> dict[str, Left]:
    """By variant. What no one can know yet, as which trials of a search go on, is counted as the plan does."""
    planned: dict[str, list[int]] = {variant.name: [] for variant in study.variants}
    done: dict[str, list[int]] = {variant.name: [] for variant in study.variants}
    for lists, runs in ((planned, dict.fromkeys(plan(study))), (done, measured)):
        for run in runs:
            lists[run.variant].append(run.recipe.steps)
    return {v.name: _left(planned[v.name], done[v.name], wanted(study, v, measured), measured) for v in study.variants}


def _left(planned: list[int], done: list[int], runs: list[PlannedRun], measured: Mapping[PlannedRun, Outcome]) -> Left:
    missing = [run.recipe.steps for run in runs if run not in measured]
    if not missing and any(not run.tuning for run in runs):
        return Left(len(done), 0, 0)
    # A grid that grew wants more than was planned.
    return Left(len(done), max(len(planned) - len(done), len(missing)), max(sum(planned) - sum(done), sum(missing)))
