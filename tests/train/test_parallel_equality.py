"""One process, DDP and FSDP2 take the same steps, whatever joins the stream and whatever holds the weights.

In double precision, where only the order of sums differs.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from parallel_cases import Group, recipe, spawn, steps

from gnomon import residual
from gnomon.models.config import MODERN
from gnomon.train.distributed import Ranks

# Starting processes takes seconds each, and on a busy machine minutes.
pytestmark = pytest.mark.timeout(900)

HETERO = ("sphere", "hetero")
EXACT = {f"residual {name}": ((name,), {}) for name in residual.names()}
EXACT |= {f"on {name}": (("proj-spheret", name), {}) for name in ("none", "stiefel", "dgram", "hetero-inv", "sphere")}
EXACT |= {
    "fused, gated": (HETERO, {"model.qkv": "fused", "model.mlp": "swiglu"}),
    "untied, biases": (HETERO, {"model.tied": False, "model.bias": True}),
    "accumulated": (HETERO, {"data.accumulate": 2}),
    "recomputed": (HETERO, {"parallel.recompute": True}),
    "modern, anchored": (("sphere", "none"), {f"model.{key}": value for key, value in (MODERN | {"anchor": True}).items()}),
    "anchored, recomputed": (("pre-norm", "none"), {"model.anchor": True, "parallel.recompute": True}),
    "refined, ragged rows": (HETERO, {"optim.solver_steps": 1}),
}
ROUNDED = {
    "fp32": (HETERO, {}),
    "torch's Muon": (("pre-norm", "muon"), {"optim.lr": 0.02}),
    "bf16": (HETERO, {"compute.precision": "bf16", "model.qk_norm": True, "data.accumulate": 2}),
}
# Four processes: most steps of shape (1,) lie on one, 257 rows do not divide, some own no matrix.
FOUR = {
    "fused": (HETERO, {"model.qkv": "fused", "model.layers": 1}),
    "split": (("pre-norm", "hetero"), {"data.accumulate": 2}),
}
CASES = EXACT | ROUNDED | {f"{name}, four": case for name, case in FOUR.items()}


def take(name, ranks):
    arguments, changes = CASES[name]
    return steps(recipe(*arguments, **changes), ranks, count=2, double=name not in ROUNDED, ragged="ragged" in name)


def work(rank, world, barrier, folder):
    found = {}
    for size, names in ((2, [*EXACT, *ROUNDED]), (4, [f"{name}, four" for name in FOUR])):
        with Group(rank, size, Path(folder) / f"store.{size}") as member:
            if member:
                found |= {(name, kind): take(name, Ranks(rank, size, kind)) for name in names for kind in ("ddp", "fsdp")}
            barrier.wait()
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return spawn(4, work, str(tmp_path_factory.mktemp("equality")))


@functools.cache
def alone(name):
    """What one process comes to, and where it starts."""
    arguments, changes = CASES[name]
    return take(name, Ranks()), steps(recipe(*arguments, **changes), count=0)["end"]


def furthest(a, b):
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in b)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(answers, name, kind):
    members = [found[name, kind] for found in answers if (name, kind) in found]
    assert len(members) == (4 if name.endswith("four") else 2)
    (one, start), first = alone(name), members[0]
    weights, losses = {"torch's Muon": (5e-3, 1e-3), "bf16": (1e-2, 5e-3), "fp32": (5e-4, 1e-5)}.get(name, (1e-7, 2e-6))
    assert first["end"].keys() == one["end"].keys()
    assert furthest(first["end"], one["end"]) < weights
    for (loss, norm), (expected, length) in zip(first["losses"], one["losses"]):
        assert loss == pytest.approx(expected, abs=losses) and norm == pytest.approx(length, rel=losses * 10)
    # The steps are a hundred times what is tolerated, at least.
    assert furthest(one["end"], start) > 100 * weights or name in ROUNDED
    for other in members[1:]:
        assert other["losses"] == first["losses"]
        assert all(torch.equal(other["end"][n], first["end"][n]) for n in first["end"])
        assert max(other["feasibility"].values(), default=0.0) < 1e-5
