"""Pictures and tables of the map, from a part of it whose answers are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gnomon import report, studies
from gnomon.studies import map_figures, map_study, page_of_outcomes
from gnomon.studies.map_evidence import rows
from gnomon.studies.outcomes import OutcomesFile
from gnomon.studies.results import Results
from gnomon.studies.standing import settle
from gnomon.studies.study import Outcome, PlannedRun

DEEP, BASE, ADAMW = map_study.DEEP, map_study.BASELINE, "Pre-LN + AdamW"
RUN = [BASE, DEEP, ADAMW, f"{DEEP}, 24 layers", f"{ADAMW}, 24 layers", *(f"{DEEP}, rate x {factor:g}" for factor in map_study.FACTORS[2:8])]


def told(run: PlannedRun) -> Outcome:
    """AdamW 0.2 behind everywhere, the sphere not apart at the centre and 0.1 ahead at 24 layers; a bowl over the rate, whose basin
    of 0.02 nats is an octave to each side; every curve a straight line from 3."""
    rate = math.log2(run.rate / (0.004 if run.recipe.optim.name == "adamw" else 0.02))
    gain = (0.1 if "24 layers" in run.variant and "clamped" in run.variant else 0.0) - 0.2 * (run.recipe.optim.name == "adamw")
    loss = 2 - gain + 0.01 * rate**2 + 0.002 * (run.seed % 5) * (1 if "clamped" in run.variant else -1)
    tokens = run.recipe.steps * run.recipe.tokens_per_step
    points = tuple((i * run.recipe.steps // 10, i * tokens // 10, 3 + (loss - 3) * i / 10) for i in range(1, 11))
    return Outcome("learned", loss, 1.0, Path("nowhere"), points)


@pytest.fixture(scope="module")
def results() -> Results:
    one = studies.load("map", "tiny")
    wanted = {variant.name for variant in one.only(RUN).variants}
    return Results(one, settle(one, lambda run: told(run) if run.variant in wanted else None))


def test_every_point_has_its_best_or_a_gap(results):
    found = {row["point"]: row for row in map_figures.best(results, rows(results, ""))}
    assert found["24 layers"]["take"] == DEEP and found["24 layers"]["mean"] == pytest.approx(-0.1, abs=0.02)
    assert found["24 layers"]["high"] < 0 and found["24 layers"]["seeds"] == 5
    assert found["24 layers"]["contestants"] == f"3 of {len(map_study.CONTESTANTS)}"
    assert found["centre"]["take"].startswith("not told apart") and found["centre"]["best"] == DEEP
    for gap in ("48 layers", "10,000 steps", "width 512", "8,192 tokens a step", "modern, centre", "modern, 24 layers"):
        assert "mean" not in found[gap] and found[gap]["contestants"].startswith("0 of")
    assert not any("anchored" in point for point in found)


def test_tokens_to_a_baseline_s_loss_are_read_off_the_curves(results):
    found = {(row["contestant"], row["layers"], row["baseline"]): row["share"] for row in map_figures.savings(results)}
    # From 3 down to 2.2 in place of 2: 0.8 of the way; to 1.9 in place of 2: 1 / 1.1.
    assert found[BASE, 6, ADAMW] == pytest.approx(0.8, abs=0.02)
    assert found[DEEP, 24, ADAMW] == pytest.approx(0.8 / 1.1, abs=0.02)
    assert found[DEEP, 24, BASE] == pytest.approx(1 / 1.1, abs=0.02)
    assert found[ADAMW, 6, BASE] == math.inf and all(layers in (6, 24) for _, layers, _ in found)


def test_the_basin_is_as_wide_as_it_was_made(results):
    for row in map_figures.basins(results, rows(results, "")):
        assert row["contestant"] in (BASE, DEEP) and row["rates"] == 7
        assert (row["octaves"], row["to the edge"], row["learned"]) == (2.0, False, 1.0)


class Kept(list):
    """A page that keeps the names of its charts."""

    def section(self, title):
        return self

    def text(self, text):
        return self

    def table(self, *_, **__):
        return self

    def chart(self, chart, caption="", name=""):
        chart.to_dict()
        self.append(name)
        return self


def test_what_is_measured_is_drawn_and_nothing_else(results):
    page = Kept()
    map_figures.draw(page, results)
    assert page == ["take", "gain-depth", "rate-depth", "tokens-adamw", "tokens-muon", "basin"]


@pytest.mark.slow
def test_the_page_is_written_from_outcomes_alone_with_gaps(results, tmp_path, capsys):
    file = OutcomesFile(tmp_path / "known.jsonl")
    for run, outcome in results.measured.items():
        file.remember(run, outcome)
    before = (tmp_path / "known.jsonl").read_bytes()
    page_of_outcomes.main("map", tmp_path / "known.jsonl", out=tmp_path / "page")
    assert (tmp_path / "known.jsonl").read_bytes() == before and "report.html" in capsys.readouterr().out
    table = (tmp_path / "page/results.md").read_text()
    assert f"| {DEEP}, 24 layers |" in table and "48 layers" not in table
    drawn = {path.stem for path in (tmp_path / "page/figures").iterdir()}
    assert {"take", "gain-depth", "rate-depth", "tokens-adamw", "tokens-muon", "basin"} <= drawn
    assert not drawn & {"gain-width", "gain-steps", "gain-tokens"}


def test_a_name_without_a_row_is_a_gap_of_an_intervals_chart():
    lines = [dict(name=name, mean=1.0, low=0.5, high=1.5, kind=name) for name in "ac"]
    chart = report.intervals(lines, "name", "mean", "low", "high", "kind", names=["a", "b", "c"], beside=False)
    drawn = json.dumps(chart.to_dict())
    assert '"domain": ["a", "b", "c"]' in drawn and "yOffset" not in drawn


def test_nothing_compared_draws_nothing(tmp_path):
    one = studies.load("map", "tiny")
    page = report.Page("empty")
    map_figures.draw(page, Results(one, {}))
    page.write(tmp_path / "report.html")
    assert not (tmp_path / "figures").exists() or not list((tmp_path / "figures").iterdir())
