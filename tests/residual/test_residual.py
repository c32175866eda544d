"""The contract every residual keeps, and each method against its equation in three lines of float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gnomon import residual
from gnomon.errors import UserError
from gnomon.models import Transformer, TransformerConfig

D, DEPTH = 12, 8
NAMES = list(residual.names())
# Every name, and the options that take another path through the code.
CASES = [(name, {}) for name in NAMES] + [
    ("sphere", {"p": 4.0, "count": "block", "cap": 0.5, "gain": 2.0}),
    ("sphere", {"p": math.inf, "decay": "harmonic", "learn": False}),
    ("sphere", {"clamp": math.pi / 4}),
    ("geonorm", {"listing": True, "decay": "sqrt"}),
    ("geonorm", {"radius": 0.0, "clamp": None}),
    ("ngpt-step", {"per_channel": False}),
    ("pre-norm", {"norm": "layer"}),
]
IDS = [name + ("" if not options else "-" + "-".join(map(str, options))) for name, options in CASES]
every = pytest.mark.parametrize("name, options", CASES, ids=IDS)


def build(name, options, index=3, dtype=torch.float64):
    """A residual with its parameters moved off their round starting values."""
    module = residual.make(name, D, index=index, depth=DEPTH, **options).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return module


def branch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    W = (torch.randn(D, D, generator=generator, dtype=torch.float64) / math.sqrt(D)).to(dtype)
    return lambda x: torch.tanh(x @ W)


def stream(*shape, dtype=torch.float64):
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


@every
def test_gradient(name, options):
    module, F_ = build(name, options), branch()
    h = stream(2, 3).requires_grad_()
    parameters = [p for p in module.parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(lambda h, *_: module(h, F_), (h, *parameters))


@every
def test_batch_dimensions(name, options):
    module, F_, h = build(name, options), branch(), stream(2, 3, 4)
    torch.testing.assert_close(module(h, F_).reshape(24, D), module(h.reshape(24, D), F_))
    torch.testing.assert_close(module(h, F_)[1, 2, 3], module(h[1, 2, 3], F_))


@every
def test_tokens_do_not_see_each_other(name, options):
    module, F_, h = build(name, options), branch(), stream(5)
    changed = h.clone()
    changed[3:] += 1
    assert torch.equal(module(h, F_)[:3], module(changed, F_)[:3])


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_input_and_zero_branch_are_finite(name, options, dtype):
    module = build(name, options, dtype=dtype)
    h = stream(4, dtype=dtype)
    h[0] = 0
    h.requires_grad_()
    for F_ in (branch(dtype), torch.zeros_like, lambda x: 3 * x):
        module.zero_grad()
        out = module(h, F_)
        out.float().sum().backward()
        assert out.dtype == dtype and out.isfinite().all() and h.grad.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@every
def test_bf16_follows_fp32(name, options):
    wide, narrow = build(name, options, dtype=torch.float32), build(name, options, dtype=torch.bfloat16)
    h = stream(64, dtype=torch.bfloat16)
    expected = wide(h.float(), branch(torch.float32))
    got = narrow(h, branch(torch.bfloat16)).float()
    assert (got - expected).norm() / expected.norm() < 0.02


@every
def test_autocast_keeps_an_fp32_stream(name, options):
    module, linear = build(name, options, dtype=torch.float32), nn.Linear(D, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(stream(4, dtype=torch.float32), linear).dtype == torch.float32


@every
def test_compiled_equals_eager(name, options):
    torch._dynamo.reset()
    module, linear = build(name, options, dtype=torch.float32), nn.Linear(D, D)
    h = stream(6, dtype=torch.float32)

    def run(f):
        x = h.clone().requires_grad_()
        out = f(x, linear)
        out.square().sum().backward()
        return out.detach(), x.grad

    # aot_eager traces forward and backward whole but leaves code generation out, which the slow test below adds.
    for a, b in zip(run(module), run(torch.compile(module, backend="aot_eager", fullgraph=True))):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@every
def test_inductor_equals_eager_within_a_bf16_ulp(name, options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = build(name, options, dtype=torch.bfloat16)
    h, linear = stream(64, dtype=torch.bfloat16), nn.Linear(D, D).bfloat16()
    a, b = module(h, linear).float(), torch.compile(module, fullgraph=True)(h, linear).float()
    # An ulp of the largest number in the row: entries near zero are differences of large ones, and fused code rounds
    # those less often than eager code does.
    largest = torch.maximum(a.abs(), h.float().abs()).amax(-1, keepdim=True)
    assert ((a - b).abs() <= largest * 2**-7).all()
    exact = build(name, options)
    exact.load_state_dict({key: value.double() for key, value in module.state_dict().items()})
    truth = exact(h.double(), copy.deepcopy(linear).double())
    assert (b - truth).norm() < 1.05 * (a - truth).norm()


@every
def test_state_survives_save_and_load(name, options, tmp_path):
    from safetensors.torch import load_file, save_file

    module = build(name, options)
    if not module.state_dict():
        return
    save_file(module.state_dict(), tmp_path / "m.safetensors")
    fresh = residual.make(name, D, index=3, depth=DEPTH, **options).double()
    fresh.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert torch.equal(fresh(stream(4), branch()), module(stream(4), branch()))
    assert not list(module.buffers())


@every
def test_deterministic_and_copyable(name, options):
    module = build(name, options)
    assert torch.equal(module(stream(4), branch()), copy.deepcopy(module)(stream(4), branch()))


@every
def test_no_parameter_without_a_dimension(name, options):
    module = build(name, options)
    for part in (module, module.entry(), module.exit()):
        assert all(p.ndim >= 1 for p in part.parameters())


@every
def test_entry_and_exit_keep_shape_and_are_finite(name, options):
    module = build(name, options)
    for part in (module.entry().double(), module.exit().double()):
        x = torch.cat((stream(3), torch.zeros(1, D, dtype=torch.float64))).requires_grad_()
        y = part(x)
        y.sum().backward()
        assert y.shape == x.shape and y.isfinite().all() and x.grad.isfinite().all()


ROTATING = [
    ("sphere", {}), ("sphere", {"p": 4.0, "cap": 0.5}), ("proj-spheret", {}), ("cay-spheret", {}), ("geonorm", {}),
    ("geonorm", {"listing": True}), ("ngpt-step", {"per_channel": False}),
]  # fmt: skip


@pytest.mark.parametrize("name, options", ROTATING)
def test_one_rotation_of_everything_rotates_the_result(name, options):
    """residual(Qh, Q F Q^T) = Q residual(h, F): these methods know no preferred axes. A norm with gains does."""
    module, F_, h = build(name, options), branch(), stream(5)
    Q = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64))[0]
    turned = module(h @ Q.T, lambda x: F_(x @ Q) @ Q.T)
    torch.testing.assert_close(turned, module(h, F_) @ Q.T)


VANISHING = {
    "sphere": {"start": 1e-12}, "proj-spheret": {"start": 1e-12}, "cay-spheret": {"start": 1e-12},
    "bounded-sphere": {"start": 1e-12},
    "geonorm": {"clamp": 1e-12}, "ngpt-step": {"start": 1e-12},
}  # fmt: skip


@pytest.mark.parametrize("name", VANISHING)
def test_no_step_is_the_identity(name):
    module = residual.make(name, D, index=0, depth=DEPTH, **VANISHING[name]).double()
    h = module.entry()(stream(5))
    torch.testing.assert_close(module(h, branch()), h)


@pytest.mark.parametrize("name", ["pre-norm", "peri-norm", "sandwich", "pre-dyt", "layernorm-scaling", "orthogonal"])
def test_additive_methods_with_a_silent_branch_are_the_identity(name):
    module, h = residual.make(name, D, index=0, depth=DEPTH).double(), stream(5)
    assert torch.equal(module(h, torch.zeros_like), h)


@every
def test_whether_a_branch_can_start_at_zero_is_known(name, options):
    """A branch W x with W = 0 has a gradient, and not one beyond measure, where the residual says so, and only there."""
    module, h = build(name, options), stream(2, 5)
    W = torch.zeros(D, D, dtype=torch.float64, requires_grad=True)
    module(module.entry()(h), lambda x: x @ W).square().matmul(torch.arange(D, dtype=torch.float64)).sum().backward()
    assert (0 < float(W.grad.abs().max()) < 1e6) == module.learns_from_zero


def rms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def tangent(h, f):
    return f - (h * f).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h


def turn(h, v):
    """exp_h(v)"""
    angle = v.norm(dim=-1, keepdim=True) / h.norm(dim=-1, keepdim=True)
    return angle.cos() * h + angle.sin() * h.norm(dim=-1, keepdim=True) * unit(v)


R = math.sqrt(D)
# index 3 of 8 sublayers: sublayer 4, block 2 of 4.
EQUATIONS = {
    "pre-norm": lambda h, F: h + F(rms(h)),
    "post-norm": lambda h, F: rms(h + F(h)),
    "peri-norm": lambda h, F: h + rms(F(rms(h))),
    "sandwich": lambda h, F: h + rms(F(rms(h))),
    "pre-dyt": lambda h, F: h + F(torch.tanh(0.2 * h)),
    "keel": lambda h, F: rms(8 * h + F(rms(h))),
    "deepnorm": lambda h, F: rms(8**0.25 * h + F(h)),
    "layernorm-scaling": lambda h, F: h + F(rms(h) / math.sqrt(2)),
    "orthogonal": lambda h, F: h + tangent(h, F(rms(h))),
    "ngpt-step": lambda h, F: R * unit(h + 0.05 * (R * unit(F(h)) - h)),
    "geonorm": lambda h, F: turn(h, tangent(h, F(h)) / 2),
    "sphere": lambda h, F: R * unit(h + tangent(h, F(h)) / 2),
    "proj-spheret": lambda h, F: R * unit(h + tangent(h, F(h)) / 2),
    "cay-spheret": lambda h, F: cayley(h, tangent(h, F(h)) / 2),
    "bounded-sphere": lambda h, F: R * unit(h + bounded(h, tangent(h, F(h)) / 2, math.pi / 8)),
}


def bounded(h, u, ratio):
    """u, no longer than `ratio` of h."""
    return u * torch.clamp(ratio * h.norm(dim=-1, keepdim=True) / u.norm(dim=-1, keepdim=True), max=1)


def cayley(h, u):
    rho = (h * h).sum(-1)[..., None, None]
    W = (u[..., :, None] * h[..., None, :] - h[..., :, None] * u[..., None, :]) / rho
    eye = torch.eye(D, dtype=h.dtype)
    return torch.linalg.solve(eye - W / 2, ((eye + W / 2) @ h[..., None])).squeeze(-1)


@pytest.mark.parametrize("name", NAMES)
def test_equals_its_equation(name):
    module = residual.make(name, D, index=3, depth=DEPTH).double()
    h = R * unit(stream(6))

    def small(x):
        # Short enough that GeoNorm's clamp at pi/4 does not bind.
        return 0.3 * branch()(x)

    torch.testing.assert_close(module(h, small), EQUATIONS[name](h, small), rtol=1e-6, atol=1e-6)


def test_geonorm_clamp_is_on_the_angle_before_the_decay():
    module = residual.make("geonorm", D, index=3, depth=DEPTH).double()
    h = R * unit(stream(6))
    out = module(h, lambda x: 100 * branch()(x))
    cos = (h * out).sum(-1) / D
    torch.testing.assert_close(cos, torch.full_like(cos, math.cos(math.pi / 4 / 2)))


@pytest.mark.parametrize("index", range(DEPTH))
def test_the_bounded_sphere_turns_no_further_than_its_share(index):
    """atan of pi/4 over the block's number, whatever the branch says; and it is a sphere with those options spelled out."""
    module, spelled = (
        residual.make(name, D, index=index, depth=DEPTH, **options).double()
        for name, options in [("bounded-sphere", {}), ("proj-spheret", dict(clamp=math.pi / 4, decay="harmonic", count="block"))]
    )
    h = R * unit(stream(6))

    def far(x):
        return 100 * branch()(x)

    assert torch.equal(module(h, far), spelled(h, far)) and torch.equal(module(h, branch()), spelled(h, branch()))
    cos = (h * module(h, far)).sum(-1) / D
    torch.testing.assert_close(cos.acos().tan(), torch.full_like(cos, math.pi / 4 / (index // 2 + 1)))


def test_geonorm_listing_defects():
    """The printed "harmonic" does not decay; "sqrt" does; a bias breaks the norm where the branch is silent."""

    def far(x):
        return 100 * branch()(x)

    def angle_at(index, **options):
        module = residual.make("geonorm", D, index=index, depth=24, listing=True, **options).double()
        h = R * unit(stream(6))
        return torch.acos(((h * module(h, far)).sum(-1) / D).clamp(-1, 1)).mean().item()

    assert angle_at(22, decay="harmonic") == pytest.approx(math.pi / 4)
    assert angle_at(22, decay="sqrt") == pytest.approx(math.pi / 4 / math.sqrt(12))
    paper = residual.make("geonorm", D, index=22, depth=24).double()
    h = R * unit(stream(6))
    assert torch.acos((h * paper(h, far)).sum(-1) / D).mean().item() == pytest.approx(math.pi / 4 / 12)
    broken = residual.make("geonorm", D, index=0, depth=24, listing=True, decay="sqrt").double()
    nn.init.constant_(broken.bias, 0.2)
    shrunk = broken(h, torch.zeros_like).norm(dim=-1) / h.norm(dim=-1)
    torch.testing.assert_close(shrunk, torch.full_like(shrunk, math.cos(0.2)))


def test_step_sizes_decay_by_sublayer_or_block():
    def alphas(**options):
        return [residual.make("sphere", D, index=i, depth=8, **options).step_size().item() for i in range(8)]

    assert alphas() == pytest.approx([1 / math.sqrt(l) for l in range(1, 9)])
    assert alphas(count="block") == pytest.approx([1 / math.sqrt(l) for l in (1, 1, 2, 2, 3, 3, 4, 4)])
    assert alphas(decay="harmonic", start=0.3) == pytest.approx([0.3 / l for l in range(1, 9)])
    assert alphas(decay="linear")[-1] == pytest.approx(1 / 8)


@pytest.mark.parametrize("name", NAMES)
def test_model_is_causal_to_the_bit(name):
    """Changing later tokens leaves earlier logits bit-equal; "orthogonal" modes elsewhere leaked through a mean."""
    config = TransformerConfig(
        vocab_size=31,
        context=16,
        layers=3,
        heads=2,
        width=16,
        norm="rms",
        positions="rope",
        residual=name,
        init_std=0.2,
    )
    torch.manual_seed(0)
    model = Transformer(config)
    tokens = torch.randint(31, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 7) % 31
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :10], b[:, :10])
    assert not torch.equal(a[:, 10:], b[:, 10:])


def test_init_scales_as_published():
    scales = {name: residual.make(name, D, index=0, depth=24) for name in NAMES}
    assert scales["pre-norm"].init_scale("output") == pytest.approx(24**-0.5)
    assert scales["pre-norm"].init_scale("query") == 1
    assert scales["deepnorm"].init_scale("value") == pytest.approx((8 * 12) ** -0.25)
    assert scales["deepnorm"].init_scale("query") == 1
    assert scales["layernorm-scaling"].init_scale("down") == 1


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: residual.make("spere", D, index=0, depth=4), "sphere"),
        (lambda: residual.make("sphere", D, index=0, depth=4, cuont="block"), "count"),
        (lambda: residual.make("sphere", D, index=4, depth=4), "depth counts sublayers"),
        (lambda: residual.make("sphere", D, index=0, depth=4, decay="sqr"), "sqrt"),
        (lambda: residual.make("sphere", D, index=0, depth=4, start=0.0), "positive"),
        (lambda: residual.make("proj-spheret", D, index=0, depth=4, p=3.0), "no option 'p'"),
        (lambda: residual.make("pre-norm", D, index=0, depth=4, norm="layr"), "layer"),
        (lambda: residual.make("pre-dyt", D, index=0, depth=4, norm="layr"), "layer"),
        (lambda: residual.make("pre-dyt", D, index=0, depth=4, eps=1e-6), "no option 'eps'"),
        (lambda: residual.make("geonorm", D, index=0, depth=4, listing=True, clamp=1.0), "listing"),
        (lambda: residual.make("geonorm", D, index=0, depth=4, clamp=-1.0), "positive"),
        (lambda: residual.stack("sphere", D, blocks=0), "at least one block"),
        (lambda: residual.stack("sphere", D, blocks=2, cuont="block"), "count"),
        (lambda: residual.stack("sphere", D, blocks=2)(stream(1), [branch()] * 3), "3 branches for a stack of 4"),
    ],
)
def test_wrong_use_is_told(call, words):
    with pytest.raises(UserError, match=words):
        call()


