"""What a study runs next, how it judges, and one run from end to end."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

from gnomon import data, evaluation, studies
from gnomon.cli import main
from gnomon.errors import UserError
from gnomon.models import Transformer
from gnomon.studies import layer_worth, recipe_study, runner, study_estimate, study_page, verdict
from gnomon.studies.outcomes import FILE
from gnomon.studies.results import Results, curve
from gnomon.studies.search import Budget, Choice, Log
from gnomon.studies.study import TUNING_SEED, Outcome, PlannedRun, Study, Variant, at_edge, plan, rates, wanted
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
    """A study of one's own: its name is none of `studies.NAMES`."""
    return Study("mine", "a study", "my laptop", variants, **settings)


def measure(job: PlannedRun, value: float, fate: str = "learned") -> Outcome:
    return Outcome(fate, value, 1.0, job.folder)


def finish(one: Study, loss) -> dict[PlannedRun, Outcome]:
    """Everything the study wants, measured by `loss(job)`."""
    measured: dict[PlannedRun, Outcome] = {}
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
    ((-0.05, -0.01, -0.06), "no difference seen"),  # on one side of zero, which the bootstrap of three seeds called better
    ((-0.004, -0.005, -0.006), "no difference seen"),
    ((-0.05, -0.05, -0.05), "better"),
    ((0.0, 0.0), "no difference seen"),
    ((-0.05,), "not comparable"),
    ((), "not comparable"),
])  # fmt: skip
def test_verdict_needs_the_test_and_the_size(differences, word):
    found = verdict.compare({"a": differences})["a"]
    assert found.word == word and found.pairs == len(differences)
    if len(differences) > 1:
        assert found.low <= found.mean <= found.high


def test_the_interval_is_student_s():
    # mean -0.05, standard deviation 0.01: -0.05 +- 4.302653 * 0.01 / sqrt(3), t = 8.660254, p = 0.013072 (two degrees of freedom).
    found = verdict.compare({"a": (-0.05, -0.04, -0.06)})["a"]
    assert (found.low, found.high) == (pytest.approx(-0.0748414), pytest.approx(-0.0251586))
    assert found.p == pytest.approx(0.0130719, abs=1e-6)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 9, 30, 101])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 12.0])
def test_student_s_t_is_exact(t, df):
    # P(|T| > t) is the regularised incomplete beta function at df / (df + t^2) (Abramowitz and Stegun 26.5.27).
    outside = mpmath.betainc(df / 2, 0.5, 0, df / (df + mpmath.mpf(t) ** 2), regularized=True)
    assert verdict.t_inside(t, df) == pytest.approx(float(1 - outside), abs=1e-13)


@pytest.mark.parametrize("share, df, t", [
    (0.95, 1, 12.7062047), (0.95, 2, 4.3026527), (0.95, 4, 2.7764451), (0.99, 2, 9.9248432), (0.90, 30, 1.6972609),
])  # fmt: skip
def test_quantiles_are_those_of_the_tables(share, df, t):
    assert verdict.t_quantile(share, df) == pytest.approx(t, rel=1e-7)


def test_holm_is_the_step_down_rule():
    # Holm (1979): sorted, times n, n - 1, ..., each at least the one before.
    assert verdict.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert verdict.holm([0.9, 0.6]) == [1.0, 1.0] and verdict.holm([]) == []


def test_the_more_a_study_compares_the_more_each_has_to_show():
    clear, none = (-0.05, -0.04, -0.06), (0.05, -0.05, 0.001)
    assert verdict.compare({"a": clear})["a"].word == "better"
    many = verdict.compare({"a": clear, **{i: none for i in range(5)}, "alone": (-1.0,)})
    assert many["a"].word == "no difference seen" and many["a"].p == pytest.approx(6 * 0.0130719, abs=1e-5)


def test_a_comparison_that_was_not_declared_is_refused():
    one = study(variant("a", (1e-3,)), variant("b", (1e-3,), "a"), variant("c", (1e-3,)))
    results = Results(one, finish(one, lambda job: 1.0))
    assert results.against("b", "a").word == "no difference seen"
    with pytest.raises(UserError, match="pairs"):
        results.against("c", "a")


