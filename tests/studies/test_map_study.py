"""The map's contestants, and that what was measured for it stays known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon import studies
from gnomon.studies import map_study
from gnomon.studies.outcomes import fingerprint
from gnomon.studies.search import draws
from gnomon.studies.study import Outcome, plan, tuned, wanted

KNOWN = Path(__file__).parents[2] / "docs/results/outcomes/map-tiny.jsonl"


def outcome(value: float) -> Outcome:
    return Outcome("learned", value, 1.0, Path("nowhere"))


def test_every_outcome_on_file_is_a_run_of_the_study():
    """A changed recipe or default would make hours of runs unknown without a word."""
    records = {record["fingerprint"]: record for record in map(json.loads, KNOWN.read_text().splitlines())}
    one = studies.load("map", "tiny", data="runs/data/eltec", variants=sorted({record["variant"] for record in records.values()}))
    measured: dict = {}
    while fresh := {
        run: outcome(float(record["value"])) for variant in one.variants for run in wanted(one, variant, measured)
        if run not in measured and (record := records.get(fingerprint(run.recipe)))
    }:  # fmt: skip
        measured |= fresh
    assert len(records) >= 24 and len(measured) == len(records)


def test_groups_can_be_run_by_themselves():
    for group, names in {
        "modern": {"Pre-LN + Muon, modern", "Pre-LN + AdamW, modern", "clamped sphere by block + Muon, modern"},
        "anchor": {f"{name}{end}" for name in ("Pre-LN + Muon", "clamped sphere by block + Muon") for end in ("", ", anchored")},
    }.items():
        assert {v.name for v in studies.load("map", "tiny", variants=[group]).variants} == names


def test_the_modern_block_is_all_four_settings_and_its_head_is_tuned():
    one = studies.load("map", "tiny", variants=["modern"])
    for variant in one.variants:
        model = variant.recipe.model
        assert (model.activation, model.zero_init, model.qk_norm, model.tied) == ("relu2", True, True, False)
        assert "optim.head_lr" in variant.space and len(draws(variant.space, one.budget)) == one.budget.trials
    plain = studies.load("map", "tiny", variants=["Pre-LN + Muon"]).variants[0]
    assert "optim.head_lr" not in plain.space
    assert map_study.space_of(plain.recipe).keys() == plain.space.keys()


@pytest.mark.parametrize("name", map_study.ANCHORED)
def test_an_anchor_is_put_into_what_won(name):
    one = studies.load("map", "tiny", variants=["anchor", "anchor depth"])
    model = next(v for v in one.variants if v.name == name)
    measured: dict = {}
    while missing := [run for run in wanted(one, model, measured) if run not in measured]:
        measured |= {run: outcome(run.rate) for run in missing}
    won = dict(tuned(one, model, measured))
    anchored = next(v for v in one.variants if v.name == f"{name}, 24 layers, anchored")
    runs = wanted(one, anchored, measured)
    assert anchored.baseline == f"{name}, 24 layers" and len(runs) == 3
    for run in runs:
        assert run.recipe.model.anchor and run.recipe.model.layers == 24
        assert run.recipe.optim.momentum == won.get("optim.momentum", 0.95)


@pytest.mark.parametrize("group", sorted({variant.group for variant in studies.load("map", "tiny").variants}))
def test_every_group_has_a_smoke_test(group):
    whole = {variant.name: variant for variant in studies.load("map", "tiny", variants=[group]).variants}
    one = studies.load("map", "smoke", variants=[group])
    for run in plan(one):
        variant = whole[run.variant]
        assert run.recipe.steps <= 100 and not run.tuning and run.recipe.model == variant.recipe.model
        factor = 1.0 if variant.like is None else variant.rates[len(variant.rates) // 2]
        assert run.rate == pytest.approx(variant.recipe.optim.lr * factor, rel=1e-2)


def test_the_plan_of_every_variant_is_made():
    one = studies.load("map", "tiny")
    assert {run.variant for run in plan(one)} == {variant.name for variant in one.variants}