@pytest.fixture
def one_rank(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_shards_and_the_small_gradients_stay_right(name, one_rank):
    """fully_shard refuses 0-dim parameters, and once lost the gradients of shape (1,) ones."""
    from torch.distributed.fsdp import fully_shard

    config = TransformerConfig(vocab_size=31, context=8, layers=2, heads=2, width=8, norm="rms", residual=name)
    torch.manual_seed(0)
    plain = Transformer(config)
    sharded = copy.deepcopy(plain)
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    tokens = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(0))
    plain.loss(tokens, tokens).backward()
    F.cross_entropy(sharded(tokens).flatten(0, 1), tokens.flatten()).backward()
    for (key, a), (_, b) in zip(plain.named_parameters(), sharded.named_parameters()):
        torch.testing.assert_close(b.grad.full_tensor(), a.grad, msg=key)


def test_a_clamp_keeps_part_of_the_input_at_any_depth():
    """Each sublayer leaves cos(turn) of a direction it does not write to; with GeoNorm's decay the product has a floor,
    because the sum of 1 / l^2 has a bound. Without the clamp a large branch leaves nothing."""
    h = F.normalize(torch.randn(5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), dim=-1)

    def kept(depth: int, **options) -> float:
        left = 1.0
        for index in range(depth):
            join = residual.make("sphere", D, index=index, depth=depth, count="block", decay="harmonic", **options).double()
            out = join(h * D**0.5, lambda x: 1e3 * x.roll(1, -1))
            left *= F.cosine_similarity(h, out, dim=-1).min().item()
        return left

    assert kept(96, clamp=math.pi / 4) > 0.3 and kept(96) < 1e-30


