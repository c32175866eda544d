"""The sphere against independent oracles, at the edges, and along its whole family."""

from __future__ import annotations

import math

import geoopt
import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import UserError
from gnomon.geometry import checks, sphere

FAMILY = [0.5, 1.0, 2.0, 3.0, 4.0, 7.5, math.inf]


def points(*shape, dtype=torch.float64, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    h, f = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return h.to(dtype), (f * spread).to(dtype)


@pytest.mark.parametrize("p", FAMILY)
@pytest.mark.parametrize("options", [{}, {"radius": 2.0}, {"cap": 0.5}, {"cap": 0.9, "radius": 3.0}])
def test_gradient(p, options):
    h, f = (x.requires_grad_() for x in points(2, 3))  # two rows: second derivatives of n numbers are n² passes
    alpha = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: sphere.step(*a, p=p, **options), (h, f, alpha))
    assert torch.autograd.gradgradcheck(lambda *a: sphere.step(*a, p=p, **options), (h, f, alpha))


@pytest.mark.parametrize("p", FAMILY)
@pytest.mark.parametrize("options", [{}, {"cap": 0.1, "radius": 2.0}])
def test_second_derivatives_are_finite_at_the_edges(p, options):
    h, f = points(3, 4)
    h[0], f[1], f[2] = 0, 0, 2 * h[2]
    h, f = h.requires_grad_(), f.requires_grad_()
    first = torch.autograd.grad(sphere.step(h, f, 0.3, p, **options).square().sum(), (h, f), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (h, f))
    assert all(g.isfinite().all() for g in (*first, *second))
    assert not any(g[0].any() for g in (*first, *second))


@pytest.mark.parametrize("p", [1.0, 3.0, math.inf])
@pytest.mark.parametrize("options", [{}, {"cap": 0.3, "radius": 2.0}])
def test_function_transforms(p, options):
    """torch.func gives what a loop and autograd give; forward mode, which is not offered, says so."""
    h, f = points(4, 3, 5)

    def step(h, f):
        return sphere.step(h, f, 0.7, p, **options)

    def loss(h, f):
        return step(h, f).pow(3).sum()

    torch.testing.assert_close(torch.func.vmap(step)(h, f), step(h, f))
    torch.testing.assert_close(torch.func.vmap(step, in_dims=(None, 0))(h[0], f), torch.stack([step(h[0], x) for x in f]))
    leaf = h.clone().requires_grad_()
    each = torch.func.vmap(torch.func.grad(loss))(h, f)
    torch.testing.assert_close(each, torch.autograd.grad(loss(leaf, f), leaf)[0])
    curved = torch.func.jacrev(torch.func.grad(loss))(h[0], f[0])
    torch.testing.assert_close(curved, torch.autograd.functional.hessian(lambda h: loss(h, f[0]), h[0]))
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(step, (h, f), (h, f))


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("cap", [None, 0.2])
def test_a_negative_step_turns_the_other_way(p, cap):
    h, f = points(4, 6)
    there, back = (sphere.step(h, f, sign * 0.9, p, cap=cap) for sign in (1, -1))
    away = sphere.tangent(h, f)
    assert ((there * away).sum(-1) > 0).all()
    torch.testing.assert_close((back * away).sum(-1), -(there * away).sum(-1))
    torch.testing.assert_close((back * h).sum(-1), (there * h).sum(-1))


@pytest.mark.parametrize("p", FAMILY)
def test_equals_the_readable_form(p):
    h, f = points(4, 6, 8)
    torch.testing.assert_close(sphere.step(h, f, 0.7, p), sphere.step_simple(h, f, 0.7, p))


def test_step_size_per_token_has_its_own_gradient():
    h, f = points(3, 4)
    alpha = torch.rand(3, 1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: sphere.step(h, f, a), (alpha,))


def test_cayley_equals_the_matrix_solve():
    """p = 2 is (I - W/2)^-1 (I + W/2) h with the skew W = (u h^T - h u^T) / rho, u the step."""
    h, f = points(6)
    u = 1.7 * sphere.tangent(h, f)
    W = (torch.outer(u, h) - torch.outer(h, u)) / h.dot(h)
    eye = torch.eye(6, dtype=torch.float64)
    expected = torch.linalg.solve(eye - W / 2, (eye + W / 2) @ h)
    torch.testing.assert_close(sphere.step(h, f, 1.7, p=2), expected)


def test_exponential_map_equals_geoopt():
    h, f = points(5, 7)
    h = h / h.norm(dim=-1, keepdim=True)
    v = sphere.tangent(h, f)
    torch.testing.assert_close(sphere.retract(h, v, math.inf), geoopt.Sphere().expmap(h, v))
    torch.testing.assert_close(sphere.tangent(h, f), geoopt.Sphere().proju(h, f))


