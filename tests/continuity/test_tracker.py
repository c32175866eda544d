"""The tracker's series against plain SVDs of the same tensors, around an ordinary training loop."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gnomon.continuity import Tracker
from gnomon.errors import UserError
from gnomon.models.mlp import MLPConfig, ResidualMLP


def tiny(layers=4, width=24):
    torch.manual_seed(0)
    return ResidualMLP(MLPConfig(layers=layers, width=width, inputs=10, outputs=3))


def train(model, tracker, steps, seed=0):
    g = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    records, sums, grads = {}, {}, {}
    for step in range(steps):
        x, y = torch.randn(32, 10, generator=g), torch.randint(3, (32,), generator=g)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        tracker.before_step(step)
        for name, p in model.named_parameters():
            sums[name] = sums.get(name, 0) + p.grad.detach().double()
            grads[name] = p.grad.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        if record := tracker.after_step(step):
            records[step] = record, {k: v.clone() for k, v in grads.items()}, dict(sums), dict(weights(model))
    return records


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def hidden(model):
    return [name for name, p in model.named_parameters() if p.shape == (24, 24)]


def v1(W, side="v"):
    U, _, V = torch.linalg.svd(W.double())
    return V[0] if side == "v" else U[:, 0]


def test_every_series_is_what_it_says():
    model = tiny()
    start, names = weights(model), hidden(model)
    tracker = Tracker(model, every=3)
    records = train(model, tracker, 7)
    assert list(records) == [0, 3, 6]
    first = {name: v1(records[0][3][name]) for name in names}
    for record, grads, sums, now in records.values():
        for series, tensors in (("gradient", grads), ("accumulated", sums), ("weight", now)):
            for side in "vu":
                got = record[f"{series}_{side}1"]
                assert len(got) == 3
                for (_, value), a, b in zip(got.items(), names, names[1:]):
                    expected = abs(float(v1(tensors[a], side) @ v1(tensors[b], side)))
                    assert value == pytest.approx(expected, abs=2e-3), (series, side)
        for key, value in record["delta_gw_v1"].items():
            assert value == pytest.approx(record["accumulated_v1"][key] - record["weight_v1"][key], abs=1e-5)
        for value, name in zip(record["change"].values(), names):
            assert value == pytest.approx(float((now[name] - start[name]).norm() / start[name].norm()), rel=1e-3)
        for value, name in zip(record["turn_v1"].values(), names):
            cosine = min(abs(float(v1(now[name]) @ first[name])), 1.0)
            assert value == pytest.approx(math.degrees(math.acos(cosine)), abs=0.3)
        json.dumps(record, allow_nan=False)
    assert max(records[0][0]["turn_v1"].values()) < 0.05 < max(records[6][0]["turn_v1"].values())


def test_between_measurements_nothing_is_returned_or_measured(monkeypatch):
    from gnomon.geometry import subspace

    model, calls = tiny(), []
    plain = subspace.leading
    monkeypatch.setattr(subspace, "leading", lambda *a, **k: calls.append(1) or plain(*a, **k))
    tracker = Tracker(model, every=10)
    assert list(train(model, tracker, 10)) == [0]
    assert len(calls) == 3 * 4  # gradients, their sum, weights; four matrices
    assert tracker.after_step(9) == {}


def test_a_resumed_run_goes_on_with_the_same_series():
    whole = tiny()
    expected = train(whole, Tracker(whole, every=1), 4)[3][0]
    model = tiny()
    tracker = Tracker(model, every=1)
    g = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(4):
        if step == 2:
            state = tracker.state_dict()
            tracker = Tracker(model, every=1)
            tracker.load_state_dict(state)
        x, y = torch.randn(32, 10, generator=g), torch.randint(3, (32,), generator=g)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        tracker.before_step(step)
        optimizer.step()
        optimizer.zero_grad()
        record = tracker.after_step(step)
    assert record.keys() == expected.keys()
    for key, series in expected.items():
        assert record[key] == pytest.approx(series, abs=1e-4), key


def test_without_sums_and_with_missing_gradients():
    model = tiny()
    tracker = Tracker(model, every=1, accumulate=False)
    record = train(model, tracker, 1)[0][0]
    assert "accumulated_v1" not in record and "delta_gw_v1" not in record and "gradient_v1" in record
    tracker.before_step(1)  # no gradients at all, as after zero_grad
    assert "gradient_v1" not in tracker.after_step(1)


def test_a_zero_or_broken_matrix_is_left_out():
    model = tiny()
    names = hidden(model)
    with torch.no_grad():
        model.get_parameter(names[1]).zero_()
        model.get_parameter(names[3])[0, 0] = math.nan
    record = Tracker(model, every=1).after_step(0)
    assert "weight_v1" not in record
    assert len(record["turn_v1"]) == 2


_SHARDED = """
import os, sys, torch, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2], RANK=sys.argv[1], WORLD_SIZE="2")
dist.init_process_group("gloo")
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, sys.argv[3])
from test_tracker import Tracker, tiny, train
plain, sharded = tiny(), fully_shard(tiny())
one = Tracker(plain, every=1)
two = Tracker(sharded, every=1)
g = torch.Generator().manual_seed(0)
for step in range(3):
    if step == 2:
        state = two.state_dict()
        two = Tracker(sharded, every=1)
        two.load_state_dict(state)
    x, y = torch.randn(32, 10, generator=g), torch.randint(3, (32,), generator=g)
    records = []
    for model, tracker in ((plain, one), (sharded, two)):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        tracker.before_step(step)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.3 * p.grad
        model.zero_grad()
        records.append(tracker.after_step(step))
assert records[0].keys() == records[1].keys()
for key, series in records[0].items():
    for name, value in series.items():
        assert abs(value - records[1][key][name]) < 1e-4, (key, name)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_sharded_model_gives_the_same():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", _SHARDED]
    processes = [subprocess.Popen([*command, str(rank), port, here]) for rank in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]


def test_arguments():
    with pytest.raises(UserError, match="roles found: linear"):
        Tracker(tiny(), roles=["query"])
    with pytest.raises(UserError, match="no neighbouring matrices"):
        Tracker(torch.nn.Linear(3, 3))
    with pytest.raises(UserError, match="at least 1"):
        Tracker(tiny(), every=0)
