"""The table of evidence, from outcomes as the study writes them."""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path

import pytest

from gnomon import studies
from gnomon.errors import UserError
from gnomon.studies import map_evidence, map_study
from gnomon.studies.results import Results
from gnomon.studies.standing import settle
from gnomon.studies.study import Outcome, PlannedRun
from gnomon.train import evidence, recommend

KNOWN = Path(__file__).parents[2] / "docs/results/outcomes/map-tiny.jsonl"
DEEP = map_study.DEEP


def told(run: PlannedRun) -> Outcome:
    """As if a rate of 0.02 were best everywhere, the sphere ahead by 0.05 and by 0.1 at 24 layers, and seeds a little apart."""
    ahead = 0.0 if "clamped" not in run.variant else 0.1 if "24 layers" in run.variant else 0.05
    wobble = 0.001 * (run.seed % 7) * (1 + ("clamped" in run.variant))
    return Outcome("learned", 2 - ahead + abs(run.rate - 0.02) + wobble, 1.0, Path("nowhere"))


@pytest.fixture(scope="module")
def made() -> list[evidence.Row]:
    one = studies.load("map", "tiny", variants=[DEEP, f"{DEEP}, 24 layers", f"{DEEP}, anchored", "modern", f"{DEEP}, rate x 2"])
    return map_evidence.rows(Results(one, settle(one, told)), "made up")


def test_every_contestant_at_every_point_compared_has_a_row_and_anchors_have_none(made):
    places = sorted((row.contestant, row.block, row.axis, row.layers, row.factor) for row in made)
    both = [("Pre-LN + Muon", "plain"), (DEEP, "plain")]
    assert places == sorted(
        [(*one, "centre", 6, 1.0) for one in both] + [(*one, "depth", 24, 1.0) for one in both] + [(*one, "rate", 6, 2.0) for one in both]
        + [(name, "modern", "centre", 6, 1.0) for name in map_study.MODERNISED]
    )  # fmt: skip


def test_a_row_tells_what_the_study_found(made):
    row = next(row for row in made if row.contestant == DEEP and row.axis == "depth")
    assert (row.residual, row.residual_options, row.assignment) == ("bounded-sphere", {}, "muon")
    assert row.difference == pytest.approx(-0.1, abs=0.01) and row.low < row.difference < row.high < 0
    assert (row.seeds, row.word, row.steps, row.width, row.tokens) == (5, "better", 1000, 96, 512)
    assert row.settings["optim.lr"] == pytest.approx(0.02, rel=0.3) and 0 < row.warmup < 0.2
    modern = next(row for row in made if row.block == "modern" and row.contestant == "Pre-LN + AdamW")
    assert "optim.momentum" not in modern.settings and modern.assignment == "adamw"
    found = recommend.advise(recommend.Plan(24, 96, 1000, 512), made, tuning=3)
    assert found.residual == "bounded-sphere" and found.chosen.difference == row.difference


def test_seeds_that_only_one_side_has_do_not_count():
    one = studies.load("map", "tiny", variants=[DEEP])
    both = settle(one, told)
    for kept, axes in ((3, {"Pre-LN + Muon", DEEP}), (2, set())):
        few = {run: outcome for run, outcome in both.items() if run.tuning or run.variant == DEEP or run.seed < kept}
        found = map_evidence.rows(Results(one, few), "made up")
        assert {row.contestant for row in found} == axes and all(row.seeds == kept for row in found)


def test_rows_of_one_text_are_made_anew_and_those_of_others_stay(made, tmp_path, capsys, monkeypatch):
    out = tmp_path / "evidence.json"
    # Seconds for each file and text; the same file gives the same rows.
    monkeypatch.setattr(map_evidence, "from_outcomes", functools.cache(map_evidence.from_outcomes))
    evidence.save(tuple(made), {"made up": "by hand"}, out)
    map_evidence.main(KNOWN, data="runs/data/eltec", text="novels", out=out)
    first = evidence.load(out)
    map_evidence.main(KNOWN, data="runs/data/eltec", text="novels", out=out)
    assert evidence.load(out) == first
    assert sum(row.text == "made up" for row in first) == len(made)
    assert f"{len(made)} of other texts" in capsys.readouterr().out
    told = f"python -m gnomon.studies.map_evidence {KNOWN} --data runs/data/eltec --text novels"
    assert evidence.made_by(out) == {"made up": "by hand", "novels": told}
    with pytest.raises(UserError, match="is --data what the study was given"):
        map_evidence.main(KNOWN, data="runs/data/another", text="novels", out=out)
    assert evidence.load(out) == first


def test_the_table_of_the_package_is_what_the_outcomes_say():
    """Means of the centre once more, by hand from the lines of the file. Where this fails the file has grown: make the table anew."""
    rows = [row for row in evidence.load() if row.text.startswith("English novels")]
    lines = [json.loads(line) for line in KNOWN.read_text().splitlines()]
    for row in rows:
        names = map_study.CONTESTANTS if row.block == "plain" else map_study.MODERNISED
        assert row.contestant in names and row.seeds >= map_evidence.LEAST
        if row.axis == "centre" and row.block == "plain":
            values = [one["value"] for one in lines if one["variant"] == row.contestant and one["seed"] < 1000
                      and one["lr"] == row.settings["optim.lr"]]  # fmt: skip
            assert len(values) == row.seeds and statistics.fmean(values) == pytest.approx(row.mean, abs=1e-4)