def test_projection_equals_geoopt_retraction():
    h, f = points(5, 7)
    h = h / h.norm(dim=-1, keepdim=True)
    v = sphere.tangent(h, f)
    torch.testing.assert_close(sphere.retract(h, v, 1.0), geoopt.Sphere().retr(h, v))


@pytest.mark.parametrize("p", FAMILY)
@pytest.mark.parametrize("exponent", range(-8, 9, 2))
def test_family_against_mpmath(p, exponent):
    """Values and slopes in fp32 against 50 digits, for step ratios from 1e-8 to 1e8."""
    if p == math.inf and exponent > 3:
        pytest.skip("the angle of the exponential map wraps: fp32 has no digits of it left at beta = 1e4")
    t = torch.tensor([float(10.0 ** (2 * exponent))], dtype=torch.float32)
    C, sigma = sphere.family(t, p)
    dC, dsigma = sphere.family_slopes(t, C, sigma, p)
    with mpmath.workdps(50):
        exact = mpmath.mpf(t.item())

        def theta(t):
            return mpmath.sqrt(t) if p == math.inf else p * mpmath.atan(mpmath.sqrt(t) / p)

        def cos(t):
            return mpmath.cos(theta(t))

        def ratio(t):
            return mpmath.sin(theta(t)) / mpmath.sqrt(t)

        step = exact * mpmath.mpf(10) ** -12
        slopes = [(g(exact + step) - g(exact - step)) / (2 * step) for g in (cos, ratio)]
        values = [cos(exact), ratio(exact)]
    # theta carries one rounding of fp32, which the sine near a multiple of pi shows in full.
    slack = 4e-7 * float(theta(exact))
    assert float(C) == pytest.approx(float(values[0]), rel=1e-6, abs=slack)
    assert float(sigma) == pytest.approx(float(values[1]), rel=1e-6, abs=slack / math.sqrt(float(exact)))
    scale = 1 / float(exact)
    assert float(dC) == pytest.approx(float(slopes[0]), rel=1e-5, abs=slack * scale)
    assert float(dsigma) == pytest.approx(float(slopes[1]), rel=1e-5, abs=slack * scale / math.sqrt(float(exact)))


@pytest.mark.parametrize("p", FAMILY)
def test_order_is_two(p):
    assert checks.retraction_order(sphere, p=p) == pytest.approx(2, abs=0.1)


def test_order_of_a_broken_retraction_is_seen():
    class TooFar(sphere.Sphere):
        def move(self, h, v):
            return super().move(h, 1.1 * v)

    class Jumps(sphere.Sphere):
        def move(self, h, v):
            return super().move(h.roll(1, -1), v)

    assert checks.retraction_order(TooFar()) == pytest.approx(0, abs=0.1)
    assert checks.retraction_order(Jumps()) == pytest.approx(-1, abs=0.2)


@pytest.mark.parametrize("p", FAMILY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["zero branch", "zero step", "parallel", "tiny", "huge", "zero point"])
def test_edges_are_finite(p, dtype, case):
    h, f = points(3, 64, dtype=dtype)
    alpha = 1.0
    if case == "zero branch":
        f = torch.zeros_like(f)
    elif case == "zero step":
        alpha = 0.0
    elif case == "parallel":
        f = 3 * h
    elif case == "tiny":
        alpha = 1e-8
    elif case == "huge":
        alpha = 1e8
    elif case == "zero point":
        h = torch.zeros_like(h)
    h, f = h.requires_grad_(), f.detach().requires_grad_()
    a = torch.tensor([alpha], requires_grad=True)
    out = sphere.step(h, f, a, p=p, radius=8.0)
    out.float().square().sum().backward()
    for x in (out, h.grad, f.grad, a.grad):
        assert x.isfinite().all()
    expected = torch.zeros(3) if case == "zero point" else torch.full((3,), 8.0)
    torch.testing.assert_close(out.detach().float().norm(dim=-1), expected, rtol=2e-3, atol=0)
    if case == "zero point":
        assert not out.any() and not h.grad.any() and not f.grad.any() and not a.grad.any()
    if case in ("zero branch", "zero step", "tiny", "parallel"):
        direction = h.detach().float()
        torch.testing.assert_close(
            out.detach().float(), 8 * direction / direction.norm(dim=-1, keepdim=True), rtol=0, atol=5e-2
        )


