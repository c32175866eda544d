"""The judge of the assignment that decides by itself, on made-up outcomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon import studies
from gnomon.studies import auto_study
from gnomon.studies.results import Results
from gnomon.studies.study import Outcome, PlannedRun, wanted


def measured_as(value, fate=lambda run: "learned") -> Results:
    """Every run that the study wants, until it wants no more."""
    one, found = studies.load("auto", "tiny"), {}
    while fresh := [run for v in one.variants for run in wanted(one, v, found) if run not in found]:
        found |= {run: Outcome(fate(run), value(run), 1.0, Path("nowhere")) for run in fresh}
    return Results(one, found)


def ends(run: PlannedRun) -> float:
    """Stiefel is best everywhere, and every other assignment 0.1 behind."""
    return (2.0 if run.variant.startswith("stiefel") else 2.1) + 0.001 * (run.seed % 3) + abs(run.rate - 0.04) * 1e-6


@pytest.mark.parametrize("behind, holds", [(-0.05, True), (0.009, True), (0.011, False)])
def test_auto_is_held_to_the_best_of_the_others(behind, holds):
    results = measured_as(lambda run: ends(run) - (0.1 - behind if run.variant.startswith("auto") else 0))
    rows = {row["claim"]: row for row in results.claims()}
    assert len(rows) == len(auto_study.CLOSE) + 1
    for load in auto_study.CLOSE:
        row = rows[f"auto within 0.01 nats of the best on {load}"]
        assert row["verdict"] == ("reproduced" if holds else "not reproduced") and "of stiefel" in row["ours"]
    assert rows["auto finishes every run"]["verdict"] == "reproduced"


@pytest.mark.parametrize("loser, fate", [("auto", "diverged"), ("auto", "stalled"), ("hetero", "diverged"), ("stiefel", "diverged")])
def test_lost_runs_are_counted(loser, fate):
    lost = f"{loser}, rate x 8"
    results = measured_as(ends, lambda run: fate if run.variant == lost and run.seed == 1 else "learned")
    rows = {row["claim"]: row for row in results.claims()}
    assert rows["auto finishes every run"]["verdict"] == ("not reproduced" if loser == "auto" else "reproduced")
    assert f"{loser} 1" in rows["auto finishes every run"]["ours"]
    close = rows["auto within 0.01 nats of the best on rate x 8"]
    # Stiefel is 0.1 ahead; where it loses a run it is no best to be held to.
    assert close["verdict"] == ("reproduced" if loser == "stiefel" else "not reproduced")


def test_all_are_tuned_alike_and_carry_what_won_over():
    results = measured_as(ends)
    one = results.study
    names, loads = (*auto_study.ASSIGNMENTS, auto_study.BESIDE), ("short", *auto_study.LOADS)
    assert {v.name for v in one.variants} == {f"{name}, {load}" for name in names for load in loads}
    runs = {name: sum(run.variant == f"{name}, short" and run.tuning for run in results.measured) for name in auto_study.ASSIGNMENTS}
    assert len(set(runs.values())) == 1
    for name in auto_study.ASSIGNMENTS:
        won = results.rate(f"{name}, short")
        high = [run for run in results.measured if run.variant == f"{name}, rate x 8"]
        assert [run.rate for run in high] == pytest.approx([8 * won] * 3, rel=1e-2)
        deep = [run for run in results.measured if run.variant == f"{name}, deep" and not run.tuning]
        assert {run.recipe.model.layers for run in deep} == {24} and len(deep) == 3
        assert {run.recipe.steps for run in results.measured if run.variant == f"{name}, long" and not run.tuning} == {3000}
