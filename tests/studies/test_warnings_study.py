"""What warnings are judged by: when a loss shows a failure, what counts as caught, and that the packed records say the same."""

from __future__ import annotations

import dataclasses
import gzip
import math
from pathlib import Path

import pytest

from gnomon import studies
from gnomon.diagnosis import RULES, Rule
from gnomon.errors import UserError
from gnomon.studies import warning_page, warning_records, warning_verdict, warnings_study
from gnomon.studies.warning_verdict import WatchedRun, judge, shares
from gnomon.studies.watched_run import WatchedRecipe

RECORDS = Path(__file__).parents[2] / "docs/results/outcomes/warnings.jsonl.gz"
LOUD = Rule("loud", ("noise",), lambda records: {"run": records[-1]["noise"]}, 1.0, "noise {value}", "why", "remedy", lasting=1)
QUIET = dataclasses.replace(LOUD, name="quiet", level="remark")


def run(name: str, losses, noise=(), kind="healthy", twin="", half="judged") -> WatchedRun:
    """Losses and noise at steps 10, 20 …"""
    noise = [*noise, *[0.0] * (len(losses) - len(noise))]
    records = [{"step": 10 * i, "val_loss": loss, "noise": n} for i, (loss, n) in enumerate(zip(losses, noise), 1)]
    return WatchedRun(name, 0, half, kind, twin, tuple(records))


@pytest.mark.parametrize("losses, failed, shown, behind", [
    ([3.0, 2.5, 2.0, 1.9], False, None, None),        # ends as its twin
    ([3.0, 2.5, 2.05, 1.99], False, None, None),      # within a tenth
    ([3.2, 2.5, 2.8, 1.9], False, None, None),        # a spike that it came back from
    ([3.0, 2.5, 2.3, 2.41], True, 40, 30),            # rises by more than a tenth above its lowest
    ([3.0, 2.5, 2.7, 2.5], True, 30, 30),             # the first time it does, not the last
    ([3.0, 2.95, 2.8, 2.5], True, 20, 20),            # stands still for a quarter of the run
    ([3.0, 2.8, 2.6, 2.4], True, 40, 20),             # falls to the end, and too slowly
    ([3.0, 2.5, math.nan], True, 30, 30),
    ([3.0, 2.5, 2.0, math.inf], True, 40, 40),
])  # fmt: skip
def test_when_a_loss_shows_that_a_run_fails(losses, failed, shown, behind):
    twin = [(10, 3.0), (20, 2.5), (30, 2.0), (40, 1.9)]
    found = [(10 * i, loss) for i, loss in enumerate(losses, 1)]
    assert warning_verdict.failed(found, twin) == failed
    if failed:
        assert (warning_verdict.failure_shows(found), warning_verdict.falls_behind(found, twin)) == (shown, behind)


def test_what_counts_as_caught_and_as_a_false_alarm():
    well = [3.0, 2.5, 2.0, 1.9]
    badly = [3.0, 2.5, 2.7, 3.0]
    runs = [
        run("well", well), run("loud and well", well, [0, 2]),
        run("in time", badly, [0, 2], "a", "well"), run("too late", badly, [0, 0, 2], "a", "well"), run("silent", badly, [], "b", "well"),
        run("unharmed", well, [2], "b", "well"),
    ]  # fmt: skip
    judged = judge(runs, [LOUD])
    assert [one.fate for one in judged] == ["healthy", "healthy", "failed", "failed", "failed", "unharmed"]
    assert [one.caught for one in judged] == [False, False, True, False, False, False]
    # At the very step at which the loss shows it, it is too late.
    assert [one.lead for one in judged[2:5]] == [10, 0, None]
    found = shares(judged, "judged")
    assert found == {"failed": 3, "healthy": 2, "caught": pytest.approx(1 / 3), "ahead": pytest.approx(1 / 3), "false": 0.5,
                     "lead": 10}
    assert math.isnan(shares(judged, "set")["caught"])
    # Remarks neither catch nor alarm.
    assert shares(judge(runs, [QUIET]), "judged") | {"lead": 0} == found | {"caught": 0, "ahead": 0, "false": 0, "lead": 0}
    kinds = {row["made to fail by"]: row for row in warning_verdict.by_kind(judged, "judged")}
    assert (kinds["a"]["failed"], kinds["a"]["caught"], kinds["b"]["runs"], kinds["b"]["failed"]) == (2, 1, 2, 1)
    told = {row["run"]: row["what"] for row in warning_verdict.missed(judged, "judged")}
    assert told == {"loud and well": "false alarm", "too late": "missed", "silent": "missed", "unharmed": "did not fail"}


