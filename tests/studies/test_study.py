"""What a study runs next, how it judges, and one run from end to end."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from gnomon import data, evaluation, studies
from gnomon.cli import main
from gnomon.errors import UserError
from gnomon.studies import cost, layer_worth, recipe_study, runner, verdict
from gnomon.studies.study import TUNING_SEED, Job, Outcome, Results, Study, Variant, at_edge, plan, rates, wanted
from gnomon.train import preset, replace
from gnomon.train.device import to_device
from gnomon.train.presets import BASELINE
from gnomon.train.run_data import open_data

TINY = {
    "steps": 4, "model.layers": 2, "model.width": 16, "model.heads": 2, "model.context": 16, "data.batch": 2,
    "schedule.warmup": 1, "watch.eval_every": 2, "watch.eval_tokens": 64, "watch.probe_every": 2, "watch.probe_tokens": 32,
}  # fmt: skip


def variant(name: str, grid=(1e-3, 2e-3, 4e-3), baseline=None, **settings) -> Variant:
    return Variant(name, replace(preset("tiny", *BASELINE), TINY | settings), grid, baseline)


def study(*variants: Variant, **settings) -> Study:
    return Study("manifolds", "a study", "tiny", variants, **settings)


def measure(job: Job, value: float, fate: str = "learned") -> Outcome:
    return Outcome(fate, value, 1.0, job.folder)


def finish(one: Study, loss) -> dict[Job, Outcome]:
    """Everything the study wants, measured by `loss(job)`."""
    measured: dict[Job, Outcome] = {}
    while missing := [j for v in one.variants for j in wanted(one, v, measured) if j not in measured]:
        measured |= {job: measure(job, loss(job)) for job in missing}
    return measured


def test_tuning_comes_first_on_its_own_seed_and_the_best_rate_is_compared():
    one = study(variant("a"), seeds=(0, 1), tuning=0.5)
    first = wanted(one, one.variants[0], {})
    assert [(j.rate, j.seed, j.recipe.steps) for j in first] == [(r, TUNING_SEED, 2) for r in (1e-3, 2e-3, 4e-3)]
    measured = finish(one, lambda job: abs(math.log(job.rate / 2e-3)))
    compared = [j for j in measured if not j.tuning]
    assert [(j.rate, j.seed, j.recipe.steps) for j in compared] == [(2e-3, 0, 4), (2e-3, 1, 4)]
    assert all(j.recipe.optim.lr == j.rate and j.recipe.seed == j.seed for j in measured)


@pytest.mark.parametrize("best, expected", [(8e-3, [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]), (5e-4, [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3])])
def test_a_best_rate_at_the_edge_widens_the_grid(best, expected):
    one = study(variant("a"))
    measured = finish(one, lambda job: abs(math.log(job.rate / best)))
    assert rates(one, one.variants[0], measured) == expected
    assert Results(one, measured).rate("a") == best and not at_edge(one, one.variants[0], measured)


def test_a_rate_still_at_the_edge_is_flagged():
    one = study(variant("a"))
    measured = finish(one, lambda job: -job.rate)
    assert Results(one, measured).row("a")["edge"] and Results(one, measured).rate("a") == 1.6e-2


def test_a_single_rate_is_not_tuned():
    one = study(variant("a", (3e-3,)), seeds=(0,))
    assert [(j.rate, j.seed) for j in finish(one, lambda job: 1.0)] == [(3e-3, 0)] == [(j.rate, j.seed) for j in plan(one)]


def test_diverged_rates_are_never_chosen():
    one = study(variant("a"), widen=0)
    jobs = wanted(one, one.variants[0], {})
    measured = {j: measure(j, 2.0 - j.rate, "diverged" if j.rate > 1e-3 else "learned") for j in jobs}
    assert {j.rate for j in wanted(one, one.variants[0], measured) if not j.tuning} == {1e-3}


@pytest.mark.parametrize("losses, finite, fate", [
    ([3.0, 2.0, 1.9], True, "learned"),
    ([3.0, 2.0, 2.31], True, "diverged"),
    ([3.0, 2.0, 2.29], True, "learned"),
    ([3.4, 3.3, 3.26], True, "stalled"),
    ([3.0, math.nan], True, "diverged"),
    ([3.0, 2.0], False, "diverged"),
    ([], True, "diverged"),
])  # fmt: skip
def test_fate(losses, finite, fate):
    assert verdict.fate(losses, 3.3, finite=finite) == fate


@pytest.mark.parametrize("differences, word", [
    ((-0.05, -0.04, -0.06), "better"),
    ((0.05, 0.04, 0.06), "worse"),
    ((-0.05, 0.01, -0.06), "no difference seen"),
    ((-0.004, -0.005, -0.006), "no difference seen"),
    ((-0.05,), "not comparable"),
    ((), "not comparable"),
])  # fmt: skip
def test_verdict_is_paired_and_needs_the_interval_and_the_size(differences, word):
    theirs = {seed: 2.0 + seed for seed in range(5)}
    found = verdict.compare({seed: theirs[seed] + d for seed, d in enumerate(differences)}, theirs)
    assert found.word == word and found.pairs == len(differences)
    if len(differences) > 1:
        assert found.low <= found.mean <= found.high


def test_bootstrap_interval_covers_a_known_mean():
    import random

    generator = random.Random(1)
    inside = 0
    for _ in range(100):
        low, high = verdict.bootstrap([generator.gauss(0, 1) for _ in range(20)], draws=400)
        inside += low <= 0 <= high
    assert 85 <= inside <= 99


def test_entropy_of_counts():
    assert verdict.entropy([5, 0, 5]) == pytest.approx(math.log(2))


def test_tokens_to_reach_a_loss(tmp_path):
    one = study(variant("a", (1e-3,)), seeds=(0,))
    (job,) = plan(one)
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, "tokens": 100 * i, "val_loss": v}) + "\n" for i, v in enumerate([4.0, 3.0, 2.0], 1))
    )
    results = Results(one, {job: Outcome("learned", 2.0, 1.0, tmp_path)})
    assert recipe_study.reach(results, "a", 2.5) == pytest.approx(250)
    assert recipe_study.reach(results, "a", 5.0) == 100 and recipe_study.reach(results, "a", 1.0) == math.inf


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A study of two variants, run with two workers."""
    folder = tmp_path_factory.mktemp("study")
    one = study(variant("plain", (4e-3,)), variant("sphere", (2e-3, 4e-3), "plain", **{"model.residual": "sphere"}),
                seeds=(0, 1), widen=0)  # fmt: skip
    results, page = studies.run(one, folder, jobs=2)
    return one, folder, results, page


