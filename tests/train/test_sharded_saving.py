"""Checkpoints of several processes: any number and any strategy goes on from them; damage is told; failures leave the old."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from parallel_cases import Group, recipe, spawn
from safetensors.torch import load_file

from gnomon import sharding
from gnomon.errors import UserError
from gnomon.models import Transformer
from gnomon.monitor import Monitor
from gnomon.report.runs import numbers
from gnomon.run_folder import checkpoint_folders, read_metrics
from gnomon.train import checkpoint_layout, loop, optimizer, replace, saving, sharded_saving, train
from gnomon.train.distributed import Ranks, parallelise

# Starting processes takes seconds each, and on a busy machine minutes.
pytestmark = pytest.mark.timeout(900)

SETTINGS = recipe("sphere", "hetero", steps=10, **{"watch.track_every": 5, "model.qkv": "fused", "model.mlp": "swiglu"})
# (processes, strategy, the step at which they are gone); every second step is saved.
STAGES = ((2, "fsdp", 4), (1, "none", 6), (4, "fsdp", 8), (2, "ddp", None))
LAYOUTS = ((1, "none"), (2, "ddp"), (2, "fsdp"), (4, "fsdp"))


class Gone(Exception):
    pass


def run(folder, strategy, until=None):
    """Train until a step, from 0, at which the process is gone."""
    real = loop.data.batch

    def batch(*args, step, **kwargs):
        if step == until:
            raise Gone
        return real(*args, step=step, **kwargs)

    loop.data.batch = batch
    try:
        return train(replace(SETTINGS, {"parallel.strategy": strategy}), folder)
    except Gone:
        return None
    finally:
        loop.data.batch = real


def loaded(folder, ranks):
    """Everything a resumed run has, whole."""
    torch.manual_seed(99)
    model = Transformer(SETTINGS.model)
    parallelise(model, SETTINGS, ranks)
    optim = optimizer.build(model, SETTINGS.optim)
    monitor = Monitor(model, 0, track_every=5, accumulate=True)
    progress = saving.resume(Path(folder), model, optim, monitor, ranks)
    found = {f"weight {n}": sharding.whole(p) for n, p in model.named_parameters()}
    found |= {
        f"{key} {n}": sharding.whole(value)
        for n, p in model.named_parameters()
        for key, value in optim.state[p].items()
    }
    found |= {f"monitor {n}": x for n, x in checkpoint_layout.flat(monitor).items()}
    found["counts"] = torch.tensor([group.get("step", 0) for group in optim.param_groups])
    return progress, {name: x.detach().clone() for name, x in found.items()}


def work(rank, world, barrier, folder):
    folder, found = Path(folder), {}
    for number, (size, strategy, until) in enumerate(STAGES):
        with Group(rank, size, folder / f"stage.{number}") as member:
            if member:
                found["last"] = run(folder / "run", strategy, until)
                found["files"] = sorted(p.name for p in (folder / "run" / "checkpoints").iterdir())
        barrier.wait()
        if number == 0 and rank == 0:
            shutil.copytree(folder / "run", folder / "sharded", symlinks=True)
        barrier.wait()
    for size, kind in LAYOUTS:
        with Group(rank, size, folder / f"load.{size}.{kind}") as member:
            if member:
                ranks = Ranks(rank, size, kind)
                found["loaded", size, kind] = [loaded(folder / name, ranks) for name in ("sharded", "single")]
        barrier.wait()
    with Group(rank, 2, folder / "damaged.store") as member:
        if member:
            found["told"] = []
            for name in ("flipped", "missing"):
                try:
                    loaded(folder / "damaged" / name, Ranks(rank, 2, "ddp"))
                except UserError as error:
                    found["told"].append(str(error))
    barrier.wait()
    with Group(rank, 2, folder / "full.store") as member:
        if member:
            found["full disk"] = full_disk(folder / "full", rank)
    return found


def full_disk(folder, rank):
    """The second process cannot write the second checkpoint; both learn of it, and the first stays."""
    real, calls = sharded_saving._Writer.write_data, []

    def write_data(self, plan, planner):
        calls.append(plan)
        if rank == 1 and len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(self, plan, planner)

    sharded_saving._Writer.write_data = write_data
    try:
        run(folder, "ddp")
    except UserError as error:
        return repr(error), [p.name for p in checkpoint_folders(folder)]
    finally:
        sharded_saving._Writer.write_data = real
    return None


def damaged(folder, one):
    """Copies of a finished run whose newest checkpoint has another byte in a shard, or lacks one."""
    for name in ("flipped", "missing"):
        shutil.copytree(one, folder / "damaged" / name, symlinks=True)
        newest = checkpoint_folders(folder / "damaged" / name)[-1]
        file = newest / "optimizer.safetensors"
        if name == "missing":
            file.unlink()
        else:
            held = bytearray(file.read_bytes())
            held[-5] ^= 1
            file.write_bytes(held)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    train(SETTINGS, folder / "whole")
    run(folder / "single", "none", 5)
    damaged(folder, folder / "whole")
    (folder / "answers").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    return spawn(4, work, str(folder))


def test_a_run_goes_on_with_other_numbers_and_strategies(folder, answers):
    whole, parts = read_metrics(folder / "whole"), read_metrics(folder / "run")
    assert [m["step"] for m in parts] == list(range(11))
    for a, b in zip(whole, parts):
        if a["step"]:
            assert b["loss"] == pytest.approx(a["loss"], abs=1e-4) and b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
        for key in ("val_loss", "change", "step_size", "feasibility", "stream_norm", "attention_logit_max"):
            assert (key in a) == (key in b)
            if key in a:
                assert numbers(b[key]) == pytest.approx(numbers(a[key]), rel=1e-3, abs=1e-4), (key, a["step"])
    one, other = (load_file(checkpoint_folders(folder / n)[-1] / "model.safetensors") for n in ("whole", "run"))
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=0, atol=5e-4)
    assert answers[0]["last"]["loss"] == answers[1]["last"]["loss"] == parts[-1]["loss"]
    environment = json.loads((folder / "run" / "environment.json").read_text())
    assert (environment["processes"], environment["strategy"]) == (2, "ddp")


def test_what_is_there_at_the_end(folder, answers):
    assert answers[0]["files"] == ["latest", "step-00000006", "step-00000008", "step-00000010"]
    newest = (folder / "run" / "checkpoints" / "latest").resolve()
    assert newest.name == "step-00000010" and {p.name for p in newest.iterdir()} == {
        "model.safetensors", "config.json", "state.json", "fingerprints.json", "shards",
    }  # fmt: skip
    assert len(list((newest / "shards").iterdir())) == 2 and checkpoint_layout.damage(newest) is None
    model = Transformer(checkpoint_layout.load_config(newest))
    checkpoint_layout.load_weights(model, newest)


@pytest.mark.parametrize("number, source", enumerate(["sharded", "single"]))
@pytest.mark.parametrize("size, kind", LAYOUTS)
def test_every_layout_loads_the_same_bits(folder, answers, size, kind, number, source):
    progress, expected = answers[0]["loaded", 1, "none"][number]
    assert progress["step"] == 4
    newest = checkpoint_folders(folder / source)[-1]
    for name, tensor in load_file(newest / "model.safetensors").items():
        assert torch.equal(expected[f"weight {name}"], tensor)
    assert any(name.startswith("momentum") for name in expected) and any("monitor sum" in name for name in expected)
    for found in answers[:size]:
        got = found["loaded", size, kind][number]
        assert got[0] == progress and got[1].keys() == expected.keys()
        assert all(torch.equal(got[1][name], expected[name]) for name in expected)


def test_damage_is_told_by_all_with_the_way_back(answers):
    for found in answers[:2]:
        flipped, missing = found["told"]
        assert "holds other bytes" in flipped and "optimizer.safetensors is missing" in missing
        assert "step-00000008 is whole" in flipped and "remove" in flipped


def test_damaged_shards_are_told(folder, answers):
    newest = checkpoint_folders(folder / "sharded")[-1]
    for file in (newest / "shards").iterdir():
        held = file.read_bytes()
        file.write_bytes(held[:-9])
        assert "were written" in checkpoint_layout.damage(newest) and file.name in checkpoint_layout.damage(newest)
        file.write_bytes(held)
    assert checkpoint_layout.damage(newest) is None


def test_a_full_disk_in_one_process_stops_all_and_keeps_the_last(answers):
    for found in answers[:2]:
        error, left = found["full disk"]
        assert "No space left" in error and left == ["step-00000002"]
