"""The file from which a study goes on elsewhere."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gnomon.errors import UserError
from gnomon.studies.outcomes import FILE, OutcomesFile, fingerprint, thinned
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
