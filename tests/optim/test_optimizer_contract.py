"""What torch expects of an optimizer, asked of every one a user can get from us: ManifoldMuon on each manifold, and the
three that recipes name."""

from __future__ import annotations

import copy
import io
import json
import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import gnomon
from gnomon.errors import UserError
from gnomon.models import Transformer, tiny
from gnomon.optim import ManifoldMuon, assign
from gnomon.train import optimizer as recipes
from gnomon.train.recipe import OptimConfig

MANIFOLDS = {
    "stiefel": gnomon.Stiefel(),
    "dgram": gnomon.DGram(),
    "oblique": gnomon.Oblique(),
    "euclidean": gnomon.Euclidean(),
    "sphere": gnomon.Sphere(),
    "sphere-least": gnomon.Sphere(least=2.0),
    "spectral-ball": gnomon.SpectralBall(),
    "spectral-sphere": gnomon.SpectralSphere(),
    "stiefel-paper": gnomon.Stiefel(paper=True),
    "dgram-paper": gnomon.DGram(paper=True),
}


def on(manifold, **options):
    return lambda m: ManifoldMuon(assign(m, attention=manifold, mlp=manifold), **options)


def by_recipe(**settings):
    return lambda m: recipes.build(m, OptimConfig(**settings))


OURS = {name: on(manifold) for name, manifold in MANIFOLDS.items()} | {
    "refined": on(gnomon.DGram(), steps=1),
    "adam on the sphere": on(gnomon.Sphere(), direction="adam"),
    "recipe manifold-muon": by_recipe(name="manifold-muon"),
}
ALL = OURS | {"recipe adamw": by_recipe(name="adamw"), "recipe muon": by_recipe(name="muon")}
every = pytest.mark.parametrize("make", ALL.values(), ids=ALL)
ours = pytest.mark.parametrize("make", OURS.values(), ids=OURS)
each_manifold = pytest.mark.parametrize("manifold", MANIFOLDS.values(), ids=MANIFOLDS)
pytestmark = pytest.mark.filterwarnings("ignore::gnomon.optim.PlacementWarning")


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return Transformer(tiny(layers=1, width=16, heads=2, context=16, qkv="fused", residual="sphere")).to(dtype)


def gradients(m, step):
    for i, p in enumerate(m.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)).to(p.dtype)


def run(m, optimizer, steps, start=0):
    for step in range(start, start + steps):
        gradients(m, step)
        optimizer.step()


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


def weights(m):
    return [p.detach().clone() for p in m.parameters()]


def single(manifold, W, **options):
    return ManifoldMuon([{"params": [("W", W)], "manifold": manifold}], **options)


def matrix():
    return nn.Parameter(torch.randn(12, 8, generator=torch.Generator().manual_seed(0)))


# Going on


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loaded_state_goes_on_as_if_never_stopped(make, dtype):
    """With bf16 weights too, whose momenta and masters are fp32: torch's own loading rounds them."""
    whole = model(dtype)
    optimizer = make(whole)
    run(whole, optimizer, 1)
    held, state, file = copy.deepcopy(whole.state_dict()), copy.deepcopy(optimizer.state_dict()), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    run(whole, optimizer, 1, start=1)
    for given in (state, torch.load(file, weights_only=True)):
        fresh = model(dtype)
        again = make(fresh)
        fresh.load_state_dict(held)
        again.load_state_dict(given)
        run(fresh, again, 1, start=1)
        assert same(whole, fresh)
        # What was loaded is what is saved again.
        a, b = (o.state_dict() for o in (optimizer, again))
        assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
        for index, entries in a["state"].items():
            for key, value in entries.items():
                other = b["state"][index][key]
                assert value.dtype == other.dtype and torch.equal(value, other), key


