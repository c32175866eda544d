"""The loop on two processes: it stops before an update that one of them would spoil, and clips logits as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from parallel_cases import Group, recipe, spawn
from safetensors.torch import load_file

from gnomon.models.transformer import MLP
from gnomon.run_folder import checkpoint_folders, read_metrics
from gnomon.series import over_depth
from gnomon.train import train
from gnomon.train.postmortem import NonFinite

# Starting processes takes seconds each, and on a busy machine minutes.
pytestmark = pytest.mark.timeout(900)

KINDS = ("ddp", "fsdp")
CLIPPED = {"optim.logit_clip": 0.5, "steps": 12, "model.bias": True, "model.qkv": "fused", "optim.lr": 0.1}


def poisoned(folder, kind, rank, how):
    """The second process's MLPs turn bad at the fourth step."""
    real, calls = MLP.forward, []

    def forward(self, x):
        y = real(self, x)
        calls.append(1)
        if rank == 1 and (folder / "checkpoints" / "step-00000002").exists() and len(calls) > 8:
            if how == "forward":
                return y * float("nan")
            if y.requires_grad:
                y.register_hook(lambda g: g * float("inf"))
        return y

    MLP.forward = forward
    try:
        train(recipe(steps=60, **{"parallel.strategy": kind, "parallel.async_save": False}), folder)
    except NonFinite as error:
        return str(error)
    finally:
        MLP.forward = real
    return None


def work(rank, world, barrier, folder):
    folder, found = Path(folder), {}
    with Group(rank, world, folder / "store"):
        for kind in KINDS:
            for how in ("forward", "backward"):
                found[kind, how] = poisoned(folder / f"{kind}-{how}", kind, rank, how)
            train(recipe("pre-norm", "none", **CLIPPED, **{"parallel.strategy": kind}), folder / f"clipped-{kind}")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("loop")


@pytest.fixture(scope="module")
def answers(folder):
    return spawn(2, work, str(folder))


@pytest.mark.parametrize("how", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_process_finds_stops_all(folder, answers, kind, how):
    told = [found[kind, how] for found in answers]
    assert told[0] == told[1] and "before the update" in told[0]
    first = json.loads((folder / f"{kind}-{how}" / "postmortem.json").read_text())["first_bad"]
    assert first.startswith({"forward": "the output of 'blocks.0.mlp", "backward": "the gradient of 'blocks."}[how])
    newest = checkpoint_folders(folder / f"{kind}-{how}")[-1]
    assert all(t.isfinite().all() for t in load_file(newest / "model.safetensors").values())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_clipped_alike(folder, answers, kind):
    one = folder / "clipped-one"
    if not one.exists():
        train(recipe("pre-norm", "none", **CLIPPED), one)
        train(recipe("pre-norm", "none", **CLIPPED | {"optim.logit_clip": None}), folder / "free")
    a, b = (load_file(checkpoint_folders(f)[-1] / "model.safetensors") for f in (one, folder / f"clipped-{kind}"))
    name = "blocks.0.attention.qkv.weight"
    torch.testing.assert_close(a[name].norm(), b[name].norm(), rtol=0.02, atol=0)
    clipped, unclipped = (
        max(over_depth("attention_logit_max", read_metrics(folder / name)[-1]["attention_logit_max"]))
        for name in (f"clipped-{kind}", "free")
    )
    assert clipped < unclipped
