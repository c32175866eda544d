"""Recipes: complete, strict, and the same after a trip through JSON."""

from __future__ import annotations

import json
import math

import pytest

from gnomon import residual
from gnomon.errors import UserError
from gnomon.files import flatten
from gnomon.models import Transformer
from gnomon.models.config import WITHOUT_NORM
from gnomon.train import PRESETS, evidence, from_dict, preset, replace, to_dict
from gnomon.train.presets import ASSIGNMENTS, BASELINE, RECOMMENDED
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
        ({"optim.lr": 10**400}, "401 digits"),
        ({"optim.lr": "9" * 5000}, "optim.lr should be of type float"),
        ({"model.residual": "pre-norm", "model.residual_options.norm": "rms"}, "a matter of the model's norm"),
        ({"model.residual": "pre-norm", "model.residual_options.eps": 1e-5}, "a matter of the model's norm_eps"),
        ({"model.residual": "sphere", "model.residual_options.index": 1}, "a matter of the model's layers"),
    ],
)
def test_mistakes_are_told(changes, words):
    with pytest.raises(UserError, match=words):
        replace(preset("tiny"), changes)


NUMBERS = {
    "steps": 0, "seed": -1, "data.batch": 0, "data.accumulate": 0, "data.val_fraction": 1.0, "optim.lr": 0.0, "optim.adamw_lr": -1,
    "optim.betas": [0.9, 1.0], "optim.eps": -1e-8, "optim.weight_decay": -0.1, "optim.clip": 0, "optim.momentum": 1.0,
    "optim.logit_clip": -5, "schedule.warmup": -1, "schedule.floor": 1.5, "watch.log_every": -1, "watch.eval_every": -1,
    "watch.eval_tokens": -1, "watch.probe_every": -1, "watch.probe_tokens": -1, "watch.track_every": -1, "watch.save_every": -1,
    "watch.keep": -1, "model.vocab_size": 0, "model.context": 0, "model.layers": 0, "model.heads": 0, "model.width": 0,
    "model.kv_heads": 0, "model.head_dim": 0, "model.mlp_width": 0, "model.rope_base": 0, "model.attention_softcap": 0,
    "model.head_softcap": -1, "model.init_std": -1, "model.norm_eps": -1, "optim.manifold_decay": -1, "optim.solver_steps": -1,
    "optim.dgram_cap": 0, "schedule.decay": 1.1,
}  # fmt: skip
READ = {"optim.name": "manifold-muon", "optim.assignment": "hetero", "model.residual": "pre-norm", "schedule.name": "wsd"}


@pytest.mark.parametrize("path, value", NUMBERS.items())
def test_numbers_that_cannot_be_are_told_by_name(path, value):
    with pytest.raises(UserError, match=f"{path.removeprefix('model.')} must lie in"):
        replace(preset("tiny", *BASELINE), READ | {path: value})
    number = math.nan if isinstance(value, float) else "NaN"
    if path != "optim.betas" and not isinstance(value, int):
        with pytest.raises(UserError, match="must lie in"):
            replace(preset("tiny", *BASELINE), READ | {path: number})


def test_every_number_has_a_range():
    numbers = {path for path, value in flatten(to_dict(replace(preset("tiny", *BASELINE), READ))).items()
               if isinstance(value, int | float | list) and not isinstance(value, bool)}  # fmt: skip
    assert numbers <= NUMBERS.keys()


@pytest.mark.parametrize(
    "name, changes",
    [
        ("adamw", {"optim.adamw_lr": 1e-3}),
        ("adamw", {"optim.momentum": 0.9}),
        ("muon", {"optim.assignment": "stiefel"}),
        ("muon", {"optim.scale": "rms"}),
        ("none", {"optim.solver_steps": 2}),
        ("none", {"optim.manifold_decay": 0.1}),
        ("stiefel", {"optim.dgram_cap": 4.0}),
        ("stiefel", {"optim.direction": "adam"}),
        ("sphere", {"optim.scale": "rms"}),
        ("sphere", {"optim.manifold_decay": 0.1}),
        ("sphere", {"optim.spectral_radius": 2.0}),
        ("sphere", {"optim.direction": "adam", "optim.momentum": 0.9}),
        ("adamw", {"optim.paper": True}),
        ("adamw", {"schedule.decay": 0.3}),
        ("adamw", {"schedule.name": "constant", "schedule.floor": 0.3}),
        ("adamw", {"data.val": "jargon", "data.val_fraction": 0.3}),
        ("adamw", {"model.positions": "learned", "model.rope_base": 100.0}),
        ("adamw", {"model.residual": "sphere", "model.norm": "layer"}),
        ("adamw", {"model.residual": "geonorm", "model.norm_eps": 1e-6}),
    ],
)
def test_a_setting_that_nothing_reads_is_refused_by_name(name, changes):
    recipe, path = preset("tiny", BASELINE[0], name), list(changes)[-1]
    with pytest.raises(UserError, match=f"nothing would read {path} here: it needs|{path} is .*nothing reads it"):
        replace(recipe, changes)
    shared = replace(recipe, changes, shared=True)
    assert path not in flatten(to_dict(shared)) or not path.startswith("optim.")