@pytest.mark.slow
def test_false_calls_are_as_rare_as_the_page_says():
    """Studies of 20 variants and one baseline in which nothing differs: how many call anything."""
    rng = np.random.default_rng(1)
    called = 0
    for _ in range(2000):
        drawn = rng.normal(2.0, 0.03, (21, 3))
        found = verdict.compare({i: list(row) for i, row in enumerate(drawn[1:] - drawn[0])})
        called += any(one.word in ("better", "worse") for one in found.values())
    assert called / 2000 == pytest.approx(verdict.FALSE_CALLS, abs=0.015) and verdict.FALSE_CALLS <= verdict.LEVEL


def test_entropy_of_counts():
    assert data.entropy([5, 0, 5]) == pytest.approx(math.log(2))


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
                seeds=(0, 1), widen=0, figures=lambda page, results: page.text("a picture of mine"))  # fmt: skip
    results, page = studies.run(one, folder, jobs=2)
    return one, folder, results, page


def test_end_to_end(finished):
    one, folder, results, page = finished
    assert len(results.measured) == 6 and all(outcome.value < 7 for outcome in results.measured.values())
    assert set(results.compared("sphere")) == {0, 1}
    html = page.read_text()
    assert "sphere" in html and "Final loss of the tuning runs" in html and "a picture of mine" in html
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
    lines = (folder / FILE).read_text().splitlines()
    kept = [line for line in lines if (json.loads(line)["variant"], json.loads(line)["seed"]) != ("sphere", 1)]
    assert len(kept) == len(lines) - 1 == 5
    (folder / FILE).write_text("\n".join(kept) + "\n")
    runner.run(one, folder)
    assert json.loads(lost.read_text())["value"] == before
    assert json.loads((folder / "study.json").read_text())["sessions"][-1]["runs"] == 1


def test_a_study_goes_on_from_its_outcomes_without_the_runs(finished, tmp_path):
    one, folder, results, _ = finished
    shutil.copy(folder / FILE, tmp_path / "carried.jsonl")
    again = runner.run(one, tmp_path / "elsewhere", outcomes_file=tmp_path / "carried.jsonl")
    assert not (tmp_path / "elsewhere" / "runs").exists()
    assert {j: (o.fate, o.value) for j, o in again.measured.items()} == {j: (o.fate, o.value) for j, o in results.measured.items()}
    assert [r["val_loss"] for r in curve(again.compared("sphere")[0])][-1] == results.compared("sphere")[0].value
    assert again.rows() == results.rows()


