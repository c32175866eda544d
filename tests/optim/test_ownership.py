"""ManifoldMuon over ranks: what travels to owners and back, whatever the shapes and the layout."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel_cases import Group, spawn

import gnomon
from gnomon import sharding
from gnomon.errors import UserError
from gnomon.optim import ManifoldMuon, ownership

# Starting processes takes seconds each, and on a busy machine minutes.
pytestmark = pytest.mark.timeout(900)

# Rows that do not divide by four, fewer rows than ranks (empty shards), fewer matrices than ranks (idle owners).
SHAPES = {"tall": (9, 4), "square": (3, 3), "wide": (2, 8)}
LAYOUTS = ("replicated", "by rows", "by columns")


def gradient(name, step):
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(step + 10 * list(SHAPES).index(name)))


def laid_out(tensor, layout):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    if layout == "replicated" or not dist.is_initialized():
        return tensor.clone()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor, mesh, [Shard(0 if layout == "by rows" else 1)])


def run(layout="replicated", dtype=torch.float64, missing=None):
    """Three steps of three matrices; `missing` (rank, name) has no gradient at the second."""
    named = {}
    for name, shape in SHAPES.items():
        start = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64).to(dtype)
        named[name] = torch.nn.Parameter(laid_out(start, layout))
    optimizer = ManifoldMuon([{"params": list(named.items()), "manifold": gnomon.DGram()}], lr=0.1, steps=1)
    for step in range(3):
        for name, p in named.items():
            p.grad = laid_out(gradient(name, step).to(dtype), layout)
        if missing is not None and step == 1:
            where, name = missing
            if where is None or where == ownership.rank():
                named[name].grad = None
        optimizer.step()
    state = {n: optimizer.state[p] for n, p in named.items()}
    return (
        {n: sharding.whole(p).detach().clone() for n, p in named.items()},
        {n: sharding.whole(s["momentum"]).clone() for n, s in state.items()},
    )


def refused(layout):
    """What is said of a gradient that is not finite on the last rank alone; None unless the weight is as it was."""
    W = torch.nn.Parameter(laid_out(torch.eye(8), layout))
    optimizer = ManifoldMuon([{"params": [("W", W)], "manifold": gnomon.Stiefel()}])
    W.grad, before = laid_out(torch.ones(8, 8), layout), sharding.whole(W).clone()
    if ownership.rank() == dist.get_world_size() - 1:
        sharding.local(W.grad).fill_(float("nan"))
    try:
        optimizer.step()
    except UserError as error:
        return str(error) if torch.equal(sharding.whole(W), before) else None
    return None


def resumed(layout):
    """bf16 weights stepped three times, with the optimizer saved, made anew and loaded after the second."""
    start = gnomon.DGram().random(9, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    W, made = torch.nn.Parameter(laid_out(start, layout)), []
    for step in range(3):
        if step in (0, 2):
            state = copy.deepcopy(made[0].state_dict()) if made else None
            made = [ManifoldMuon([{"params": [("W", W)], "manifold": "dgram"}], lr=0.003, steps=1)]
            if state is not None:
                made[0].load_state_dict(state)
        W.grad = laid_out(gradient("tall", step).bfloat16(), layout)
        made[0].step()
    kept = made[0].state[W]
    return sharding.whole(W), sharding.whole(kept["master"]), sharding.whole(kept["momentum"])


def work(rank, world, barrier, folder):
    with Group(rank, world, Path(folder) / "store"):
        found = {layout: run(layout) for layout in LAYOUTS}
        found |= {("bf16", layout): run(layout, torch.bfloat16) for layout in LAYOUTS}
        found["missing here"] = run(missing=(0, "tall"))
        found["missing everywhere"] = run("by rows", missing=(None, "tall"))
        found["resumed"] = [resumed(layout) for layout in LAYOUTS]
        found["bad gradients"] = [refused(layout) for layout in LAYOUTS]
        chosen = ownership.owners([1, 1, 1], 4)
        tensors = [laid_out(gradient(name, 0), layout) for name, layout in zip(SHAPES, LAYOUTS)]
        mine = ownership.to_owners(tensors, chosen)
        found["to owners"] = [t is not None for t in mine] == [owner == rank for owner in chosen]
        found["whole"] = all(torch.equal(t, gradient(n, 0)) for n, t in zip(SHAPES, mine) if t is not None)
        ownership.from_owners(tensors, [None if t is None else t + 1 for t in mine], chosen)
        back = [sharding.whole(t) for t in tensors]
        found["back"] = all(torch.equal(t, gradient(n, 0) + 1) for n, t in zip(SHAPES, back))
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return spawn(4, work, str(tmp_path_factory.mktemp("optimizer")))


def same(a, b, tolerance=0.0):
    return all(float((a[n].double() - b[n].double()).abs().max()) <= tolerance for n in b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_steps_as_one_process(answers, layout):
    weights, momenta = run()
    for found in answers:
        assert same(found[layout][0], weights, 1e-12) and same(found[layout][1], momenta, 1e-12)
        assert all(gnomon.DGram().violation(W) < 1e-6 for W in found[layout][0].values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masters_of_bf16_weights_travel_in_fp32(answers, layout):
    weights, _ = run(dtype=torch.bfloat16)
    for found in answers:
        assert same(found["bf16", layout][0], weights) and found["bf16", layout][0]["tall"].dtype == torch.bfloat16


def test_a_gradient_that_one_rank_lacks_comes_from_another(answers):
    weights, momenta = run()
    for found in answers:
        assert same(found["missing here"][0], weights, 1e-12) and same(found["missing here"][1], momenta, 1e-12)


def test_a_gradient_that_all_lack_leaves_the_weight(answers):
    weights, momenta = run(missing=(None, "tall"))
    for found in answers:
        assert same(found["missing everywhere"][0], weights, 1e-12)
        assert same(found["missing everywhere"][1], momenta, 1e-12)
    assert not same(weights, run()[0], 1e-3)


def test_a_bad_gradient_on_one_rank_stops_all(answers):
    for rank, found in enumerate(answers):
        assert all(said is not None for said in found["bad gradients"])
        where = "the gradient of W is" if rank == len(answers) - 1 else f"a gradient on process {len(answers) - 1} is"
        assert all(said.startswith(where) for said in found["bad gradients"]), found["bad gradients"]


def test_sharded_bf16_weights_resume_in_fp32(answers):
    weight, master, momentum = resumed("replicated")
    assert master.dtype == momentum.dtype == torch.float32
    for found in answers:
        for there in found["resumed"]:
            assert torch.equal(there[0], weight) and torch.equal(there[1], master) and torch.equal(there[2], momentum)


def test_owners_balance_cost():
    costs = [9, 7, 6, 5, 4, 3, 2, 1]
    chosen = ownership.owners(costs, 3)
    loads = [sum(c for c, o in zip(costs, chosen) if o == rank) for rank in range(3)]
    assert sum(loads) == sum(costs) and max(loads) - min(loads) <= 2
    assert ownership.owners(costs, 3) == chosen and ownership.owners([1], 3) == [0]


def test_there_and_back(answers):
    assert all(found["to owners"] and found["whole"] and found["back"] for found in answers)
