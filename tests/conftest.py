"""What several test files need, made once."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The folder of a byte-level model after two steps on the embedded corpus. Nothing may write into it."""
    from gnomon.train import preset, replace, train

    folder = tmp_path_factory.mktemp("run") / "run"
    changes = {"model.layers": 1, "model.width": 16, "model.heads": 2, "model.context": 64, "data.batch": 2,
               "steps": 2, "watch.eval_tokens": 64, "watch.probe_tokens": 32, "compute.device": "cpu"}  # fmt: skip
    train(replace(preset("tiny"), changes), folder)
    return folder
