"""What is recommended for a planned run, from evidence made up so that the answer is known."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex

import pytest

from gnomon import cli, studies
from gnomon.errors import UserError
from gnomon.train import advice_tables, asking, evidence, preset, replace
from gnomon.train.evidence import Row
from gnomon.train.presets import BASELINE, RECOMMENDED
from gnomon.train.recommend import NothingMeasured, Plan, advise, plan, to_try

BASE, OURS, ADAMW = "Pre-LN + Muon", "GeoNorm + Muon", "Pre-LN + AdamW"
PAIRS = {BASE: ("pre-norm", "muon"), OURS: ("geonorm", "muon"), ADAMW: ("pre-norm", "adamw")}
CENTRE = dict(layers=6, width=96, steps=1000, tokens=512)
HERE = Plan(**CENTRE)


def row(name: str, difference: float | None = None, half: float = 0.01, axis: str = "centre", lr: float = 0.02, **changes) -> Row:
    residual, assignment = PAIRS[name]
    settings = {"optim.lr": lr, "optim.weight_decay": 0.05, "optim.betas": [0.9, 0.98]}
    settings |= {} if assignment == "adamw" else {"optim.momentum": 0.9}
    low, high = (None, None) if difference is None else (difference - half, difference + half)
    given = dict(
        contestant=name, axis=axis, block="plain", text="novels", **CENTRE, residual=residual, residual_options={},
        assignment=assignment, settings=settings, warmup=0.05, factor=1.0, seeds=5, diverged=0, mean=1.6, difference=difference,
        low=low, high=high, word="baseline",
    )  # fmt: skip
    return Row(**given | changes)


def chosen(rows, planned=HERE, **options) -> str:
    return advise(planned, rows, **options).chosen.contestant


def test_the_lowest_upper_end_wins_and_must_be_worth_a_call():
    assert chosen([row(BASE), row(OURS, -0.03), row(ADAMW, -0.04, half=0.05)], tuning=3) == OURS
    assert chosen([row(BASE), row(OURS, -0.03, half=0.031)], tuning=3) == BASE
    assert chosen([row(BASE), row(OURS, -0.009, half=0.001)], tuning=3) == BASE
    assert chosen([row(BASE), row(OURS, -0.3, diverged=1)], tuning=3) == BASE


def test_being_measured_less_is_no_advantage():
    """Both gain as much at the centre; one of them was found to gain less with more steps, the other was not looked at there."""
    base = [row(BASE), row(BASE, axis="steps", steps=3000)]
    rows = [*base, row(OURS, -0.03), row(OURS, 0.0, axis="steps", steps=3000), row(ADAMW, -0.03)]
    there = dataclasses.replace(HERE, steps=3000)
    found = {one.contestant: one for one in advise(there, rows, tuning=3).forecasts}
    assert found[ADAMW].difference == -0.03 and found[ADAMW].high == pytest.approx(-0.03 + math.hypot(0.01, 0.03))
    assert chosen(rows, there, tuning=3) == BASE and chosen(rows, tuning=3) in (OURS, ADAMW)


def test_what_axes_change_adds_up_from_the_centre_and_intervals_in_quadrature():
    rows = [
        row(BASE), row(OURS, -0.02, 0.01),
        row(OURS, -0.05, 0.02, "depth", layers=24), row(OURS, -0.03, 0.015, "steps", steps=10_000),
    ]  # fmt: skip
    found = advise(Plan(24, 96, 10_000, 512), rows, tuning=3).chosen
    # -0.02 at the centre, -0.03 more with depth, -0.01 more with length.
    assert found.difference == pytest.approx(-0.06)
    assert found.high - found.difference == pytest.approx(math.sqrt(0.02**2 + 0.015**2 + 0.01**2))
    one = advise(Plan(24, 96, 1000, 512), rows, tuning=3).chosen
    assert (one.difference, one.high) == pytest.approx((-0.05, -0.03)) and one.unmeasured == ()


@pytest.mark.parametrize("layers, expected", [(6, -0.02), (11, -0.02), (13, -0.05), (24, -0.05), (96, -0.05)])
def test_the_nearest_point_in_octaves_counts_and_nothing_is_extrapolated(layers, expected):
    rows = [row(BASE), row(OURS, -0.02), row(OURS, -0.05, axis="depth", layers=24)]
    found = advise(Plan(layers, 96, 1000, 512), rows, tuning=3)
    assert found.chosen.difference == pytest.approx(expected)
    assert found.outside["layers"] == pytest.approx(max(math.log2(layers / 24), 0))


def test_what_lies_outside_and_was_not_measured_is_told():
    found = advise(Plan(24, 48, 1000, 8192), [row(BASE), row(OURS, -0.1)], tuning=3)
    assert found.outside == {"layers": 2.0, "width": -1.0, "steps": 0.0, "tokens": 4.0}
    assert found.chosen.unmeasured == ("depth", "width", "tokens") and not found.reaches
    told = " ".join(found.notes)
    assert "layers by 2.0, width by 1.0, tokens by 4.0" in told and "novels" in told and "That is far" in told
    assert "That is far" not in " ".join(advise(Plan(24, 48, 1000, 512), [row(BASE), row(OURS, -0.1)], tuning=3).notes)


def test_the_text_where_a_contestant_does_worst_decides():
    rows = [row(BASE), row(OURS, -0.1), row(BASE, text="web"), row(OURS, 0.02, text="web")]
    assert chosen(rows, tuning=3) == BASE
    found = advise(HERE, [*rows[:3], row(OURS, -0.04, text="web")], tuning=3)
    assert (found.chosen.text, found.chosen.difference) == ("web", -0.04) and "novels; web" in found.notes[-1]


def test_without_tuning_a_rate_an_octave_off_counts():
    rows = [row(BASE), row(OURS, -0.03), *(row(OURS, 0.06, axis="rate", factor=factor) for factor in (0.5, 2.0))]
    assert chosen(rows, tuning=3) == OURS and chosen(rows, tuning=0) == BASE
    off = advise(HERE, rows).forecasts[-1]
    assert off.difference == pytest.approx((0.06 + 0.06 - 0.03) / 3) and off.high - off.difference == pytest.approx(0.01 / math.sqrt(3))


def test_settings_are_carried_over():
    rows = [
        row(BASE), row(OURS, -0.1, lr=0.02), row(OURS, -0.1, axis="depth", layers=24, lr=0.01),
        row(OURS, -0.1, axis="width", width=192, lr=0.04),
    ]  # fmt: skip
    found = advise(Plan(24, 192, 4000, 512), rows, tuning=3)
    assert found.rate_moved == {"depth": -1.0, "width": 1.0} and found.settings["optim.lr"] == pytest.approx(0.02)
    assert (found.settings["schedule.warmup"], found.settings["model.init_std"]) == (200, 0.072)
    assert found.settings["optim.momentum"] == 0.9
    # Beyond the width measured a rate of Muon's stays, one of AdamW's shrinks with the width.
    rows = [row(BASE), row(ADAMW, -0.1, lr=0.004), row(ADAMW, -0.1, axis="width", width=192, lr=0.004)]
    assert advise(Plan(6, 768, 1000, 512), rows, tuning=3).settings["optim.lr"] == pytest.approx(0.001)


def test_tuning_runs_begin_with_the_recommendation_and_its_rate():
    settings = advise(HERE, [row(BASE)]).settings
    assert to_try(settings, 0) == [] and to_try(settings, 3) == [{}, {"optim.lr": 0.01}, {"optim.lr": 0.04}]
    assert len(to_try(settings, 5)) == 5 and all(len(change) == 1 for change in to_try(settings, 5)[1:])


@pytest.mark.parametrize("tokens, given, steps, each", [(10e9, None, 19_073, 2**19), (5e5, None, 977, 512), (1e8, 4096, 24_414, 4096)])
def test_a_plan_by_all_its_tokens(tokens, given, steps, each):
    found = plan(24, 1024, tokens, given)
    assert (found.steps, found.tokens) == (steps, each)


@pytest.mark.parametrize("arguments", [(0, 64, 1e6), (6, 0, 1e6), (6, 64, 0), (6, 64, 1e6, 0), (6, 64, math.nan)])
def test_a_plan_of_nothing_is_refused(arguments):
    with pytest.raises(UserError, match="at least"):
        plan(*arguments)


def test_nothing_measured_is_said():
    for rows, more in (([], {}), ([row(BASE)], {"block": "modern"}), ([row(BASE)], {"pair": ("keel", {}, "muon")})):
        with pytest.raises(NothingMeasured, match="compared|measured"):
            advise(HERE, rows, **more)


def test_the_table_is_written_and_read_in_an_order_of_its_own(tmp_path):
    rows = (row(OURS, -0.03, axis="depth", layers=24), row(BASE), row(OURS, math.nan))
    evidence.save(rows, {"made up": "by hand"}, tmp_path / "a.json")
    evidence.save(rows[::-1], {"made up": "by hand"}, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    read = evidence.load(tmp_path / "a.json")
    assert sorted(map(repr, read)) == sorted(map(repr, rows))


@pytest.fixture
def known(monkeypatch):
    """Evidence that reaches the preset "tiny", whose width is 160, whose steps are 300 and take 2,048 tokens each."""
    rows = (
        row(BASE, lr=0.03), row(OURS, -0.1, lr=0.05), row(ADAMW, 0.1, lr=0.002),
        *(row(n, d, axis="steps", steps=300, lr=lr) for n, d, lr in ((BASE, None, 0.03), (OURS, -0.1, 0.05), (ADAMW, 0.1, 0.002))),
        *(row(n, d, axis="tokens", tokens=2048, lr=lr) for n, d, lr in ((BASE, None, 0.03), (OURS, -0.1, 0.1), (ADAMW, 0.1, 0.002))),
        *(row(n, d, axis="width", width=144, lr=lr) for n, d, lr in ((BASE, None, 0.03), (OURS, -0.1, 0.05), (ADAMW, 0.1, 0.002))),
    )  # fmt: skip
    monkeypatch.setattr(evidence, "load", lambda: rows)
    return rows


def test_a_preset_within_reach_takes_what_was_measured_and_others_stay(known, monkeypatch):
    tiny = preset("tiny")
    assert (tiny.model.residual, tiny.optim.name, tiny.optim.lr, tiny.optim.weight_decay) == ("geonorm", "muon", 0.1, 0.05)
    assert tiny.optim.betas == (0.9, 0.98) and tiny.schedule.warmup == 15 and tiny.model.head_bias
    asked = asking.recipe_for("tiny", assignment="adamw")
    # 0.002 at width 144; the preset has 160.
    assert (asked.model.residual, asked.optim.lr, asked.optim.weight_decay) == ("pre-norm", 0.0018, 0.05)
    # Of this pair nothing was measured, nor of models that large.
    assert asking.recipe_for("tiny", assignment="hetero") == preset("tiny", BASELINE[0], "hetero")
    large, known_large = preset("gpt2-large"), asking.recipe_for("gpt2-large", assignment="muon")
    assert known_large == preset("gpt2-large", BASELINE[0], "muon")
    monkeypatch.setattr(evidence, "load", lambda: ())
    assert large == preset("gpt2-large") and preset("tiny").model.residual == RECOMMENDED[0]


@pytest.mark.parametrize("name", studies.NAMES)
def test_studies_are_what_they_were_whatever_is_measured(name, known, monkeypatch):
    with_it = studies.load(name, "tiny")
    monkeypatch.setattr(evidence, "load", lambda: ())
    assert with_it.variants == studies.load(name, "tiny").variants


def test_the_command_trains_what_is_recommended(known):
    found = advise(Plan(24, 1024, 19_073, 2**19), known, tuning=3)
    words = shlex.split(advice_tables.command(found))
    assert words[:7] == ["gnomon", "train", "gpt2-small", "--residual", "geonorm", "--assignment", "muon"] and words[7] == "--set"
    changes = dict(word.split("=", 1) for word in words[8:]) | {"model.residual": "geonorm"}
    recipe = asking.recipe_for("gpt2-small", assignment="muon", changes=changes)
    assert (recipe.model.layers, recipe.model.width, recipe.model.heads, recipe.steps) == (24, 1024, 16, 19_073)
    assert recipe.tokens_per_step == 2**19 and recipe.optim.lr == found.settings["optim.lr"] and recipe.optim.betas == (0.9, 0.98)
    assert replace(recipe, found.settings) == recipe


def test_the_command_line_tells_and_writes_it(known, tmp_path, capsys):
    file = tmp_path / "advice.json"
    words = ["advise", "--layers", "24", "--width", "1024", "--tokens", "10e9", "--tuning", "5", "--json", str(file)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "GeoNorm + Muon *" in out and "-0.1000 [" in out and "optim.lr=" in out and "Outside of what was measured" in out
    written = json.loads(file.read_text())
    assert written["residual"] == "geonorm" and written["outside"]["layers"] == 2.0 and len(written["forecasts"]) == 3
    assert cli.main([*words[:7], "--modern"]) == 2 and "modern block" in capsys.readouterr().err
