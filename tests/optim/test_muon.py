"""The contract of ManifoldMuon, over every manifold and shape, and what has gone wrong in other optimizers."""

from __future__ import annotations

import copy
import inspect
import json
import warnings

import pytest
import torch
from torch import nn

import gnomon
from gnomon.errors import UserError
from gnomon.models import Transformer, tiny
from gnomon.optim import NAMED, ManifoldMuon, PlacementWarning, Rule, advance, assign
from gnomon.train import checkpoint_layout

MANIFOLDS = {
    "stiefel": gnomon.Stiefel(),
    "stiefel-radius": gnomon.Stiefel(radius=2.0),
    "dgram": gnomon.DGram(),
    "dgram-cap": gnomon.DGram(floor=0.1, cap=1.5),
    "oblique": gnomon.Oblique(),
    "euclidean": gnomon.Euclidean(),
    "sphere": gnomon.Sphere(),
    "sphere-least": gnomon.Sphere(least=2.0),
    "spectral-ball": gnomon.SpectralBall(),
    "spectral-sphere": gnomon.SpectralSphere(radius=2.0),
}
SHAPES = {"tall": (24, 8), "wide": (8, 24), "square": (16, 16), "odd": (15, 15), "vector": (12, 1)}
every = pytest.mark.parametrize("manifold", MANIFOLDS.values(), ids=MANIFOLDS)
shaped = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def weight(shape, seed=0, dtype=torch.float32):
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(0.3).to(dtype))


def single(manifold, shape=(24, 8), dtype=torch.float32, **options):
    W = weight(shape, dtype=dtype)
    return W, ManifoldMuon([{"params": [("W", W)], "manifold": manifold}], **options)


def gradient(shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + seed))


def model(**changes):
    torch.manual_seed(0)
    return Transformer(tiny(layers=2, width=16, heads=2, context=16, **changes))


def run(m, optimizer, steps, start=0, schedule=None):
    for step in range(start, start + steps):
        x, y = torch.randint(257, (2, 2, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        m.loss(x, y).backward()
        optimizer.step()
        if schedule:
            schedule.step()


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


@every
@shaped
def test_placed_at_construction_and_feasible_after(manifold, shape):
    W, optimizer = single(manifold, shape, lr=0.02)
    assert manifold.violation(W.detach()) < 1e-4
    # What is there already stays to the bit.
    before = weight(shape).detach()
    off = bool(manifold.violation(before) > 1e-5)
    assert (optimizer.placed[0]["change"] > 0) == off == (not torch.equal(W, before))
    assert off or isinstance(manifold, (gnomon.Euclidean, gnomon.DGram, gnomon.Sphere, gnomon.SpectralBall))
    for step in range(12):
        W.grad = gradient(shape, step)
        optimizer.step()
    assert W.isfinite().all() and manifold.violation(W.detach()) < 1e-4


@every
@shaped
def test_descends(manifold, shape):
    """On a linear objective every step goes down until the manifold allows no more."""
    W, optimizer = single(manifold, shape, lr=0.02, momentum=0.0)
    G = gradient(shape, 0)
    before = (W * G).sum().item()
    for _ in range(10):
        W.grad = G.clone()
        optimizer.step()
    assert (W * G).sum().item() < before - 1e-4 or (shape == (12, 1) and before < 0)


@every
@shaped
def test_zero_gradient_keeps_the_weight(manifold, shape):
    W, optimizer = single(manifold, shape)
    before = W.detach().clone()
    W.grad = torch.zeros(shape)
    optimizer.step()
    assert W.isfinite().all()
    torch.testing.assert_close(W.detach(), before, rtol=0, atol=1e-5)


@every
def test_zero_matrix_inside_a_batch(manifold):
    weights = [weight((16, 8), seed) for seed in range(3)]
    optimizer = ManifoldMuon([{"params": [(f"W{i}", W) for i, W in enumerate(weights)], "manifold": manifold}])
    before = [W.detach().clone() for W in weights]
    for i, W in enumerate(weights):
        W.grad = torch.zeros(16, 8) if i == 1 else gradient((16, 8), i)
    optimizer.step()
    torch.testing.assert_close(weights[1].detach(), before[1], rtol=0, atol=1e-5)
    assert all(W.isfinite().all() for W in weights) and not torch.equal(weights[0], before[0])


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_gradient_raises_and_touches_nothing(manifold, bad):
    m = model()
    optimizer = ManifoldMuon(assign(m, attention=manifold, mlp=manifold))
    run(m, optimizer, 1)
    twin, state = copy.deepcopy(m), copy.deepcopy(optimizer.state_dict())
    m.loss(*torch.zeros(2, 1, 16, dtype=torch.long)).backward()
    m.blocks[1].mlp.up.weight.grad[0, 0] = bad
    with pytest.raises(UserError, match="blocks.1.mlp.up.weight is not finite"):
        optimizer.step()
    assert same(m, twin)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][k], v) for i, s in state["state"].items() for k, v in s.items() if torch.is_tensor(v))


