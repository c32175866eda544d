"""The file from which a study goes on elsewhere."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gnomon.errors import UserError
from gnomon.files import append_record
from gnomon.studies.outcomes import FILE, OutcomesFile, fingerprint, thinned
from gnomon.studies.results import curve
from gnomon.studies.study import Outcome, PlannedRun
from gnomon.train import preset, replace


def test_a_fingerprint_is_of_what_decides_the_result():
    base = preset("tiny")
    one = fingerprint(base)
    same = {"parallel.recompute": True, "compute.device": "cpu", "watch.log_every": 5, "watch.keep": 9, "name": "x"}
    assert fingerprint(replace(base, same)) == one
    for path, value in {"seed": 1, "optim.lr": 1e-3, "watch.eval_tokens": 64, "data.batch": 8, "model.width": 64}.items():
        assert fingerprint(replace(base, {path: value})) != one, path


def planned(seed: int) -> PlannedRun:
    recipe = replace(preset("tiny"), {"seed": seed})
    return PlannedRun("one", recipe.optim.lr, seed, recipe, (("optim.lr", 0.02),))


def test_what_is_remembered_is_known_again_and_a_cut_line_is_dropped(tmp_path):
    path = tmp_path / "deep" / FILE
    outcome = Outcome("learned", 1.5, 12.34, Path("gone"), ((10, 100, 2.0), (20, 200, 1.5)))
    first, second = planned(0), planned(1)
    OutcomesFile(path).remember(first, outcome)
    with open(path, "a") as cut:
        cut.write('{"fingerprint": "b", "val')
    file = OutcomesFile(path)
    assert len(file) == 1 and file.outcome(second, tmp_path) is None
    file.remember(second, Outcome("diverged", math.nan, 1.0, Path("gone")))
    file.remember(first, Outcome("learned", 9.0, 1.0, Path("gone")))
    again = OutcomesFile(path)
    found = again.outcome(first, tmp_path)
    assert (found.fate, found.value, found.seconds, found.points) == ("learned", 1.5, 12.3, outcome.points)
    assert found.folder == tmp_path and math.isnan(again.outcome(second, tmp_path).value)
    assert [json.loads(line)["trial"] for line in path.read_text().splitlines()] == [{"optim.lr": 0.02}] * 2


def test_series_that_a_study_keeps_are_read_where_the_run_is_not(tmp_path):
    folder = tmp_path / "run"
    for step in range(0, 400, 10):
        probed = {"sigma_max": {"text.0.key": 1 + step / 3}} if step % 100 == 0 else {}
        append_record(folder / "metrics.jsonl", {"step": step, "grad_norm": 0.123456, **probed})
    points = ((0, 0, 3.0), (390, 390, 2.0))
    OutcomesFile(tmp_path / FILE).remember(planned(0), Outcome("learned", 2.0, 1.0, folder, points), ("sigma_max", "grad_norm"))
    found = OutcomesFile(tmp_path / FILE).outcome(planned(0), tmp_path / "elsewhere")
    assert [record["step"] for record in found.records] == [0, 100, 200, 300]
    assert found.records[1] == {"step": 100, "sigma_max": {"text.0.key": 34.33}, "grad_norm": 0.1235}
    assert [record["step"] for record in curve(found)] == [0, 0, 100, 200, 300, 390] and curve(found)[-1]["val_loss"] == 2.0


def test_a_bad_line_in_the_middle_is_told(tmp_path):
    path = tmp_path / FILE
    path.write_text('{"value": 1}\n{"fingerprint": "a"}\n')
    with pytest.raises(UserError, match="line 1"):
        OutcomesFile(path)


def test_curves_keep_both_ends():
    points = [(step, 1 / step) for step in range(1, 101)]
    thin = thinned(points)
    assert len(thin) == 12 and thin[0] == points[0] and thin[-1] == points[-1]
    assert thinned(points[:5]) == points[:5]