def test_end_to_end(finished):
    one, folder, results, page = finished
    assert len(results.measured) == 6 and all(outcome.value < 7 for outcome in results.measured.values())
    assert set(results.compared("sphere")) == {0, 1}
    html = page.read_text()
    assert "sphere" in html and "Final loss of the tuning runs" in html
    assert (folder / "results.csv").read_text().count("\n") >= 3 and "| sphere" in (folder / "results.md").read_text()
    account = json.loads((folder / "study.json").read_text())["sessions"]
    assert account[0]["runs"] == 6 and 0 <= account[0]["overhead"] < 1
    inside = json.loads((folder / results.compared("plain")[0].folder / "mechanism.json").read_text())
    assert len(inside["worth"]) == 2 and all(0 <= share <= 1 for share in inside["sink"])
    assert not list(folder.glob("runs/*/tune-*/checkpoints/*"))


def test_worth_is_the_loss_without_the_block(finished):
    one, folder, results, _ = finished
    run = folder / results.compared("sphere")[0].folder
    model, _, recipe = evaluation.load(run)
    T = recipe.model.context
    windows = data.slices(open_data(recipe)[1], context=T, count=layer_worth.tokens(recipe) // T)
    x_BT, y_BT = to_device(windows, model.embed.weight.device)
    with torch.no_grad():
        whole = model.loss(x_BT, y_BT).item()
        blocks, found = model.blocks, []
        for i in range(len(blocks)):
            model.blocks = torch.nn.ModuleList([block for j, block in enumerate(blocks) if j != i])
            found.append(model.loss(x_BT, y_BT).item() - whole)
    assert json.loads((run / "mechanism.json").read_text())["worth"] == pytest.approx(found, abs=1e-5)


def test_a_second_call_runs_nothing_and_a_missing_run_alone_is_done_again(finished):
    one, folder, results, _ = finished
    again = runner.run(one, folder)
    assert {j: o.value for j, o in again.measured.items()} == {j: o.value for j, o in results.measured.items()}
    assert len(json.loads((folder / "study.json").read_text())["sessions"]) == 1
    lost = results.compared("sphere")[1].folder / "outcome.json"
    before = json.loads(lost.read_text())["value"]
    lost.unlink()
    runner.run(one, folder)
    assert json.loads(lost.read_text())["value"] == before
    assert json.loads((folder / "study.json").read_text())["sessions"][-1]["runs"] == 1


def test_other_settings_in_the_same_folder_are_refused(finished):
    one, folder, *_ = finished
    changed = dataclasses.replace(one, variants=(variant("plain", (4e-3,), **{"data.batch": 4}),))
    with pytest.raises(UserError, match="data.batch"):
        runner.run(changed, folder)


@pytest.mark.parametrize("name", studies.NAMES)
@pytest.mark.parametrize("scale", studies.SCALES)
def test_every_study_is_a_sound_grid(name, scale):
    one = studies.load(name, scale)
    names = [v.name for v in one.variants]
    assert len(set(names)) == len(names) and len({j.folder for j in plan(one)}) == len(list(plan(one)))
    for v in one.variants:
        assert v.baseline is None or v.baseline in names
        assert list(v.rates) == sorted(v.rates) and v.baseline != v.name


def test_dry_run_counts_runs_and_tokens():
    one = studies.load("recipe", "tiny", variants=["sphere + Muon"], seeds=2, changes=TINY)
    rows = cost.rows(one, 1)
    assert [row["variant"] for row in rows] == ["Pre-LN + Muon", "sphere + Muon", "all"]
    assert rows[0]["runs"] == 5 and rows[0]["tokens"] == 5 * 4 * 2 * 16 and rows[-1]["runs"] == 10
    assert all(row["here"] > 0 and row["memory"] > 0 for row in rows)


def test_command_line(tmp_path, capsys):
    assert main(["study", "manifold", "--dry-run"]) == 2
    assert "manifolds" in capsys.readouterr().err
    assert main(["study", "recipe", "--variants", "sphere + Mun", "--dry-run"]) == 2
    assert "sphere + Muon" in capsys.readouterr().err
    sizes = [f"{key}={value}" for key, value in TINY.items()]
    assert main(["study", "continuity", "--variants", "Llama, ReLU", "--dry-run", "--set", *sizes]) == 0
    assert "Llama, ReLU" in capsys.readouterr().out


NARROW = {
    "steps": 20, "model.width": 32, "model.heads": 2, "model.context": 32, "model.vocab_size": 257, "data.train": "jargon",
    "data.tokenizer": "byte", "data.batch": 4, "schedule.warmup": 4, "compute.compile": False, "compute.precision": "fp32",
    "watch.eval_every": 10, "watch.eval_tokens": 256, "watch.probe_every": 10, "watch.probe_tokens": 64,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, one", [
    ("residuals", "sphere p=1"), ("manifolds", "hetero"), ("continuity", "Llama, SiLU"), ("recipe", "sphere + hetero"),
])  # fmt: skip
def test_paper_scale_at_reduced_width(name, one, tmp_path):
    """The paper's depth and schedule, 20 steps; the tuning runs are left out, since the paper's rates are given."""
    found = studies.load(name, "paper", variants=[one], seeds=1, changes=NARROW)
    results, page = studies.run(found, tmp_path)
    assert results.compared(one)[0].fate != "diverged" and page.exists()


@pytest.mark.slow
def test_runs_of_a_study_in_two_processes(tmp_path):
    found = studies.load("recipe", "paper", variants=["sphere + hetero"], seeds=1, changes=NARROW | {"model.layers": 2})
    results, _ = studies.run(found, tmp_path, processes=2)
    (outcome,) = results.compared("sphere + hetero").values()
    environment = json.loads((outcome.folder / "environment.json").read_text())
    assert environment["processes"] == 2 and outcome.fate != "diverged"