def test_a_space_is_searched_and_the_winner_compared(tmp_path):
    space = {"optim.lr": Log(1e-3, 1e-2), "optim.weight_decay": Choice((0.0, 0.1))}
    searched = dataclasses.replace(variant("plain", (4e-3,)), space=space)
    one = Study("own", "own", "any", (searched,), seeds=(0, 1), budget=Budget(trials=4, share=0.5, keep=0.25))
    assert len(list(plan(one))) == 4 + 1 + 2
    results = runner.run(one, tmp_path)
    # The rate of the one finalist is halved and doubled, and its grid grows at most twice.
    assert 9 <= len(results.measured) <= 11 and set(results.compared("plain")) == {0, 1}
    short = {run: out for run, out in results.measured.items() if run.seed == TUNING_SEED}
    assert {run.recipe.steps for run in short} == {searched.recipe.steps // 2}
    whole = {run: out for run, out in results.measured.items() if run.seed == TUNING_SEED + 1}
    best = min(whole, key=lambda run: whole[run].score)
    assert results.tuned_settings("plain") == dict(best.trial) and results.rate("plain") == best.recipe.optim.lr
    assert {run.trial for run in results.measured if not run.tuning} == {best.trial}


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


def empty(one: Study, folder, fate: str) -> Results:
    """Every run of the study ended like this, all with one loss or none, and left nothing in its folder."""
    value = math.nan if fate == "diverged" else 2.0
    measured: dict[PlannedRun, Outcome] = {}
    for v in sorted(one.variants, key=lambda v: v.like is not None):  # what others build on comes first
        while missing := [j for j in wanted(one, v, measured) if j not in measured]:
            measured |= {run: Outcome(fate, value, 1.0, folder / run.folder) for run in missing}
    return Results(one, measured)


def verdicts(results: Results) -> dict[str, str]:
    return {row["claim"]: row["verdict"] for row in results.claims()}


@pytest.mark.parametrize("name", studies.NAMES)
def test_figures_that_are_missing_make_a_claim_untestable_and_no_page_crash(name, tmp_path):
    """Not "not reproduced", which NaN compared with anything would say."""
    results = empty(studies.load(name), tmp_path, "diverged")
    told = {"all-DGram is unstable": "reproduced", "hetero-inv is unstable": "reproduced", **dict.fromkeys(
                (f"{name} becomes unstable" for name in ("dgram", "hetero-inv", "dgram, paper's solver,", "hetero-inv, paper's solver,")),
                "reproduced"), "deep baselines stall or diverge": "reproduced", "auto finishes every run": "not reproduced",
            "every SpheretNorm converges": "not reproduced",
            **{f"{cure} removes that stall": "not reproduced" for cure in ("a cap on the ratio", "Stiefel weights", "hetero weights")}}
    found = verdicts(results)
    assert found == {claim: told.get(claim, "not testable") for claim in found} and found
    assert study_page.write(results, tmp_path).exists() and "not testable" in (tmp_path / "results.md").read_text()


def test_claims_of_variants_left_out_are_not_run_and_those_of_no_variant_are_not_testable(tmp_path):
    part = verdicts(empty(studies.load("residuals", variants=["GeoNorm"]), tmp_path, "learned"))
    assert part["GeoNorm beats Pre-LN"] == "not reproduced" and part["1-SpheretNorm beats Peri-LN"] == "not run"
    small = verdicts(empty(studies.load("residuals", "small"), tmp_path, "learned"))
    assert small["1-SpheretNorm beats Pre-LN at 48 layers"] == "not testable"


def test_a_shortened_study_says_so_in_its_command(tmp_path):
    one = studies.load("recipe", variants=["sphere + Muon"], seeds=2, data="a b.txt", changes={"steps": "20", "model.qk_norm": True})
    command = ("gnomon study recipe --scale tiny --seeds 2 --data 'a b.txt' --variants 'sphere + Muon' "
               "--set steps=20 model.qk_norm=true")  # fmt: skip
    assert one.command == command and studies.load("recipe").command == "gnomon study recipe --scale tiny"
    page = study_page.write(empty(one, tmp_path, "learned"), tmp_path)
    assert f"`{command}`" in (tmp_path / "results.md").read_text() and "--variants" in page.read_text().split("<main>")[0]
    # The quantile of t with one degree of freedom at 0.05.
    assert "Comparisons of this study: 1; seeds: 2. Its clearest difference is called from 12.7" in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize("variants, words", [
    ([variant("a"), variant("b", baseline="aa")], "Did you mean 'a'"),
    ([variant("a", ())], "learning rate"),
    ([variant("a b"), variant("a-b")], "differ"),
    ([], "needs variants"),
])  # fmt: skip
def test_a_study_that_cannot_be_run_is_told_before_its_runs(variants, words):
    with pytest.raises(UserError, match=words):
        study(*variants)


def test_the_guide_s_study_compares_two_models(monkeypatch):
    guide = Path(__file__).parents[2] / "docs" / "guides" / "studies.md"
    code = guide.read_text().split("```python\n")[1].split("```")[0]
    seen = []
    monkeypatch.setattr(studies, "run", lambda one, folder, jobs: seen.append(one) or (None, None))
    exec(code, {})
    (one,) = seen
    assert one.comparisons == [("rms", "layer")]
    norms = [{type(module) for module in Transformer(v.recipe.model).modules()} for v in one.variants]
    assert torch.nn.LayerNorm in norms[0] - norms[1] and torch.nn.RMSNorm in norms[1] - norms[0]


@pytest.mark.parametrize("name", studies.NAMES)
def test_smoke_is_short_and_untuned(name):
    one = studies.load(name, "smoke")
    runs = list(plan(one))
    assert 4 <= len(runs) <= 16 and all(len(v.rates) == 1 and v.recipe.steps <= 100 for v in one.variants)
    assert one.command.endswith("--scale smoke") and len(one.comparisons) + (name in ("continuity", "drift", "instability")) > 0


@pytest.mark.parametrize("asked, jobs, threads", [("3", 1, 3), ("4,2", 2, 4), ("", 1, 2), ("", 2, 1), ("0", 8, 1)])
def test_threads_are_those_asked_for_or_a_share_of_the_cores_allowed(asked, jobs, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert runner.threads_each(jobs) == threads


def test_dry_run_counts_runs_and_tokens():
    one = studies.load("recipe", "tiny", variants=["sphere + Muon"], seeds=2, changes=TINY)
    rows = study_estimate.rows(one, 1)
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
