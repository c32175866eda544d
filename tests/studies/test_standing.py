"""What is left of a study: as a finished, a half-done and an untouched one have it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.studies import runner, study_estimate
from gnomon.studies.outcomes import OutcomesFile
from gnomon.studies.search import Budget, Log
from gnomon.studies.standing import left, settle
from gnomon.studies.study import TUNING_SEED, Outcome, PlannedRun, Study, Variant, plan
from gnomon.train import preset, replace
from gnomon.train.presets import BASELINE

TINY = {
    "steps": 8, "model.layers": 1, "model.width": 16, "model.heads": 2, "model.context": 16, "data.batch": 2,
    "schedule.warmup": 1, "watch.eval_tokens": 64, "watch.probe_tokens": 32,
}  # fmt: skip


def study() -> Study:
    """A grid, a search, and what builds on the search."""
    recipe = replace(preset("tiny", *BASELINE), TINY)
    space = {"optim.weight_decay": Log(1e-3, 1e-1)}
    return Study(
        "mine", "a study", "tiny", budget=Budget(4, 0.25, 0.5), seeds=(0, 1), tuning=0.5,
        variants=(
            Variant("grid", recipe, (1e-3, 2e-3, 4e-3)),
            Variant("searched", recipe, (1e-3,), space=space),
            Variant("deeper", replace(recipe, {"model.layers": 2}), (0.5, 1.0), like="searched", moved={"model.layers": 2}),
        ),
    )  # fmt: skip


def told(run: PlannedRun) -> Outcome:
    return Outcome("learned", abs(run.rate - 2e-3), 1.0, Path("nowhere"))


def test_untouched_a_study_has_its_whole_plan_left():
    one = study()
    rest = left(one, {})
    for variant in one.variants:
        steps = [run.recipe.steps for run in plan(one) if run.variant == variant.name]
        assert (rest[variant.name].known, rest[variant.name].runs, rest[variant.name].steps) == (0, len(steps), sum(steps))
    assert rest["grid"].steps == 3 * 4 + 2 * 8 and rest["searched"].steps == 4 * 2 + 2 * 8 + 2 * 8


def test_what_is_known_is_subtracted_and_what_it_brings_up_is_sought():
    one = study()
    short = settle(one, lambda run: told(run) if run.tuning and run.seed == TUNING_SEED else None)
    rest = left(one, short)
    # The grid's tuning is done; of the search the first rung, and nothing of what builds on it.
    assert (rest["grid"].known, rest["grid"].runs, rest["grid"].steps) == (3, 2, 16)
    assert (rest["searched"].known, rest["searched"].runs, rest["searched"].steps) == (4, 4, 32)
    assert (rest["deeper"].known, rest["deeper"].runs) == (0, 4)
    more = settle(one, lambda run: told(run) if run.variant == "searched" else None, short)
    assert not more.keys() & short.keys() and left(one, short | more)["searched"].runs == 0


def test_a_finished_study_has_nothing_left_though_its_grid_grew():
    one = study()
    whole = settle(one, lambda run: Outcome("learned", run.rate, 1.0, Path("nowhere")))
    rest = left(one, whole)
    assert all((of.runs, of.steps) == (0, 0) for of in rest.values())
    assert rest["grid"].known == 7 and sum(of.known for of in rest.values()) == len(whole)
    row = study_estimate.rows(one, 1, whole)[-1]
    assert row["here"] == row["tokens"] == 0 and study_estimate.line(row).startswith(f"0 runs left, {len(whole)} are known")


def test_time_is_told_by_what_the_known_runs_took():
    one = dataclasses.replace(study(), variants=study().variants[:1])
    short = settle(one, lambda run: dataclasses.replace(told(run), seconds=3.0) if run.tuning else None)
    row = study_estimate.rows(one, 1, short)[-1]
    # Three runs of four steps took three seconds each; two of eight are left.
    assert row["here"] == pytest.approx(2 * 8 * 3.0 / 4) and "0:12 at the pace of those" in study_estimate.line(row)
    lost = {run: dataclasses.replace(outcome, fate="diverged") for run, outcome in short.items()}
    assert study_estimate.rows(one, 1, lost)[-1]["here"] == pytest.approx(study_estimate.expected(one.variants[0].recipe)["here"] * 2)


def test_a_file_is_read_for_the_estimate_and_not_written(tmp_path, capsys):
    one = dataclasses.replace(study(), variants=study().variants[:1])
    file = OutcomesFile(tmp_path / "known.jsonl")
    for run in list(plan(one))[:2]:
        file.remember(run, told(run))
    before = (tmp_path / "known.jsonl").read_bytes()
    assert len(runner.known(one, tmp_path / "study", tmp_path / "known.jsonl")) == 2
    assert not (tmp_path / "study").exists() and (tmp_path / "known.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_study_tells_what_is_left_before_it_starts(tmp_path, capsys):
    sizes = [f"{key}={value}" for key, value in (TINY | {"steps": 2}).items()]
    command = ["study", "recipe", "--scale", "smoke", "--variants", "Pre-LN + AdamW", "--seeds", "1", "--out", str(tmp_path)]
    for begins in ("2 runs left; about ", "0 runs left, 2 are known; "):
        assert main([*command, "--set", *sizes]) == 0
        assert capsys.readouterr().out.startswith(begins)