@every
@pytest.mark.parametrize("bad", ["zeros", "rank-1", "duplicated"])
def test_degenerate_inits_are_completed(manifold, bad):
    W = weight((16, 8))
    with torch.no_grad():
        if bad == "zeros":
            W.zero_()
        elif bad == "rank-1":
            W.copy_(torch.outer(W[:, 0], torch.ones(8)))
        else:
            W[:, 3] = W[:, 2]
    optimizer = ManifoldMuon([{"params": [("W", W)], "manifold": manifold}])
    assert manifold.violation(W.detach()) < 1e-4
    W.grad = gradient((16, 8), 0)
    optimizer.step()
    assert manifold.violation(W.detach()) < 1e-4 and W.isfinite().all()


def test_non_finite_weights_are_refused():
    W = weight((8, 8))
    W.data[0, 0] = float("nan")
    with pytest.raises(UserError, match="W: .*NaN"):
        ManifoldMuon([{"params": [("W", W)], "manifold": gnomon.Stiefel()}])


def test_missing_and_frozen_gradients():
    m = model()
    m.blocks[0].mlp.up.weight.requires_grad_(False)
    frozen = m.blocks[0].mlp.up.weight.detach().clone()
    optimizer = ManifoldMuon(assign(m, "hetero"), weight_decay=0.1)
    m.loss(*torch.zeros(2, 1, 16, dtype=torch.long)).backward()
    m.blocks[1].mlp.up.weight.grad = None
    skipped = m.blocks[1].mlp.up.weight.detach().clone()
    optimizer.step()
    assert torch.equal(m.blocks[0].mlp.up.weight, frozen) and torch.equal(m.blocks[1].mlp.up.weight, skipped)
    assert m.blocks[0].mlp.up.weight not in optimizer.state


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
@pytest.mark.parametrize("adjust, scale", [("match_rms_adamw", "rms"), ("original", "muon")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_euclidean_is_torch_muon(shape, adjust, scale, nesterov):
    a, b = weight(shape), weight(shape)
    ours = ManifoldMuon([{"params": [("W", a)], "manifold": gnomon.Euclidean()}], lr=0.01, weight_decay=0.1, scale=scale, nesterov=nesterov)
    theirs = torch.optim.Muon([b], lr=0.01, weight_decay=0.1, adjust_lr_fn=adjust, nesterov=nesterov)
    for step in range(5):
        a.grad, b.grad = gradient(shape, step), gradient(shape, step)
        ours.step(), theirs.step()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_rest_is_torch_adamw():
    m = model(residual="sphere")
    twin = copy.deepcopy(m)
    optimizer = ManifoldMuon(assign(m, "hetero"), adamw_lr=1e-3, adamw_betas=(0.8, 0.9), adamw_weight_decay=0.2)
    rest = [e.part.name for e in assign(twin, "hetero") if e.manifold is None]
    parameters = dict(twin.named_parameters())
    groups = [
        {"params": [parameters[n] for n in rest if parameters[n].ndim >= 2], "weight_decay": 0.2},
        {"params": [parameters[n] for n in rest if parameters[n].ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9))
    for step in range(3):
        for name, p in m.named_parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            parameters[name].grad = p.grad.clone()
        optimizer.step(), adamw.step()
    for name in rest:
        assert torch.equal(dict(m.named_parameters())[name], parameters[name]), name


def test_fused_steps_as_three():
    fused, split = model(qkv="fused"), model()
    with torch.no_grad():
        for a, b in zip(fused.blocks, split.blocks):
            a.attention.qkv.weight.copy_(torch.cat([b.attention.query.weight, b.attention.key.weight, b.attention.value.weight]))
            for role in ("attention.output", "mlp.up", "mlp.down"):
                a.get_submodule(role).weight.copy_(b.get_submodule(role).weight)
        fused.embed.weight.copy_(split.embed.weight)
    for m in (fused, split):
        run(m, ManifoldMuon(assign(m, "hetero")), 3)
    for a, b in zip(fused.blocks, split.blocks):
        together = torch.cat([b.attention.query.weight, b.attention.key.weight, b.attention.value.weight])
        torch.testing.assert_close(a.attention.qkv.weight, together, rtol=1e-4, atol=1e-4)


def test_transposed_storage_steps_alike():
    """Hugging Face's Conv1D keeps in x out: the same layer must take the same step, scale included."""
    from transformers.pytorch_utils import Conv1D

    class Layer(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.c_fc = kind(48, 16) if kind is Conv1D else kind(16, 48)

    conv, linear = Layer(Conv1D), Layer(nn.Linear)
    with torch.no_grad():
        conv.c_fc.weight.copy_(linear.c_fc.weight.T)
    for manifold in (gnomon.DGram(), gnomon.Euclidean()):
        for layer in (conv, linear):
            layer.c_fc.weight.grad = gradient((48, 16), 0) if layer is linear else gradient((48, 16), 0).T
            ManifoldMuon(assign(layer, rules=[Rule("c_fc.weight", manifold)]), scale="spectral").step()
        torch.testing.assert_close(conv.c_fc.weight.T, linear.c_fc.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("assignment", NAMED)
@pytest.mark.parametrize("options", [{}, {"steps": 2}], ids=["plain", "refined"])
def test_resume_equals_uninterrupted(assignment, options, tmp_path):
    whole, parted = model(qkv="fused"), model(qkv="fused")
    optimizer = ManifoldMuon(assign(whole, assignment), **options)
    run(whole, optimizer, 3)
    optimizer = ManifoldMuon(assign(parted, assignment), **options)
    run(parted, optimizer, 2)
    tensors, rest = checkpoint_layout.split_state(optimizer.state_dict())
    fresh = model(qkv="fused")
    fresh.load_state_dict(copy.deepcopy(parted.state_dict()))
    again = ManifoldMuon(assign(fresh, assignment), **options)
    fresh.load_state_dict(parted.state_dict())  # placing weights anew may round them
    again.load_state_dict(checkpoint_layout.join_state(tensors, json.loads(json.dumps(rest))))
    run(fresh, again, 1, start=2)
    assert same(whole, fresh)


def test_deepcopy_steps_alike():
    m = model()
    optimizer = ManifoldMuon(assign(m, "hetero"))
    run(m, optimizer, 2)
    pair = copy.deepcopy((m, optimizer))
    run(m, optimizer, 2, start=2)
    run(*pair, 2, start=2)
    assert same(m, pair[0])


def test_another_assignment_at_resume_is_refused():
    m = model()
    state = ManifoldMuon(assign(m, "hetero")).state_dict()
    with pytest.raises(UserError, match="blocks.0.attention.query.weight: the checkpoint has Stiefel"):
        ManifoldMuon(assign(m, "hetero-inv")).load_state_dict(state)
    with pytest.raises(UserError, match="AdamW"):
        ManifoldMuon(assign(m, "hetero", rules=[Rule("down", None)])).load_state_dict(state)


def test_another_order_at_resume_is_refused():
    a, b = weight((8, 8), 0), weight((8, 8), 1)
    state = ManifoldMuon([{"params": [("a", a), ("b", b)], "manifold": gnomon.Stiefel()}]).state_dict()
    with pytest.raises(UserError, match="another order"):
        ManifoldMuon([{"params": [("b", b), ("a", a)], "manifold": gnomon.Stiefel()}]).load_state_dict(state)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[g["lr"] for g in o.param_groups], total_steps=10, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    ],
)
def test_schedulers_keep_the_ratios(make):
    optimizer = ManifoldMuon(assign(model(), "hetero", rules=[Rule("down", gnomon.DGram(), lr=0.1)]), lr=0.02, adamw_lr=1e-3)
    before = [g["lr"] for g in optimizer.param_groups]
    assert sorted(set(before)) == [1e-3, 0.02, 0.1]
    schedule = make(optimizer)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    ratios = [g["lr"] / b for g, b in zip(optimizer.param_groups, before)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios)) and ratios[0] != 1


def test_lr_zero_leaves_weights_alone_up_to_rounding():
    W, optimizer = single(gnomon.Stiefel(), lr=0.0)
    before = W.detach().clone()
    W.grad = gradient((24, 8), 0)
    optimizer.step()
    torch.testing.assert_close(W.detach(), before, rtol=0, atol=1e-6)


def test_lr_scales_the_step_s_spectral_norm():
    for scale, factor in (("none", 1.0), ("spectral", 3**0.5), ("rms", 0.2 * 24**0.5), ("muon", 3**0.5)):
        W, optimizer = single(gnomon.Stiefel(), lr=1e-3, scale=scale)
        before = W.detach().clone()
        W.grad = gradient((24, 8), 0)
        optimizer.step()
        assert torch.linalg.matrix_norm(W.detach() - before, 2).item() == pytest.approx(1e-3 * factor, rel=0.05), scale


@every
def test_weight_decay_means_what_it_says(manifold):
    if not manifold.decays:
        with pytest.warns(UserWarning, match="no-op"):
            W, optimizer = single(manifold, weight_decay=0.5)
    else:
        W, optimizer = single(manifold, weight_decay=0.5)
    before = W.detach().clone()
    W.grad = torch.zeros_like(W)
    optimizer.step()
    expected = before * (0.99 if manifold.decays else 1.0)
    if isinstance(manifold, gnomon.DGram):
        # Only lengths shrink, and not below the floor.
        norms = before.norm(dim=0)
        expected = before * torch.maximum(torch.full_like(norms, 0.99), (manifold.floor / norms).clamp_max(1.0))
    torch.testing.assert_close(W.detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_keep_small_steps(dtype):
    """Steps of 1e-3 vanish in a bf16 weight of size 1; a master copy keeps their sum."""
    W, optimizer = single(gnomon.Stiefel(), (32, 32), dtype=dtype, lr=1e-3, momentum=0.0)
    V, reference = single(gnomon.Stiefel(), (32, 32), lr=1e-3, momentum=0.0)
    start = V.detach().clone()
    for _ in range(40):
        W.grad, V.grad = gradient((32, 32), 0).to(dtype), gradient((32, 32), 0)
        optimizer.step(), reference.step()
    moved = (V - start).norm()
    assert ((W.float() - V).norm() / moved).item() < 0.1
    assert optimizer.state[W]["momentum"].dtype == torch.float32


def test_momentum_is_not_aliased():
    W, optimizer = single(gnomon.Euclidean(), (16, 16), dtype=torch.bfloat16, lr=0.0, momentum=0.9)
    expected = torch.zeros(16, 16)
    for step in range(4):
        W.grad = gradient((16, 16), step).bfloat16()
        kept = W.grad.clone()
        optimizer.step()
        expected = 0.9 * expected + 0.1 * kept.float()
        torch.testing.assert_close(optimizer.state[W]["momentum"], expected)
        assert torch.equal(W.grad, kept)


def test_one_momentum_buffer_a_matrix():
    W, optimizer = single(gnomon.DGram())
    W.grad = gradient((24, 8), 0)
    optimizer.step()
    assert {k: tuple(v.shape) for k, v in optimizer.state[W].items()} == {"momentum": (24, 8)}


def test_closure_hooks_and_added_groups():
    W, optimizer = single(gnomon.Stiefel())
    b = nn.Parameter(torch.zeros(8))
    optimizer.add_param_group({"params": [("b", b)], "manifold": None, "lr": 0.5})
    V = weight((8, 24), 3)
    optimizer.add_param_group({"params": [("V", V)], "manifold": gnomon.DGram(), "lr": 0.01})
    assert gnomon.DGram().violation(V.detach()) < 1e-5
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def closure():
        optimizer.zero_grad()
        loss = (V @ W).square().sum() + (b - 1).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert len(seen) == 5 and losses[-1] < losses[0] and b.abs().max() > 0


@pytest.mark.parametrize(
    "groups, words",
    [
        (lambda W: [{"params": [W], "manifold": gnomon.Stiefel()}], "needs names"),
        (lambda W: [{"params": [("W", W)], "manifold": gnomon.Stiefel(), "lrr": 3}], "no option 'lrr'"),
        (lambda W: [{"params": [("b", nn.Parameter(torch.zeros(3)))], "manifold": gnomon.Stiefel()}], "matrices"),
        (lambda W: [{"params": [("c", nn.Parameter(torch.zeros(2, 3, 3, 3)))], "manifold": gnomon.Stiefel()}], "matrices"),
    ],
)
def test_wrong_groups_are_told(groups, words):
    with pytest.raises(UserError, match=words):
        ManifoldMuon(groups(weight((4, 4))))


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"momentum": 1.0}, {"scale": "spectrl"}, {"steps": -1}])
def test_wrong_options_are_told(options):
    with pytest.raises(UserError):
        single(gnomon.Stiefel(), **options)


