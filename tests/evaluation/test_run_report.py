"""The page of a run, and the one that follows a run."""

from __future__ import annotations

import json
import threading

import pytest

from gnomon import UserError, evaluation

pytest.importorskip("altair")


def record(folder, steps):
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": s, "tokens": s, "seconds": s, "loss": 2 + 1 / s}) + "\n" for s in steps)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"name": "r", "steps": 6}))
    (tmp_path / "environment.json").write_text("{}")
    return tmp_path


def test_a_run_without_a_checkpoint_has_a_page_of_its_curves(run):
    record(run, [1, 2])
    html = evaluation.report_of(run).read_text("utf-8")
    assert "Training loss" in html and "Continuity of the weights" not in html and 'http-equiv="refresh"' not in html


def test_watching_writes_the_page_as_the_run_goes_on_and_ends_with_it(run):
    told = []
    watching = threading.Thread(target=lambda: told.append(evaluation.watch(run, seconds=0.05, tell=told.append)), daemon=True)
    watching.start()
    record(run, [1, 2, 3])
    page = run / "report.html"
    # The first page says where the run stands and loads itself again; the last does not.
    while not page.exists():
        assert watching.is_alive()
    html = page.read_text("utf-8")
    assert "at step 3 of 6" in html and '<meta http-equiv="refresh" content="1">' in html
    record(run, [4, 5, 6])
    watching.join(60)
    assert "refresh" not in page.read_text("utf-8").split("<style>")[0] and told[-1] == page and len(told) == 2


def test_the_run_of_another_trainer_is_followed_too(run):
    (run / "recipe.json").rename(run / "settings.json")
    (run / "settings.json").write_text("{}")
    record(run, [1, 2, 3])

    class Stop(Exception):
        pass

    def stop(line: str) -> None:
        raise Stop(line)

    with pytest.raises(Stop, match="until the run ends"):
        evaluation.watch(run, seconds=0.05, tell=stop)
    assert "at step 3;" in (run / "report.html").read_text("utf-8")


def test_watching_what_is_no_run_says_how_to_start_one(tmp_path):
    with pytest.raises(UserError, match="gnomon train --out"):
        evaluation.watch(tmp_path)
