"""What a run will take, against what it takes."""

from __future__ import annotations

import pytest
import torch

from gnomon.errors import UserError
from gnomon.models import Transformer
from gnomon.train import optimizer, preset, replace
from gnomon.train.estimate import estimate, table

SMALL = {"model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32, "data.batch": 4}


def recipe(residual="pre-norm", assignment="adamw", **changes):
    return replace(preset("tiny", residual, assignment), SMALL | changes)


def kept_by_autograd(settings) -> list[int]:
    model = Transformer(settings.model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = x
        return x

    x = torch.zeros(settings.data.batch, settings.model.context, dtype=torch.int64)
    bf16 = settings.compute.precision == "bf16"
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model.loss(x, x)
    assert loss.requires_grad
    return [x.untyped_storage().nbytes() for x in found.values()]


@pytest.mark.parametrize(
    "residual, precision, more",
    [
        ("pre-norm", "fp32", {}),
        ("proj-spheret", "bf16", {"model.layers": 7, "model.anchor": True}),
        ("pre-dyt", "fp32", {"model.layers": 1}),
    ],
)
def test_activations_are_those_of_a_real_pass(residual, precision, more):
    settings = recipe(residual, **{"compute.precision": precision, **more})
    kept = kept_by_autograd(settings)
    assert estimate(settings)["memory"]["activations"] == sum(kept) + max(kept)


@pytest.mark.parametrize("assignment", ["adamw", "muon", "hetero"])
def test_state_is_that_of_the_optimizer(assignment):
    settings = recipe(assignment=assignment)
    model = Transformer(settings.model)
    optim = optimizer.build(model, settings.optim)
    x = torch.zeros(2, 32, dtype=torch.int64)
    model.loss(x, x).backward()
    optim.step()
    state = sum(t.numel() for s in optim.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.ndim)
    assert estimate(settings)["memory"]["optimizer"] == 4 * state


def test_evaluations_and_probes_are_counted():
    """A forward pass is a third of a step: 64 tokens each evaluation, at steps 0, 4, 8 and the last."""
    quiet = recipe(**{"steps": 10, "watch.eval_every": 0, "watch.probe_every": 0, "watch.eval_tokens": 64, "watch.probe_tokens": 32})
    often = replace(quiet, {"watch.eval_every": 4})
    forward = quiet.model.flops_per_token / 3
    once, four_times = estimate(quiet)["watch_flops"], estimate(often)["watch_flops"]
    assert four_times - once == pytest.approx(3 * 64 * forward, rel=1e-6)
    matrices = 2 * 400 * 32**2 * (4 + 4 + 4)  # query, key, value, output; up and down are four times as wide
    assert once == pytest.approx(64 * forward + 1.4 * 32 * forward + matrices, rel=1e-6)
    assert estimate(often)["machines"][0]["run_seconds"] > estimate(quiet)["machines"][0]["run_seconds"]
    assert any(row["what"] == "evaluations, probes" for row in table(estimate(quiet)))


def test_sharing():
    one, ddp = estimate(recipe(assignment="hetero")), estimate(recipe(assignment="hetero"), 4)
    fsdp = estimate(recipe(assignment="hetero", **{"parallel.strategy": "fsdp"}), 4)
    P, M = one["parameters"], one["matrix_parameters"]
    assert (one["strategy"], ddp["strategy"], fsdp["strategy"]) == ("none", "ddp", "fsdp")
    assert one["communication"]["total"] == 0 and ddp["communication"]["gradients"] == 2 * 4 * P * 3 // 4
    assert ddp["communication"]["optimizer"] == 4 * M * 3 // 4
    assert ddp["memory"]["weights"] == 4 * fsdp["memory"]["weights"] == 4 * P
    assert ddp["optimizer_flops"] == one["optimizer_flops"] // 4 and ddp["flops_per_step"] == one["flops_per_step"]
    assert estimate(recipe(**{"data.accumulate": 2}))["memory"]["activations"] < one["memory"]["activations"]
    assert estimate(recipe(**{"parallel.recompute": True}))["memory"]["activations"] < one["memory"]["activations"]


def test_paper_scale_costs_no_memory_and_fits():
    found = estimate(preset("gpt2-large", "proj-spheret", "hetero"), 8)
    assert 770e6 < found["parameters"] < 776e6 and all(one["fits"] for one in found["machines"])
    h100 = next(one for one in found["machines"] if "H100" in one["machine"])
    assert 0.05 < h100["step_seconds"] < 0.5 and {row["what"] for row in table(found)} >= {"parameters", "memory: total"}


def test_a_batch_that_cannot_be_dealt_is_told():
    with pytest.raises(UserError, match="multiple of 3"):
        estimate(recipe(), 3)
    with pytest.raises(UserError, match="parallel.strategy is none"):
        estimate(recipe(**{"parallel.strategy": "none"}), 2)
