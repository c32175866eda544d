"""Sinks get every record, and none of them can stop a run."""

from __future__ import annotations

import json
import sys

import pytest

from gnomon.errors import UserError
from gnomon.run_folder import read_metrics
from gnomon.train import preset, replace, to_dict, train
from gnomon.train.sinks import SINKS, Sinks, scalars

RECIPE = replace(
    preset("tiny"),
    {"model.layers": 1, "model.width": 16, "model.heads": 2, "model.context": 16, "data.batch": 2, "steps": 6,
     "watch.eval_tokens": 64, "watch.probe_tokens": 32, "watch.save_every": 3, "compute.device": "cpu"},
)  # fmt: skip

# Stands for wandb and trackio: module functions, a run object, and a file of all calls.
FAKE = """
import json, os
def _note(*call):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(call) + "\\n")
    if os.environ.get("FAIL") == call[0]:
        raise ConnectionError("no route")
class Run:
    def log(self, metrics, step=None): _note("log", step, metrics)
    def finish(self): _note("finish")
def init(**settings):
    _note("init", settings)
    return Run()
def log(metrics, step=None): Run().log(metrics, step)
def finish(): Run().finish()
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Fake packages on the path; returns what they were called with."""
    for name in ("wandb", "trackio"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text(FAKE)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    yield lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_clients_get_settings_numbers_and_the_end(tmp_path, fakes, name, monkeypatch):
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    train(RECIPE, tmp_path / "run", sinks=[name])
    (first, settings), *logs, last = fakes()
    assert first == "init" and last == ["finish"]
    assert (settings["project"], settings["name"], settings["resume"]) == ("mine", "run", "allow")
    assert settings["config"]["model"]["width"] == 16
    records = read_metrics(tmp_path / "run")
    assert [step for _, step, _ in logs] == [record["step"] for record in records] == list(range(7))
    assert [numbers.get("loss") for _, _, numbers in logs] == [record.get("loss") for record in records]
    assert "val_loss" in logs[-1][2] and any("/0" in key for key in logs[-1][2])


def test_a_resumed_wandb_run_keeps_its_id(tmp_path, fakes):
    for _ in range(2):
        Sinks(["wandb"], tmp_path, to_dict(RECIPE)).close()
    ids = [call[1]["id"] for call in fakes() if call[0] == "init"]
    assert len(ids) == 2 and ids[0] == ids[1]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_failing_sink_is_told_once_and_stops_nothing(tmp_path, fakes, call, monkeypatch, capsys):
    monkeypatch.setenv("FAIL", call)
    record = train(RECIPE, tmp_path / "run", sinks=["wandb", "tensorboard"] if _tensorboard() else ["wandb"])
    assert record["step"] == 6 and len(read_metrics(tmp_path / "run")) == 7
    told = [line for line in capsys.readouterr().err.splitlines() if "the sink" in line]
    assert len(told) == 1 and "'wandb' failed" in told[0] and "no route" in told[0]
    assert [each[0] for each in fakes()].count(call) == 1
    if _tensorboard():
        assert len(_events(tmp_path / "run")["loss"]) == 6


def test_unknown_and_missing_sinks_are_told_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="Did you mean 'wandb'"):
        train(RECIPE, tmp_path / "run", sinks=["wandbb"])
    monkeypatch.setattr(SINKS["wandb"], "package", "no_such_package_here")
    with pytest.raises(UserError, match="pip install no_such_package_here"):
        train(RECIPE, tmp_path / "run", sinks=["wandb"])
    assert not (tmp_path / "run").exists()


def test_a_sink_of_ones_own(tmp_path, monkeypatch):
    steps = []

    class Mine:
        def __init__(self, folder, settings, step):
            steps.append((folder.name, settings["steps"], step))

        def write(self, record):
            steps.append(record["step"])

        def close(self):
            steps.append("closed")

    monkeypatch.setitem(SINKS, "mine", Mine)
    train(RECIPE, tmp_path / "run", sinks=["mine"])
    assert steps == [("run", 6, -1), 0, 1, 2, 3, 4, 5, 6, "closed"]


def test_scalars_are_the_finite_numbers_by_path():
    record = {"step": 3, "a": 1, "b": [1.5, None, {"c": 2.0}], "d": {"e": float("nan"), "f": "text", "g": True}}
    assert dict(scalars(record)) == {"a": 1.0, "b/0": 1.5, "b/2/c": 2.0}


def _tensorboard() -> bool:
    import importlib.util

    return importlib.util.find_spec("tensorboard") is not None


def _events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_curves_and_a_resumed_run_replaces_what_was_lost(tmp_path):
    pytest.importorskip("tensorboard")
    folder = tmp_path / "run"
    train(RECIPE, folder, sinks=["tensorboard"])
    # As after kill -9 between step 3, saved, and the end.
    import shutil

    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    train(RECIPE, folder, sinks=["tensorboard"])
    wanted = {record["step"]: record["loss"] for record in read_metrics(folder)[1:]}
    assert _events(folder)["loss"] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in wanted.items()]
