"""The file from which a study goes on elsewhere."""

from __future__ import annotations

import json
import math

import pytest

from gnomon.errors import UserError
from gnomon.studies import outcomes
from gnomon.train import preset, replace, to_dict


def test_a_fingerprint_is_of_what_decides_the_result():
    base = preset("tiny")
    one = outcomes.fingerprint(to_dict(base))
    same = {"parallel.recompute": True, "compute.device": "cpu", "watch.log_every": 5, "watch.keep": 9, "name": "x"}
    assert outcomes.fingerprint(to_dict(replace(base, same))) == one
    for path, value in {"seed": 1, "optim.lr": 1e-3, "watch.eval_tokens": 64, "data.batch": 8, "model.width": 64}.items():
        assert outcomes.fingerprint(to_dict(replace(base, {path: value}))) != one, path


def test_what_is_appended_is_read_back_and_a_cut_line_is_dropped(tmp_path):
    file = tmp_path / "deep" / outcomes.FILE
    assert outcomes.read(file) == {}
    outcomes.append(file, {"fingerprint": "a", "value": 1.5, "fate": "learned"})
    with open(file, "a") as cut:
        cut.write('{"fingerprint": "b", "val')
    assert set(outcomes.read(file)) == {"a"}
    outcomes.append(file, {"fingerprint": "c", "value": math.nan, "fate": "diverged"})
    outcomes.append(file, {"fingerprint": "a", "value": 1.25, "fate": "learned"})
    found = outcomes.read(file)
    assert set(found) == {"a", "c"} and found["a"]["value"] == 1.25 and math.isnan(found["c"]["value"])
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_a_bad_line_in_the_middle_is_told(tmp_path):
    file = tmp_path / outcomes.FILE
    file.write_text('{"value": 1}\n{"fingerprint": "a"}\n')
    with pytest.raises(UserError, match="line 1"):
        outcomes.read(file)


def test_curves_keep_both_ends():
    points = [(step, 1 / step) for step in range(1, 101)]
    thin = outcomes.thinned(points)
    assert len(thin) == 12 and thin[0] == points[0] and thin[-1] == points[-1]
    assert outcomes.thinned(points[:5]) == points[:5]