@every
def test_deepcopy_and_pickle_go_on_alike(make):
    m = model()
    optimizer = make(m)
    run(m, optimizer, 1)
    copies = [copy.deepcopy((m, optimizer)), pickle.loads(pickle.dumps((m, optimizer)))]
    run(m, optimizer, 1, start=1)
    for twin, other in copies:
        run(twin, other, 1, start=1)
        assert same(m, twin)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distributed_checkpoint_goes_on_alike(make, dtype):
    """torch.distributed.checkpoint makes the state by a step of no length, which must leave weights to the bit."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    m = model(dtype)
    optimizer = make(m)
    run(m, optimizer, 1)
    forms = [StateDictOptions(flatten_optimizer_state_dict=flat) for flat in (False, True)]
    held = [copy.deepcopy(get_state_dict(m, optimizer, options=options)) for options in forms]
    run(m, optimizer, 1, start=1)
    for options, (weights_there, state) in zip(forms, held):
        fresh = model(dtype)
        again, before = make(fresh), weights(fresh)
        get_state_dict(fresh, again, options=options)
        assert all(torch.equal(p, q) for p, q in zip(before, fresh.parameters()))
        set_state_dict(fresh, again, model_state_dict=weights_there, optim_state_dict=state, options=options)
        run(fresh, again, 1, start=1)
        assert same(m, fresh)


@ours
def test_groups_are_plain_data(make):
    optimizer = make(model())
    groups = optimizer.state_dict()["param_groups"]
    assert json.loads(json.dumps(groups)) == json.loads(json.dumps(copy.deepcopy(groups)))
    assert "ManifoldMuon" in repr(optimizer)


# Stepping


@every
def test_closure_is_called_once_with_gradients_on(make):
    m, calls = model(), []
    optimizer = make(m)

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = m.loss(*torch.zeros(2, 1, 16, dtype=torch.long))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0 and calls == [True]


@every
def test_without_gradients_nothing_moves(make):
    m = model()
    optimizer, before = make(m), None
    run(m, optimizer, 1)
    before, optimizer_state = weights(m), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    assert all(p.grad is None for p in m.parameters())
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(before, m.parameters()))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[i][k], v) for i, s in optimizer_state.items() for k, v in s.items())


@every
def test_deterministic_and_without_a_graph(make):
    a, b = model(), model()
    run(a, first := make(a), 1)
    first.state_dict()  # which looks, and touches nothing
    run(a, first, 1, start=1)
    run(b, make(b), 2)
    assert same(a, b)
    assert not any(v.requires_grad for s in first.state.values() for v in s.values() if torch.is_tensor(v))
    assert all(p.grad is not None and p.is_leaf for p in a.parameters())


@every
def test_the_rate_of_a_group_is_read_at_every_step(make):
    m = model()
    optimizer = make(m)
    run(m, optimizer, 1)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = weights(m)
    run(m, optimizer, 1, start=1)
    assert all(torch.equal(p, q) for p, q in zip(before, m.parameters()))


@each_manifold
def test_a_rate_may_be_a_tensor(manifold):
    W, V = matrix(), matrix()
    optimizer, other = single(manifold, W, lr=0.03), single(manifold, V, lr=torch.tensor(0.03), weight_decay=0.0)
    for step in range(3):
        for P, o in ((W, optimizer), (V, other)):
            P.grad = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
            o.step()
    torch.testing.assert_close(W, V, rtol=1e-6, atol=1e-6)


@ours
def test_a_gradient_scaler_skips_what_overflows(make):
    m = model()
    optimizer, scaler = make(m), torch.amp.GradScaler("cpu", init_scale=2.0)
    before = weights(m)
    for bad in (True, False):
        scaler.scale(m.loss(*torch.zeros(2, 1, 16, dtype=torch.long))).backward()
        if bad:
            m.embed.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(torch.equal(p, q) for p, q in zip(before, m.parameters())) == bad


# Who listens


@every
def test_hooks_hear_one_step(make):
    m, heard = model(), []
    optimizer = make(m)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: heard.append("all before")),
        register_optimizer_step_post_hook(lambda *_: heard.append("all after")),
        optimizer.register_step_pre_hook(lambda *_: heard.append("before")),
        optimizer.register_step_post_hook(lambda *_: heard.append("after")),
    ]
    try:
        run(m, optimizer, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(heard) == ["after", "all after", "all before", "before"]


@every
def test_a_profile_shows_one_step(make):
    m = model()
    optimizer = make(m)
    gradients(m, 0)
    for p in list(m.parameters())[1:]:
        p.grad = None  # one is enough to see, and a profile of all takes a second to read
    with torch.profiler.profile() as profile:
        optimizer.step()
    named = [event.key for event in profile.key_averages() if event.key.startswith("Optimizer.step")]
    assert named == [f"Optimizer.step#{type(optimizer).__name__}.step"]


@ours
def test_state_dict_hooks(make):
    m = model(torch.bfloat16)
    optimizer = make(m)
    run(m, optimizer, 1)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
    state = optimizer.state_dict()
    assert state["mine"] == 1
    seen = []

    def rename(_, given):
        """Names that only this hook can mend."""
        groups = [{**g, "param_names": [n.removeprefix("old.") for n in g["param_names"]]} for g in given["param_groups"]]
        return {**given, "param_groups": groups}

    def look(other):
        seen.extend(s["momentum"].dtype for s in other.state.values() if "momentum" in s)

    for group in state["param_groups"]:
        group["param_names"] = [f"old.{name}" for name in group["param_names"]]
    again = make(model(torch.bfloat16))
    with pytest.raises(UserError, match="old.* this optimizer missing|missing, this optimizer"):
        again.load_state_dict(state)
    again.register_load_state_dict_pre_hook(rename)
    again.register_load_state_dict_post_hook(look)
    again.load_state_dict(state)
    assert seen and set(seen) == {torch.float32}
    again.load_state_dict(state)  # and our own are not left behind
    assert [g["param_names"] for g in again.param_groups] == [g["param_names"] for g in optimizer.param_groups]


# Groups


@each_manifold
def test_groups_may_be_added_from_a_generator(manifold):
    W, b, V = matrix(), nn.Parameter(torch.zeros(8)), matrix()
    optimizer = single(manifold, W)
    optimizer.add_param_group({"params": (pair for pair in [("V", V)]), "manifold": manifold, "lr": 0.5})
    optimizer.add_param_group({"params": iter([("b", b)]), "weight_decay": 0.0})
    optimizer.add_param_group({"params": []})
    assert [g["params"] for g in optimizer.param_groups] == [[W], [V], [b], []]
    assert [g["param_names"] for g in optimizer.param_groups] == [["W"], ["V"], ["b"], []]
    for P in (W, b, V):
        P.grad = torch.ones_like(P)
    optimizer.step()
    assert b.abs().max() > 0 and optimizer.state[V]["momentum"].abs().max() > 0


@each_manifold
@pytest.mark.parametrize(
    "more, words",
    [
        (lambda W: {"params": [("W", matrix())]}, "two parameters have the name 'W'"),
        (lambda W: {"params": [("V", matrix()), ("V", matrix())]}, "two parameters have the name 'V'"),
        (lambda W: {"params": [matrix()]}, "needs names"),
        (lambda W: {"params": matrix()}, "needs names"),
        (lambda W: {"params": [("V", matrix())], "manifold": "stifel"}, "stiefel"),
        (lambda W: {"params": [("V", matrix())], "manifold": 3}, "a manifold is a value"),
        (lambda W: {"params": [("V", matrix())], "manifold": "stiefel", "capturable": True}, "no option 'capturable'"),
        (lambda W: {"params": [("V", matrix())], "manifold": "stiefel", "foreach": True}, "no option 'foreach'"),
        (lambda W: {"params": [("V", matrix())], "manifold": "stiefel", "maximize": True}, "no option 'maximize'"),
        (lambda W: {"params": [("V", matrix())], "momentum": 0.5}, "AdamW has no option 'momentum'"),
        (lambda W: {"params": [("V", nn.Parameter(torch.zeros(0, 4)))], "manifold": "dgram"}, "holds matrices"),
        (lambda W: {"params": [("V", nn.Parameter(torch.eye(3) * 1j))], "manifold": "dgram"}, "real"),
        (lambda W: {"params": [("V", nn.Parameter(torch.eye(3)[None]))], "manifold": "dgram"}, "holds matrices"),
    ],
)  # fmt: skip
def test_wrong_groups_are_told_and_leave_nothing_behind(manifold, more, words):
    optimizer = single(manifold, matrix())
    with pytest.raises(UserError, match=words):
        optimizer.add_param_group(more(None))
    assert len(optimizer.param_groups) == 1


@each_manifold
def test_torchs_own_refusals_stand(manifold):
    W = matrix()
    optimizer = single(manifold, W)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("again", W)]})
    with pytest.raises(ValueError, match="non-leaf"):
        optimizer.add_param_group({"params": [("V", matrix() * 2)]})
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": [("V", "no tensor")]})


@each_manifold
def test_sparse_gradients_are_refused_before_anything_moves(manifold):
    W, table = matrix(), nn.Embedding(5, 4, sparse=True)
    optimizer = ManifoldMuon(
        [{"params": [("W", W)], "manifold": manifold}, {"params": [("table", table.weight)]}], check_finite=False
    )
    before = W.detach().clone()
    W.grad = torch.ones_like(W)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match="gradient of table is sparse"):
        optimizer.step()
    assert torch.equal(W, before) and not optimizer.state


@each_manifold
def test_empty_and_complex_parameters_of_adamw(manifold):
    """What AdamW takes, it takes here as well."""
    W, none, z = matrix(), nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = ManifoldMuon([{"params": [("W", W)], "manifold": manifold}, {"params": [("none", none), ("z", z)]}])
    for P in (W, none, z):
        P.grad = torch.ones_like(P)
    optimizer.step()
    assert (z != 1).all() and z.isfinite().all()


def test_a_hugging_face_model_in_bf16_resumes(tmp_path):
    """Saved and loaded as transformers and torch do it; masters of the loaded weights go on where they were."""
    import transformers

    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=31)
    torch.manual_seed(0)
    m = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()
    optimizer = ManifoldMuon(assign(m, "hetero"), lr=1e-3, adamw_lr=1e-3)
    run(m, optimizer, 3)
    m.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    fresh = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    again = ManifoldMuon(assign(fresh, "hetero"))
    assert all(row["change"] == 0 for row in again.placed)
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    masters = [s["master"] for s in again.state.values() if "master" in s]
    assert len(masters) == 7 and {x.dtype for x in masters} == {torch.float32}
    run(m, optimizer, 3, start=3)
    run(fresh, again, 3, start=3)
    assert same(m, fresh)
