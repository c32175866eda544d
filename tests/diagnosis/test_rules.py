"""Every rule speaks of what it is there for, and of nothing else; and its advice can be followed."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path

import pytest

from gnomon.diagnosis import RULES, Diagnosis, diagnose
from gnomon.diagnosis.readings import by_block, by_place, by_role, spelled_places
from gnomon.residual import names as residual_names
from gnomon.series import SERIES
from gnomon.train import preset
from gnomon.train.presets import ASSIGNMENTS

BY_NAME = {rule.name: rule for rule in RULES}
STEPS = range(10, 410, 10)
LATE = 20


def healthy(i: int) -> dict:
    """A measured record of a run of three blocks that learns; a little differs from one to the next."""
    some = 1 + 0.02 * math.sin(i)
    sublayers = [f"text.{layer}.{name}" for layer in range(3) for name in ("attention", "mlp")]
    matrices = [f"text.{layer}.{name}" for layer in range(3) for name in ("query", "key", "value", "output", "up", "down")]
    heads = [f"text.{layer}.attention" for layer in range(3)]
    return {
        "step": STEPS[i],
        "loss": 3.5 - 0.03 * i + 0.01 * math.sin(3 * i),
        "unigram": 3.2,
        "grad_norm": 1.0 * some,
        "stream_coherence": {place: 0.4 * some for place in sublayers},
        "input_kept": {place: 0.9 ** (j + 1) for j, place in enumerate(sublayers)},
        "angle": {place: 0.3 * some for place in sublayers},
        "massive": {place: 12.0 * some for place in sublayers},
        "attention_logit_max": {place: [6.0 + 0.1 * i, 7.0 * some] for place in heads},
        "attention_entropy": {place: [2.0 * some, 1.5] for place in heads},
        "attention_sink": {place: [0.1, 0.3 * some] for place in heads},
        "sigma_max": {place: 2.0 + 0.02 * i for place in matrices},
        "update": {place: 0.004 * some for place in matrices},
        "lost_to_rounding": {place: 0.01 for place in matrices},
        "gradient_norm": {place: 0.1 * some for place in matrices},
        "gradient_overflow": {place: 0.0 for place in matrices},
    }


def changed(key: str, name: str, value, late: int = LATE) -> list[dict]:
    """Healthy records, of which the late ones say something else of the places that end in `name`."""
    records = [healthy(i) for i in range(len(STEPS))]
    for record in records[late:]:
        record[key] = {place: value if place.endswith(name) else old for place, old in record[key].items()}
    return records


def grown(*keys: str) -> list[dict]:
    """Healthy records in which these series of block 1 double at every late one."""
    records = [healthy(i) for i in range(len(STEPS))]
    for more, record in enumerate(records[LATE:], 1):
        for key in keys:
            if key == "grad_norm":
                record[key] *= 2.0**more
                continue
            for place in record[key]:
                if place.startswith("text.1."):
                    value = record[key][place]
                    record[key][place] = [v * 2.0**more for v in value] if isinstance(value, list) else value * 2.0**more
    return records


def stalled() -> list[dict]:
    records = [healthy(i) for i in range(len(STEPS))]
    for i, record in enumerate(records):
        record["loss"] = 3.22 + 0.005 * math.sin(i)
    return records


# Of every rule: records on which it must speak, and what it must name.
ILL = {
    "saturation": (lambda: changed("attention_logit_max", "1.attention", [5.0, 300.0]), "text.1.attention"),
    "growing-logits": (lambda: grown("attention_logit_max", "sigma_max"), "text.1"),
    "one-token": (lambda: changed("attention_entropy", "2.attention", [0.0, 0.001]), "text.2.attention"),
    "sink": (lambda: changed("attention_sink", "0.attention", [0.99, 0.97]), "text.0.attention"),
    "collapse": (lambda: changed("stream_coherence", "mlp", 0.999), "text.0.mlp"),
    "forgetting": (lambda: changed("input_kept", "2.mlp", 1e-9), "text.2.mlp"),
    "idle-blocks": (lambda: changed("angle", "2.mlp", 0.0), None),
    "massive-activations": (lambda: changed("massive", "2.mlp", 1e6), "text.2.mlp"),
    "large-update": (lambda: changed("update", "query", 3.0), "query"),
    "lost-update": (lambda: changed("lost_to_rounding", "up", 1.0), "up"),
    "gradient-jump": (lambda: changed("gradient_norm", "down", 40.0), "down"),
    "overflow": (lambda: changed("gradient_overflow", "1.value", 2.0), "text.1.value"),
    "stall": (stalled, "run"),
    "spike-coming": (lambda: grown("grad_norm", "attention_logit_max"), "run"),
}


def idle() -> list[dict]:
    records = changed("angle", "2.mlp", 0.0)
    for record in records[LATE:]:
        record["angle"]["text.2.attention"] = 0.001
    return records


ILL["idle-blocks"] = (idle, "text.2")


def test_the_examples_are_of_all_rules():
    assert set(ILL) == set(BY_NAME) and len(RULES) == len(BY_NAME)


def test_a_healthy_run_has_no_warning():
    records = [healthy(i) for i in range(len(STEPS))]
    assert diagnose(records) == []


@pytest.mark.parametrize("name", ILL)
def test_a_rule_speaks_once_of_the_right_place(name):
    make, place = ILL[name]
    records, rule = make(), BY_NAME[name]
    before = copy.deepcopy(records)
    found = [one for one in diagnose(records) if one.rule == name]
    assert records == before, "rules are pure"
    assert len(found) == 1, "it begins once"
    assert place in found[0].places and found[0].level == rule.level
    if name != "stall":
        assert STEPS[LATE] <= found[0].since <= found[0].step
    if name not in ("stall", "growing-logits", "spike-coming"):
        assert (found[0].since, found[0].step) == (STEPS[LATE], STEPS[LATE + rule.lasting - 1])
    assert str(found[0]).count("{") == 0 and found[0].headline in str(found[0])


@pytest.mark.parametrize("name", ILL)
def test_a_rule_is_silent_where_a_series_is_missing(name):
    rule, records = BY_NAME[name], ILL[name][0]()
    for key in rule.reads:
        without = [{k: v for k, v in record.items() if k != key} for record in records]
        assert [one for one in diagnose(without) if one.rule == name] == []


@pytest.mark.parametrize("name", ILL)
def test_what_is_between_measurements_changes_nothing(name):
    """Loops log the loss of every step and measure at some."""
    records = ILL[name][0]()
    between = [{"step": record["step"] + 1, "tokens": 7} for record in records]
    mixed = [one for pair in zip(records, between) for one in pair]
    assert diagnose(mixed) == diagnose(records)


def test_a_warning_ends_and_comes_back():
    records = changed("attention_logit_max", "1.attention", [5.0, 300.0], late=5)
    for i in range(15, 25):
        records[i] = healthy(i)
    assert [one.step for one in diagnose(records) if one.rule == "saturation"] == [STEPS[5], STEPS[25]]
    diagnosis = Diagnosis()
    holding = []
    for record in records:
        diagnosis.take(record)
        holding.append("saturation" in [one.rule for one in diagnosis.holding])
    assert holding == [5 <= i < 15 or i >= 25 for i in range(len(records))]


def test_warnings_stand_before_remarks():
    records = changed("massive", "2.mlp", 1e6)
    for record in records[LATE:]:
        record["stream_coherence"] = {place: 1.0 for place in record["stream_coherence"]}
    assert [one.level for one in diagnose(records)] == ["warning", "remark"]


def test_numbers_that_are_not_finite_are_past_every_limit():
    for value in (math.nan, math.inf):
        found = diagnose(changed("attention_logit_max", "1.attention", [1.0, value]))
        assert "saturation" in [one.rule for one in found]


def test_the_unigram_entropy_need_be_said_once():
    records = stalled()
    for record in records[1:]:
        del record["unigram"]
    assert [one.rule for one in diagnose(records)] == ["stall"]


def test_rules_read_series_that_exist():
    for rule in RULES:
        assert set(rule.reads) <= set(SERIES) | {"loss"}, rule.name


def test_remedies_can_be_followed():
    """Every setting, residual and assignment that a message names is one."""
    recipe = preset("tiny")
    for rule in RULES:
        for part, name in re.findall(r"\b(model|optim|compute|data|schedule)\.([a-z_]+)", rule.remedy):
            assert hasattr(getattr(recipe, part), name), f"{rule.name}: {part}.{name}"
        for said in re.findall(r"\(residual ([a-z-]+(?:, [a-z-]+)*)", rule.remedy):
            assert set(said.split(", ")) <= set(residual_names()), f"{rule.name}: {said}"
        for said in re.findall(r"assignment ([a-z-]+(?:, [a-z-]+)*)\)", rule.remedy):
            assert set(said.split(", ")) <= set(ASSIGNMENTS), f"{rule.name}: {said}"


def test_the_page_has_the_evidence_of_every_rule():
    page = (Path(__file__).parents[2] / "docs/results/warnings.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert rule.evidence == f"docs/results/warnings.md#{rule.name}" and f"\n### {rule.name}\n" in page


def test_readings():
    record = {"angle": {"text.0.attention": 0.1, "text.0.mlp": 0.3, "text.1.mlp": 0.5}, "stream_norm": [1.0, 2.0, 3.0],
              "attention_entropy": {"text.0.attention": [1.0, 3.0]}, "attention_logit_max": {"text.0.attention": [1.0, 3.0]}}  # fmt: skip
    assert by_block(by_place(record, "angle"), sum) == pytest.approx({"text.0": 0.4, "text.1": 0.5})
    assert by_role(by_place(record, "angle")) == {"attention": 0.1, "mlp": 0.5}
    assert by_place(record, "attention_entropy") == {"text.0.attention": 2.0}
    assert by_place(record, "attention_logit_max") == {"text.0.attention": 3.0}
    # Runs of older versions.
    assert by_place(record, "stream_norm") == {"text.0.attention": 1.0, "text.0.mlp": 2.0, "text.1.attention": 3.0}
    assert by_place(record, "sigma_max") == {}
    assert by_role({"text.0.expert1.up": 1.0, "text.0.expert2.up": 2.0}) == {"up": 2.0}


def test_places_in_words():
    assert spelled_places(["text.3.query", "text.1.query", "text.2.query", "text.5.query"]) == "query 1–3, 5 of text"
    assert spelled_places(["text.3", "run", "text.1.up"]) == "block 3 of text, up 1 of text, run"
    assert spelled_places([f"text.0.{name}" for name in "abcdef"]).endswith("and 2 more")
