"""A run folder from a loop of one's own: records, warnings, sinks, resuming; and nothing of the run is changed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from gnomon import report
from gnomon.errors import UserError
from gnomon.files import write_json
from gnomon.integrations import Recorder
from gnomon.models import Transformer, tiny
from gnomon.run_folder import SETTINGS, WARNINGS, read_metrics
from gnomon.train import preset, to_dict

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loop(folder, first: int = 1, last: int = 6, **options) -> list[float]:
    """A few steps of a tiny model; returns its losses. Without a folder nothing is recorded."""
    torch.manual_seed(0)
    model = Transformer(tiny(layers=2, width=16, heads=2, context=16))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    recorder = Recorder(model, folder, every=3, log_every=2, **options) if folder else None
    losses = []
    for step in range(first, last + 1):
        tokens = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(step))
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        if recorder:
            recorder.before_step(step)
        optimizer.step()
        losses.append(loss.item())
        if recorder:
            recorder.after_step(step, loss=loss, lr=1e-3, val_loss=None)
    if recorder:
        recorder.close()
    return losses


def test_records_are_written_where_due_and_the_run_is_the_same(tmp_path):
    losses = loop(tmp_path / "run", settings={"lr": 1e-3})
    assert losses == loop(None)
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [2, 3, 4, 6]
    assert [record["loss"] for record in records] == [losses[1], losses[2], losses[3], losses[5]]
    measured = {record["step"]: "angle" in record and "update" in record for record in records}
    assert measured == {2: False, 3: True, 4: False, 6: True}
    assert all("val_loss" not in record for record in records)
    assert json.loads((tmp_path / "run" / SETTINGS).read_text()) == {"lr": 1e-3}


def test_a_run_that_goes_on_keeps_what_was_before(tmp_path):
    loop(tmp_path / "run")
    loop(tmp_path / "run", first=4, last=8, step=3)
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [2, 3, 4, 6, 8]


def test_processes_other_than_the_first_write_nothing(tmp_path):
    loop(tmp_path / "run", writes=False)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_gnomon_train_and_a_sink_that_is_none_are_refused(tmp_path):
    write_json(tmp_path / "run" / "recipe.json", to_dict(preset("tiny")))
    with pytest.raises(UserError, match="another folder"):
        loop(tmp_path / "run")
    with pytest.raises(UserError, match="Did you mean 'tensorboard'"):
        loop(tmp_path / "other", sinks=["tensorbord"])
    assert not (tmp_path / "other").exists()


def test_sinks_get_the_records(tmp_path, monkeypatch):
    from gnomon.train import sinks

    got = []

    class Mine:
        def __init__(self, folder, settings, step):
            got.append((folder.name, settings, step))

        def write(self, record):
            got.append(record["step"])

        def close(self):
            got.append("closed")

    monkeypatch.setitem(sinks.SINKS, "mine", Mine)
    loop(tmp_path / "run", sinks=["mine"], settings={"a": 1})
    assert got == [("run", {"a": 1}, 0), 2, 3, 4, 6, "closed"]


def test_the_example_warns_before_it_is_too_late(tmp_path, capsys):
    """At a hundred times the rate the logits saturate within a few dozen steps."""
    told = example("monitor_plain_loop").main(steps=60, out=str(tmp_path / "run"))
    rules = [one.rule for one in told if one.level == "warning"]
    assert "saturation" in rules
    lines = [json.loads(line) for line in (tmp_path / "run" / WARNINGS).read_text().splitlines()]
    assert [(line["rule"], line["step"]) for line in lines] == [(one.rule, one.step) for one in told]
    assert "What to do" in capsys.readouterr().out
    # Read like any run, with its settings and its warnings.
    (run,) = report.read_runs([tmp_path / "run"])
    assert run.recipe == {"lr": 0.1} and {one.rule for one in run.warnings} == {one.rule for one in told}
    assert report.summary(run)["first_warning"] == next(f"{one.rule}, step {one.step}" for one in told if one.level == "warning")