def test_the_parts_share_no_setting():
    """Each way to fail is in all of them, and no recipe is in two."""
    kinds = {half: {case.kind for case in warnings_study.CASES.values() if case.half == half} for half in warnings_study.PARTS}
    assert kinds["set"] == kinds["judged"] == kinds["fresh"] and len(kinds["set"] - {"healthy"}) >= 6
    recipes = {v.name: v.recipe for v in studies.load("warnings").variants}
    halves = [[recipes[case.name] for case in warnings_study.CASES.values() if case.half == half] for half in warnings_study.PARTS]
    for i, part in enumerate(halves):
        assert not [one for one in part for other in halves[i + 1 :] if one in other]
    for case in warnings_study.CASES.values():
        twin = warnings_study.CASES.get(case.twin)
        assert (case.kind == "healthy") == (twin is None) and (twin is None or (twin.kind, twin.half) == ("healthy", case.half))


def test_packed_records_say_the_same(tmp_path):
    """A run of a few steps, as the study makes it."""
    one = studies.load("warnings", variants=["bf16 weights"]).variants[-1].recipe
    small = dataclasses.replace(one, every=2, recipe=dataclasses.replace(one.recipe, steps=8))
    outcome = small.train(tmp_path / "run")
    assert outcome["fate"] in ("learned", "stalled") and math.isfinite(outcome["value"])
    from gnomon.run_folder import read_metrics

    records = read_metrics(tmp_path / "run")
    assert [r["step"] for r in records if "sigma_max" in r] == [2, 4, 6, 8] == [r["step"] for r in records if "val_loss" in r]
    # bf16 keeps what it is given.
    assert max(records[1]["lost_to_rounding"].values()) > 0.01
    made = WatchedRun("bf16 weights", 0, "set", "healthy", "", tuple(records))
    warning_records.pack([made], tmp_path / "file.gz")
    (back,) = warning_records.unpack(tmp_path / "file.gz")
    assert (back.name, back.seed, back.half, back.losses[-1][0]) == ("bf16 weights", 0, "set", 8)
    assert back.losses == [(step, pytest.approx(loss, rel=5e-3)) for step, loss in made.losses]
    eager = [dataclasses.replace(rule, limit=-math.inf if not rule.below else math.inf, lasting=1) for rule in RULES]
    said, said_back = (judge([one], eager)[0].warnings for one in (made, back))
    assert [(w.rule, w.step, w.places[:1]) for w in said] == [(w.rule, w.step, w.places[:1]) for w in said_back] and said
    for a, b in zip(said, said_back):
        assert a.value == pytest.approx(b.value, rel=0.03, abs=1e-2)


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "text").write_text("hello")
    with gzip.open(tmp_path / "other.gz", "wt") as file:
        file.write("{}\n")
    for name in ("text", "other.gz", "none"):
        with pytest.raises(UserError, match="no records"):
            warning_records.unpack(tmp_path / name)


@pytest.mark.slow
def test_the_page_says_what_its_records_say():
    """The figures of docs/results/warnings.md come from the file beside it, by the rules as they are."""
    page = (RECORDS.parents[1] / "warnings.md").read_text(encoding="utf-8")
    assert warning_page.text(warning_records.unpack(RECORDS)).strip() in page


def test_recipes_of_watched_runs():
    one = studies.load("warnings").variants[0].recipe
    assert isinstance(one, WatchedRecipe) and one.at(0.5, 7).recipe.seed == 7 and one.at(0.5, 7).optim.lr == 0.5
    assert one.shortened(0.1).steps == one.steps // 10 and one.expected()["parameters"] > 0
