"""Recipes: complete, strict, and the same after a trip through JSON."""

from __future__ import annotations

import json
import math

import pytest

from gnomon.errors import UserError
from gnomon.train import PRESETS, from_dict, preset, replace, to_dict
from gnomon.train.presets import BASELINE, RECOMMENDED
from gnomon.train.recipe import ScheduleConfig, difference
from gnomon.train.schedule import ratio


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    "residual, assignment", [("pre-norm", "adamw"), ("proj-spheret", "hetero"), ("sphere", "muon")]
)
def test_survives_json(name, residual, assignment):
    recipe = preset(name, residual, assignment)
    assert from_dict(json.loads(json.dumps(to_dict(recipe)))) == recipe
    assert recipe.model.residual == residual


def test_replace_by_path():
    recipe = replace(
        preset("tiny", *BASELINE),
        {
            "model.width": "64",
            "optim.clip": "null",
            "optim.betas": [0.8, 0.9],
            "model.residual_options.p": "2",
            "optim.lr": 1,
        },
    )
    assert (recipe.model.width, recipe.optim.clip, recipe.optim.betas) == (64, None, (0.8, 0.9))
    assert recipe.model.residual_options == {"p": 2} and recipe.optim.lr == 1.0


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"optim.lrr": 1}, "optim.lr"),
        ({"optm.lr": 1}, "optim.lr"),
        ({"steps": "many"}, "steps should be of type int"),
        ({"steps": True}, "steps should be of type int"),
        ({"model.heads": 7}, "not a multiple"),
        ({"schedule.name": "cosin"}, "cosine"),
        ({"data.accumulate": 3}, "not a multiple"),
        ({"model": 3}, "table of settings"),
        ({"optim.betas": [0.9]}, "optim.betas"),
    ],
)
def test_mistakes_are_told(changes, words):
    with pytest.raises(UserError, match=words):
        replace(preset("tiny"), changes)


def test_unknown_key_in_a_file():
    values = to_dict(preset("tiny"))
    values["optim"]["weight_decai"] = 0.1
    with pytest.raises(UserError, match="unknown setting 'optim.weight_decai'. Did you mean 'weight_decay'"):
        from_dict(values)
    with pytest.raises(UserError, match="missing setting steps"):
        from_dict({k: v for k, v in to_dict(preset("tiny")).items() if k != "steps"})


def test_difference_names_what_changed():
    assert difference(preset("tiny"), replace(preset("tiny"), {"seed": 3})) == ["seed: 0 -> 3"]


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_schedule(name):
    schedule = ScheduleConfig(name=name, warmup=10, floor=0.1, decay=0.2)
    rates = [ratio(schedule, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(rates) == 1
    if name == "constant":
        assert set(rates[10:]) == {1.0}
    else:
        assert rates[-1] == pytest.approx(0.1)
        assert all(a >= b for a, b in zip(rates[10:], rates[11:]))
    if name == "wsd":
        assert set(rates[10:80]) == {1.0} and rates[85] < 1


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_won_the_study_unless_asked_otherwise(name):
    plain = preset(name)
    bound = {"model.residual_options.clamp": math.pi / 4} if plain.model.layers <= 12 else {"model.residual": "geonorm"}
    changed = {**bound, "model.head_bias": True, "optim.lr": 0.04 if name == "tiny" else 0.02}
    assert plain == replace(preset(name, *RECOMMENDED), changed)
    usual = preset(name, *BASELINE)
    assert (usual.model.residual, usual.optim.name) == BASELINE
    assert preset(name, assignment="muon").model.residual == BASELINE[0]
    assert preset(name, "keel").optim.name == BASELINE[1]