def test_overridden_methods_keep_their_signatures():
    """torch.distributed.checkpoint passes state_dict= by name."""
    for name in ("load_state_dict", "state_dict", "step", "zero_grad", "add_param_group"):
        ours, base = (inspect.signature(getattr(cls, name)).parameters for cls in (ManifoldMuon, torch.optim.Optimizer))
        assert list(ours)[: len(base)] == list(base) or name == "step", name


def test_advance_is_batched():
    W = torch.stack([gnomon.Stiefel().random(12, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)])
    U = torch.stack([gradient((12, 6), i) for i in range(3)])
    together = advance(W, U, gnomon.Stiefel(), 0.02)
    for i in range(3):
        torch.testing.assert_close(together[i], advance(W[i], U[i], gnomon.Stiefel(), 0.02), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_step_does_not_recompile_when_the_rate_changes(monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    W, optimizer = single(gnomon.Stiefel(), compile=True)
    from gnomon.optim import matrix_step

    counted = torch.compile(matrix_step.advance, backend=counter, dynamic=False)
    monkeypatch.setattr(matrix_step, "compiled_advance", lambda: counted)
    V, plain = single(gnomon.Stiefel())
    for step in range(10):
        for group in (*optimizer.param_groups, *plain.param_groups):
            group["lr"] = 0.02 / (step + 1)
        W.grad, V.grad = gradient((24, 8), step), gradient((24, 8), step)
        optimizer.step(), plain.step()
    assert counter.frame_count == 1
    torch.testing.assert_close(W, V, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("manifold", [gnomon.Stiefel(), gnomon.DGram()], ids=["stiefel", "dgram"])
@pytest.mark.parametrize("shape", [(96, 32), (64, 64)])
def test_feasible_after_2000_steps_with_bf16_gradients(manifold, shape):
    W, optimizer = single(manifold, shape, lr=0.02)
    for step in range(2000):
        W.grad = gradient(shape, step).bfloat16().float()
        optimizer.step()
    assert manifold.violation(W.detach()) < 1e-5


# What is saved and loaded, and under which names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", ["_orig_mod.{}", "module.{}", "module._orig_mod.{}", "blocks"], ids=str)
def test_names_of_wrapped_models_load(change, dtype):
    """torch.compile, DDP and FSDP add to names; here on the side that saves, then on the side that loads."""
    V, W = weight((8, 8), 0, dtype), weight((8, 8), 1, dtype)

    def wrapped(name):
        return name.replace("blocks.0", "blocks.0._checkpoint_wrapped_module") if change == "blocks" else change.format(name)

    def build(name_of):
        pairs = [(name_of("blocks.0.up.weight"), V), (name_of("blocks.1.up.weight"), W)]
        return ManifoldMuon([{"params": pairs, "manifold": "dgram"}], steps=1)

    plain, other = build(str), build(wrapped)
    for source, target in ((plain, other), (other, plain)):
        V.grad, W.grad = (gradient((8, 8), seed).to(dtype) for seed in (0, 1))
        source.step()
        kept = [dict(source.state[p]) for p in (V, W)]
        names = target.param_groups[0]["param_names"]
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        assert target.param_groups[0]["param_names"] == names and list(target.param_groups[0]["manifolds"]) == names
        for p, state in zip((V, W), kept):
            assert all(torch.equal(target.state[p][key], value) for key, value in state.items())
        target.step()


def test_options_newer_than_a_state_keep_their_values():
    W, optimizer = single(gnomon.DGram(), weight_decay=0.3, momentum=0.5)
    W.grad = gradient((24, 8), 0)
    optimizer.step()
    state = optimizer.state_dict()
    for key in ("scale", "nesterov", "weight_decay", "step"):
        del state["param_groups"][0][key]
    state["param_groups"][0]["theirs"] = 5  # what a scheduler of theirs wrote stays
    again = single(gnomon.DGram(), weight_decay=0.1)[1]
    again.load_state_dict(state)
    group = again.param_groups[0]
    assert (group["scale"], group["nesterov"], group["weight_decay"], group["step"]) == ("none", True, 0.1, 0)
    assert (group["momentum"], group["theirs"]) == (0.5, 5)
    again.param_groups[0]["params"][0].grad = gradient((24, 8), 1)
    again.step()


@pytest.mark.parametrize(
    "manifold, retired, then",
    [
        (gnomon.Stiefel(paper=True), {"paper": True}, {"name": "stiefel", "columns": "short", "radius": 1.0}),
        (gnomon.DGram(), {"paper": False}, {"name": "dgram", "columns": "short", "floor": 1e-3, "cap": None, "paper": False}),
        (gnomon.SpectralBall(radius=2.0), {"spectral_cap": 2.0}, {"name": "euclidean", "columns": "short"}),
        (gnomon.SpectralBall(radius=2.0), {}, {"name": "euclidean", "columns": "short", "cap": 2.0}),
        (gnomon.Euclidean(), {}, {"name": "euclidean", "columns": "short", "cap": None}),
    ],
)
def test_states_of_before_manifolds_had_these_options_load(manifold, retired, then):
    """As written when the paper's solver and the spectral cap were the optimizer's."""
    W, optimizer = single(manifold)
    state = copy.deepcopy(optimizer.state_dict())
    group = state["param_groups"][0]
    group.update({"polish_every": 100, "warm_start": True, "paper": False, "spectral_cap": None, **retired})
    state["state"][0] = {"momentum": torch.ones(24, 8), "dual.0": torch.zeros(8, 8)}
    group["manifolds"]["W"][0][1] = then
    again = single(manifold)[1]
    again.load_state_dict(state)
    assert again.param_groups[0].keys() == optimizer.param_groups[0].keys()
    assert list(again.state[again.param_groups[0]["params"][0]]) == ["momentum"]
    assert again.param_groups[0]["manifolds"] == optimizer.param_groups[0]["manifolds"]
    other = {"stiefel": gnomon.Stiefel(), "dgram": gnomon.DGram(paper=True), "euclidean": gnomon.SpectralBall()}[then["name"]]
    with pytest.raises(UserError, match="the checkpoint has"):
        single(other)[1].load_state_dict(state)


def test_states_that_do_not_fit_are_told():
    a, b = weight((8, 8), 0), weight((8, 8), 1)
    one = ManifoldMuon([{"params": [("a", a), ("b", b)], "manifold": "stiefel"}])
    two = ManifoldMuon([{"params": [("a", a)], "manifold": "stiefel"}, {"params": [("b", b)], "manifold": "stiefel", "lr": 1.0}])
    with pytest.raises(UserError, match=r"groups of \[2\], this optimizer in groups of \[1, 1\]"):
        two.load_state_dict(one.state_dict())
    state = one.state_dict()
    del state["param_groups"][0]["param_names"]
    with pytest.raises(UserError, match="no parameter names"):
        one.load_state_dict(state)
    with pytest.raises(UserError, match="no parameter names"):
        one.load_state_dict(torch.optim.AdamW([a, b]).state_dict())


# First contact


@pytest.mark.parametrize(
    "given",
    [
        lambda m: m,
        lambda m: m.parameters(),
        lambda m: list(m.parameters()),
        lambda m: m.named_parameters(),
        lambda m: next(m.parameters()),
        lambda m: {"params": list(m.named_parameters())},
        lambda m: "hetero",
        lambda m: None,
        lambda m: [],
    ],
)
def test_what_says_nothing_of_manifolds_is_told_the_way(given):
    with pytest.raises(UserError, match="gnomon.assign"):
        ManifoldMuon(given(model()))


def test_manifolds_by_name_and_class():
    for given in ("stiefel", gnomon.Stiefel, gnomon.Stiefel()):
        W, optimizer = single(given)
        assert optimizer.placed[0]["manifold"] == "Stiefel()"


# Placing


def test_placing_says_what_it_destroys():
    good = gnomon.Stiefel().random(24, 8, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = ManifoldMuon([{"params": [("W", nn.Parameter(good))], "manifold": "stiefel"}])
        assert optimizer.placed[0]["change"] == 0
        ManifoldMuon([{"params": [("W", nn.Parameter(good * 1.4))], "manifold": "stiefel"}])
    with pytest.warns(PlacementWarning, match=r"1 of 2 matrices changed by more than 50% .* V by 60% \(Stiefel\(\)\)") as told:
        pairs = [("W", nn.Parameter(good.clone())), ("V", nn.Parameter(good * 2.5))]
        optimizer = ManifoldMuon([{"params": pairs, "manifold": "stiefel"}])
    assert [row["change"] for row in optimizer.placed] == [0, pytest.approx(0.6, rel=1e-5)]
    assert told[0].filename == __file__


@pytest.mark.parametrize("name", ["stiefel", "dgram", "oblique", "sphere", "spectral-sphere"])
def test_a_matrix_of_zeros_is_never_placed_in_silence(name):
    zero = nn.Parameter(torch.zeros(24, 8))
    with pytest.warns(PlacementWarning, match="W: all zero, .* and random now"):
        optimizer = ManifoldMuon([{"params": [("W", zero)], "manifold": name}])
    assert zero.any() and optimizer.placed[0]["change"] == float("inf")
    zero = nn.Parameter(torch.zeros(24, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for free in ("euclidean", "spectral-ball", gnomon.Sphere(least=1.0)):
            ManifoldMuon([{"params": [("W", zero)], "manifold": free}])
    assert not zero.any()


@pytest.mark.parametrize("manifold", [gnomon.Stiefel(), gnomon.DGram(), gnomon.Oblique()], ids=lambda m: m.name)
def test_what_thaws_later_is_placed_then(manifold):
    """A step from a point off the manifold would go anywhere."""
    W, V = weight((24, 8), 0), nn.Parameter(3 * weight((24, 8), 1).detach(), requires_grad=False)
    before = V.detach().clone()
    optimizer = ManifoldMuon([{"params": [("W", W), ("V", V)], "manifold": manifold}])
    for step in range(15):
        W.grad = gradient((24, 8), step)
        optimizer.step()
    assert torch.equal(V, before) and optimizer.param_groups[0]["unplaced"] == ["V"]
    again = ManifoldMuon([{"params": [("W", W), ("V", V)], "manifold": manifold}])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    V.requires_grad_()
    V.grad, W.grad = torch.zeros(24, 8), None
    again.step()
    assert [row["name"] for row in again.placed] == ["W", "V"] and again.param_groups[0]["unplaced"] == []
    assert manifold.violation(V.detach()) < 1e-5
    torch.testing.assert_close(V.detach(), manifold.project(before), rtol=0, atol=1e-5)


def test_float64_weights_are_placed_in_float64():
    W, _ = single(gnomon.Stiefel(), dtype=torch.float64)
    assert gnomon.Stiefel().violation(W.detach()) < 1e-14


# Gradients


@every
@pytest.mark.parametrize("dtype, value", [(torch.float16, 5000.0), (torch.bfloat16, 1e30), (torch.float32, 1e30)])
def test_finite_gradients_are_stepped_however_large(manifold, dtype, value):
    """Their norm overflows: 32 x 32 numbers of 5000 in fp16, or numbers of 1e30 in fp32."""
    W, optimizer = single(manifold, (32, 32), dtype=dtype)
    V, other = single(manifold, (32, 32), dtype=dtype)
    sign = gradient((32, 32), 0).sign().to(dtype)
    W.grad, V.grad = sign * value, sign
    assert not torch.isfinite(torch.linalg.vector_norm(W.grad.float() if dtype != torch.float16 else W.grad))
    optimizer.step(), other.step()
    assert W.isfinite().all()
    torch.testing.assert_close(W, V, rtol=0, atol=2e-2 if dtype != torch.float32 else 1e-4)
