"""What several test files need, made once."""

from __future__ import annotations

import os

import hypothesis
import pytest

# How long an example takes says something of the machine and nothing of the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Models of a few thousand weights are done before a second thread is awake. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The folder of a byte-level model after two steps on the embedded corpus. Nothing may write into it."""
    from gnomon.train import preset, replace, train

    folder = tmp_path_factory.mktemp("run") / "run"
    changes = {"model.layers": 1, "model.width": 16, "model.heads": 2, "model.context": 64, "data.batch": 2,
               "steps": 2, "watch.eval_tokens": 64, "watch.probe_tokens": 32, "compute.device": "cpu"}  # fmt: skip
    train(replace(preset("tiny"), changes), folder)
    return folder


@pytest.fixture
def no_report(monkeypatch):
    """`gnomon train` ends without drawing the page of the run, which takes longer than a small run itself."""
    monkeypatch.setattr("gnomon.evaluation.report_of", lambda folder: folder / "report.html")