@pytest.mark.parametrize("size", [0.1, 10.0])
def test_the_sphere_with_geonorm_s_decay_and_clamp_is_geonorm(size):
    options = {"p": math.inf, "count": "block", "decay": "harmonic", "clamp": math.pi / 4}
    mine = residual.make("sphere", D, index=5, depth=DEPTH, **options).double()
    theirs = residual.make("geonorm", D, index=5, depth=DEPTH).double()
    h = mine.entry()(torch.randn(4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(mine(h, lambda v: size * v.roll(1, -1)), theirs(h, lambda v: size * v.roll(1, -1)))


def test_the_smaller_of_cap_and_clamp_holds():
    for options, bound in (({"cap": 0.2, "clamp": 1.0}, 0.2), ({"cap": 2.0, "clamp": 1.0}, 0.5), ({"clamp": 1.0}, 0.5), ({}, None)):
        assert residual.make("sphere", D, index=3, depth=DEPTH, **options).cap == bound
    with pytest.raises(UserError, match="positive"):
        residual.make("sphere", D, index=0, depth=DEPTH, clamp=0.0)


@every
def test_a_stack_is_entry_joins_and_exit(name, options):
    made = residual.stack(name, D, blocks=3, **options).double()
    joins = [residual.make(name, D, index=i, depth=6, **options).double() for i in range(6)]
    h = joins[0].entry().double()(stream(5))
    for join in joins:
        h = join(h, branch())
    h = joins[-1].exit().double()(h)
    assert torch.equal(made(stream(5), [branch()] * 6), h)
    again = made.entry(stream(5))
    for join in made:
        again = join(again, branch())
    assert torch.equal(made.exit(again), h) and len(made) == 6 and made[5].index == 5
    own = sum(p.numel() for part in (*joins, joins[0].entry(), joins[-1].exit()) for p in part.parameters())
    assert sum(p.numel() for p in made.parameters()) == own


def test_a_stack_of_other_blocks():
    stack = residual.stack("layernorm-scaling", D, blocks=2, per_block=3)
    assert [join.count("block") for join in stack] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("name", ["sphere", "proj-spheret", "cay-spheret", "bounded-sphere", "geonorm", "ngpt-step"])
@pytest.mark.parametrize("option", ["norm", "eps"])
def test_a_norm_is_refused_where_there_is_none(name, option):
    assert option not in residual.options(name)
    with pytest.raises(UserError, match=f"no option '{option}'"):
        residual.make(name, D, index=0, depth=4, **{option: 1e-6})


@pytest.mark.parametrize("name", residual.names())
def test_options_of_the_wrong_type_or_size_are_told(name):
    """A module or a UserError, nothing else."""
    for key in residual.options(name):
        for value in (0, -1, 0.5, float("nan"), float("inf"), 10**25, 10**400, "x", None, [0.5], {}, True):
            try:
                made = residual.make(name, 8, index=0, depth=4, **{key: value})
            except UserError:
                continue
            assert isinstance(made, residual.Residual)
        with pytest.raises(UserError, match=f"{key} should be of type"):
            residual.make(name, 8, index=0, depth=4, **{key: [0.5]})