def test_fp16_square_sum_does_not_overflow():
    """RMS 8.1 at D = 1024: the sum of squares is above fp16's 65504."""
    h = torch.full((2, 1024), 8.1, dtype=torch.float16)
    f = torch.randn(2, 1024).to(torch.float16)
    out = sphere.step(h, f, 0.3)
    torch.testing.assert_close(out.float().norm(dim=-1), h.float().norm(dim=-1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 1e-3)])
def test_norm_does_not_drift(p, dtype, bound):
    """500 steps: the bf16 stream stays at the radius because every step rescales to it."""
    generator = torch.Generator().manual_seed(0)
    h = sphere.project(torch.randn(8, 256, generator=generator), 16.0).to(dtype)
    for _ in range(500):
        h = sphere.step(h, torch.randn(8, 256, generator=generator).to(dtype), 0.1, p=p, radius=16.0)
    assert (h.float().norm(dim=-1) / 16 - 1).abs().max() < bound


def test_tangent_survives_cancellation():
    """f = 3h + 1e-3 w in fp32: the tangent part keeps five digits, and stays orthogonal at its own scale."""
    h, w = points(64, 1024)
    f = 3 * h + 1e-3 * w
    z = sphere.tangent(h.float(), f.float()).double()
    exact = sphere.tangent(h.float().double(), f.float().double())
    assert ((z - exact).norm() / exact.norm()) < 1e-4
    assert ((z * h).sum(-1).abs() / (z.norm(dim=-1) * h.norm(dim=-1))).max() < 1e-6


def test_step_size_gradient_over_many_bf16_tokens():
    """100,000 tokens in bf16 against fp64: the reduction runs in fp32."""
    h, f = points(100_000, 16, dtype=torch.bfloat16)
    g = points(100_000, 16, dtype=torch.bfloat16, seed=5)[0]
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        alpha = torch.full(
            (1,), 0.3, dtype=torch.float64 if dtype == torch.float64 else torch.float32, requires_grad=True
        )
        sphere.step(h.to(dtype), f.to(dtype), alpha, radius=4.0).backward(g.to(dtype))
        gradients.append(alpha.grad.item())
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-3)


@settings(max_examples=20)
@given(
    st.floats(0.05, 40) | st.just(math.inf),
    st.floats(-8, 8),
    st.integers(2, 40),
    st.integers(0, 10_000),
)
def test_norm_kept_and_turn_is_planar(p, log_ratio, dim, seed):
    h, f = points(dim, seed=seed)
    z = sphere.tangent(h, f)
    beta = 10.0**log_ratio if p != math.inf else min(10.0**log_ratio, 3.0)
    out = sphere.step(h, f, float(beta * h.norm() / z.norm()), p)
    assert float(out.norm() / h.norm()) == pytest.approx(1, abs=1e-9)
    # Nothing leaves the plane of h and z.
    basis = torch.stack((h / h.norm(), z / z.norm()))
    assert float((out - basis.T @ (basis @ out)).norm() / h.norm()) < 1e-7
    # The turn is theta = p atan(beta / p).
    theta = beta if p == math.inf else p * math.atan(beta / p)
    assert float(basis[0] @ out / h.norm()) == pytest.approx(math.cos(theta), abs=1e-7)


def test_limits_of_the_family():
    h, f = points(4, 8)
    torch.testing.assert_close(sphere.step(h, f, 0.8, 1e6), sphere.step(h, f, 0.8, math.inf))
    torch.testing.assert_close(sphere.step(h, f, 0.8, 1e-6), h, rtol=0, atol=1e-4)


def test_backward_saves_two_vectors_and_three_scalars():
    h, f = (x.requires_grad_() for x in points(128, 64, dtype=torch.float32))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        sphere.step(h, f, 0.5)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    vector = 128 * 64 * 4
    assert h.untyped_storage().data_ptr() in storages and f.untyped_storage().data_ptr() in storages
    assert sum(storages.values()) <= 2 * vector + 3 * 128 * 4 + 64


@pytest.mark.parametrize(
    "call",
    [
        lambda h: sphere.step(h, h, p=0),
        lambda h: sphere.step(h, h, p=-1),
        lambda h: sphere.step(h, h, radius=0.0),
        lambda h: sphere.step(h, h, cap=-1.0),
        lambda h: sphere.step(h, h[:, :2]),
        lambda h: sphere.step(h, h, torch.ones(3)),
    ],
)
def test_wrong_use_is_told(call):
    with pytest.raises(UserError):
        call(torch.randn(2, 3))


def test_project_at_zero_sends_no_gradient():
    x = torch.zeros(2, 4, requires_grad=True)
    out = sphere.project(x, 3.0)
    out.sum().backward()
    assert not out.any() and not x.grad.any()