@pytest.mark.parametrize("name", residual.names())
def test_residuals_without_a_norm_are_known(name):
    small = {"model.residual": name, "model.layers": 1, "model.width": 8, "model.heads": 2}
    made = [
        Transformer(replace(preset("tiny", *BASELINE), {"model.norm": norm} | small, shared=True).model)
        for norm in ("rms", "layer")
    ]
    alike = repr(made[0]) == repr(made[1]) and made[0].state_dict().keys() == made[1].state_dict().keys()
    assert alike == (name in WITHOUT_NORM)


def test_a_recipe_holds_no_setting_its_optimizer_ignores():
    held = {name: set(to_dict(preset("tiny", "pre-norm", name))["optim"]) for name in ASSIGNMENTS}
    both = {"name", "lr", "betas", "eps", "weight_decay", "clip", "logit_clip", "embedding_lr", "head_lr", "vector_lr"}
    assert held["adamw"] == both
    assert held["muon"] == both | {"adamw_lr", "adamw_weight_decay", "momentum"}
    assert held["none"] == held["muon"] | {"assignment", "scale"}
    assert held["stiefel"] == held["none"] | {"solver_steps", "paper"}
    assert held["sphere"] == held["muon"] | {"assignment", "direction"}
    assert held["spectral-ball"] == held["none"] | {"spectral_radius", "manifold_decay"}


def test_a_changed_optimizer_leaves_behind_what_it_does_not_read():
    muon = replace(preset("tiny", "pre-norm", "muon"), {"optim.momentum": 0.8})
    assert replace(muon, {"optim.name": "adamw"}).optim == replace(preset("tiny", *BASELINE), {"optim.lr": muon.optim.lr}).optim


def test_recipes_of_older_versions_load():
    """They hold every setting of the optimizer."""
    recipe = preset("tiny", *BASELINE)
    old = to_dict(recipe)
    old["optim"] |= {"adamw_lr": 4e-3, "assignment": "stiefel", "momentum": 0.95, "scale": "rms", "paper": True, "dgram_cap": 3.0,
                     "manifold_decay": 0.1, "solver_steps": 1}  # fmt: skip
    assert from_dict(old) == recipe
    part = to_dict(recipe)
    part["optim"]["scale"] = "rms"
    with pytest.raises(UserError, match="optim.scale is 'rms', but nothing reads it: it needs optim.name manifold-muon"):
        from_dict(part)


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
def test_a_preset_out_of_reach_of_the_map_is_what_won_the_study_unless_asked_otherwise(name, monkeypatch):
    monkeypatch.setattr(evidence, "load", lambda: ())
    plain = preset(name)
    bound = {"model.residual_options.clamp": math.pi / 4} if plain.model.layers <= 12 else {"model.residual": "geonorm"}
    changed = {**bound, "model.head_bias": True, "optim.lr": 0.04 if name == "tiny" else 0.02}
    assert plain == replace(preset(name, *RECOMMENDED), changed)
    usual = preset(name, *BASELINE)
    assert (usual.model.residual, usual.optim.name) == BASELINE
    assert preset(name, assignment="muon").model.residual == BASELINE[0]
    assert preset(name, "keel").optim.name == BASELINE[1]


@pytest.mark.parametrize("name", ("adamw", "muon", "none", "hetero"))
def test_embedding_head_and_vectors_have_rates_of_their_own(name):
    from gnomon.train import optimizer

    own = {"optim.embedding_lr": 1e-3, "optim.head_lr": 2e-3, "optim.vector_lr": 3e-3, "model.tied": False}
    own |= {"optim.adamw_weight_decay": 0.5} if name != "adamw" else {"optim.weight_decay": 0.5}
    recipe = replace(preset("tiny", "pre-norm", name), {"model.layers": 1, "model.width": 32, "model.heads": 2, **own})
    model = Transformer(recipe.model)
    made = optimizer.build(model, recipe.optim)
    found = {n: (g["lr"], g["weight_decay"]) for g in made.param_groups for n in g["param_names"]}
    assert found.keys() == dict(model.named_parameters()).keys()
    assert found["embed.weight"] == (1e-3, 0.5) and found["head.weight"] == (2e-3, 0.5)
    assert {found[n] for n, p in model.named_parameters() if p.ndim < 2} == {(3e-3, 0.0)}
    assert found["blocks.0.mlp.up.weight"][0] == recipe.optim.lr
