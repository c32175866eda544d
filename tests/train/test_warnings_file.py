"""Warnings of a run go to its folder when they begin, and say the same after it was resumed."""

from __future__ import annotations

import json

from gnomon.diagnosis import diagnose
from gnomon.run_folder import WARNINGS, read_metrics
from gnomon.train.run_writer import Metrics


def record(step: int, coherence: float) -> dict:
    return {"step": step, "loss": 2.0, "stream_coherence": {"text.0.attention": coherence}}


def lines(folder) -> list[tuple[str, int]]:
    file = folder / WARNINGS
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(one["rule"], one["step"]) for one in found]


def test_warnings_are_written_when_they_begin(tmp_path):
    metrics = Metrics(tmp_path, 0)
    course = ((1, 0.3), (2, 0.99), (3, 0.99), (4, 0.99))
    begun = [[one.rule for one in metrics.write(record(step, coherence))] for step, coherence in course]
    assert begun == [[], [], ["collapse"], []] and lines(tmp_path) == [("collapse", 3)]
    assert [one.rule for one in metrics.diagnosis.holding] == ["collapse"]
    metrics.close()
    assert [(one.rule, one.step) for one in diagnose(read_metrics(tmp_path))] == lines(tmp_path)


def test_a_resumed_run_drops_the_warnings_of_records_that_are_gone(tmp_path):
    metrics = Metrics(tmp_path, 0)
    for step in range(1, 6):
        metrics.write(record(step, 0.99))
    metrics.close()
    # Going on after step 1: the second record in a row is still to come.
    again = Metrics(tmp_path, 1)
    assert lines(tmp_path) == []
    assert [one.step for one in again.write(record(2, 0.99))] == [2] and lines(tmp_path) == [("collapse", 2)]
    again.close()
    Metrics(tmp_path, 2).close()
    assert lines(tmp_path) == [("collapse", 2)]


def test_only_the_process_that_writes_does(tmp_path):
    metrics = Metrics(tmp_path, 0, writes=False)
    assert [len(metrics.write(record(step, 0.99))) for step in (1, 2, 3)] == [0, 1, 0]
    metrics.close()
    assert list(tmp_path.iterdir()) == []
