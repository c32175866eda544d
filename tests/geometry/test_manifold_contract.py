"""What every weight manifold keeps, whatever its shape and dtype; and how the paper's DGram differs."""

from __future__ import annotations

import geoopt
import numpy as np
import pymanopt
import pytest
import torch

import gnomon
from gnomon.errors import UserError
from gnomon.geometry import checks
from gnomon.geometry.manifolds import MANIFOLDS, from_dict, named
from gnomon.geometry.norm_manifolds import largest_singular_value

VALUES = {
    "stiefel": gnomon.Stiefel(),
    "stiefel-radius": gnomon.Stiefel(radius=0.5),
    "dgram": gnomon.DGram(),
    "dgram-cap": gnomon.DGram(floor=0.2, cap=3.0),
    "oblique": gnomon.Oblique(),
    "euclidean": gnomon.Euclidean(),
    "oblique-paper": gnomon.Oblique(paper=True),
    "sphere": gnomon.Sphere(),
    "sphere-least": gnomon.Sphere(least=0.5),
    "spectral-ball": gnomon.SpectralBall(radius=2.5),
    "spectral-sphere": gnomon.SpectralSphere(radius=0.5),
}
SHAPES = {"tall": (24, 8), "wide": (8, 24), "square": (16, 16), "odd": (15, 15), "vector": (12, 1)}
every = pytest.mark.parametrize("manifold", VALUES.values(), ids=VALUES)
shaped = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def point(manifold, shape, dtype=torch.float64, seed=1):
    return manifold.random(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@every
@shaped
def test_retraction_has_first_order_at_least(manifold, shape):
    if shape == (12, 1) and isinstance(manifold, gnomon.DGram):
        assert checks.retraction_order(manifold, shape) == float("inf")  # one column constrains nothing
    else:
        assert checks.retraction_order(manifold, shape) > 0.9


def test_the_papers_dgram_retraction_is_none():
    assert checks.retraction_order(gnomon.DGram(paper=True)) == pytest.approx(-1, abs=0.15)
    W = torch.linalg.qr(gaussian(6, 3))[0] * torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(gnomon.DGram().retract(W), W)
    assert not torch.allclose(gnomon.DGram(paper=True).retract(W), W)


@every
@shaped
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_random_points_and_retracted_ones_are_feasible(manifold, shape, dtype, bound):
    W = point(manifold, shape, dtype)
    assert W.dtype == dtype and manifold.violation(W) < bound
    moved = manifold.retract(W + 0.1 * gaussian(*shape, dtype=dtype))
    assert moved.dtype == dtype and manifold.violation(moved) < bound


@every
@shaped
def test_tangent_projection_is_a_projection_and_symmetric(manifold, shape):
    W, A, B = point(manifold, shape), gaussian(*shape), gaussian(*shape, seed=5)
    P = manifold.tangent(W, A)
    torch.testing.assert_close(manifold.tangent(W, P), P)
    torch.testing.assert_close((P * B).sum(), (A * manifold.tangent(W, B)).sum())


@every
@shaped
def test_tangents_keep_the_constraint_to_first_order(manifold, shape):
    W = point(manifold, shape)
    X = manifold.tangent(W, gaussian(*shape))
    small = [manifold.violation(W + t * X).item() for t in (1e-2, 1e-3)]
    assert small[1] < small[0] / 50 + 1e-9


@every
def test_batches_are_the_matrices_one_by_one(manifold):
    W = torch.stack([point(manifold, (12, 6), seed=i) for i in range(3)])
    M = gaussian(3, 12, 6)
    for i in range(3):
        torch.testing.assert_close(manifold.retract(W + M)[i], manifold.retract(W[i] + M[i]))
        torch.testing.assert_close(manifold.tangent(W, M)[i], manifold.tangent(W[i], M[i]))
        torch.testing.assert_close(manifold.violation(W + M)[i], manifold.violation(W[i] + M[i]))


@every
def test_plain_data_makes_the_same_manifold(manifold):
    assert from_dict(manifold.to_dict()) == manifold
    with pytest.raises(UserError, match="columns"):
        from_dict({**manifold.to_dict(), "colums": "in"})
    with pytest.raises(UserError, match="stiefel"):
        from_dict({"name": "stifel"})
    assert manifold.name in MANIFOLDS


@every
@shaped
def test_columns_may_be_permuted(manifold, shape):
    """No sorting: permuting the constrained columns permutes the result."""
    X = gaussian(*shape)
    axis = 0 if manifold.turned(shape) else 1
    order = torch.randperm(shape[axis], generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        manifold.retract(X).index_select(axis, order), manifold.retract(X.index_select(axis, order)), rtol=1e-6, atol=1e-8
    )


def test_near_and_far_retraction_agree_for_small_steps():
    for manifold in (gnomon.Stiefel(), gnomon.DGram()):
        W = point(manifold, (96, 32), torch.float32)
        X = manifold.tangent(W, gaussian(96, 32, dtype=torch.float32))
        moved = W + 0.02 * X / torch.linalg.matrix_norm(X, 2)
        torch.testing.assert_close(manifold.retract(moved, near=True), manifold.retract(moved), rtol=0, atol=2e-5)


def test_geoopt_and_pymanopt_agree():
    W, M = point(gnomon.Stiefel(), (9, 4)), gaussian(9, 4)
    torch.testing.assert_close(gnomon.Stiefel().tangent(W, M), geoopt.EuclideanStiefel().proju(W, M))
    stiefel = pymanopt.manifolds.Stiefel(9, 4)
    expected = torch.from_numpy(stiefel.projection(W.numpy(), M.numpy()))
    torch.testing.assert_close(gnomon.Stiefel().tangent(W, M), expected)
    V = point(gnomon.Oblique(), (9, 4))
    oblique = pymanopt.manifolds.Oblique(9, 4)
    torch.testing.assert_close(gnomon.Oblique().tangent(V, M), torch.from_numpy(oblique.projection(V.numpy(), M.numpy())))
    torch.testing.assert_close(
        gnomon.Oblique().retract(V + 0.1 * M), torch.from_numpy(oblique.retraction(V.numpy(), 0.1 * M.numpy()))
    )
    ours, sphere, U = gnomon.Sphere(), pymanopt.manifolds.Sphere(9, 4), W / W.norm()
    torch.testing.assert_close(3 * ours.tangent(U, M), ours.tangent(3 * U, 3 * M))
    torch.testing.assert_close(ours.tangent(U, M), torch.from_numpy(sphere.projection(U.numpy(), M.numpy())))
    torch.testing.assert_close(ours.move(U, 0.1 * M), torch.from_numpy(sphere.retraction(U.numpy(), 0.1 * M.numpy())))


@pytest.mark.parametrize("manifold", [gnomon.Stiefel(columns="in"), gnomon.DGram(columns="in")])
def test_the_impossible_orientation_is_told(manifold):
    with pytest.raises(UserError, match="short"):
        manifold.retract(gaussian(4, 9))


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_are_not_hidden(manifold, bad):
    W = gaussian(8, 4)
    W[2, 1] = bad
    assert not manifold.retract(W).isfinite().all()
    with pytest.raises(UserError, match="NaN or infinite"):
        manifold.project(W)


@shaped
@pytest.mark.parametrize("radius", [0.3, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_a_spectral_ball_cuts_what_is_above_and_nothing_else(shape, radius, dtype, bound):
    """Against numpy's singular value decomposition with the values clipped."""
    ball, W = gnomon.SpectralBall(radius=radius), gaussian(*shape, dtype=dtype)
    U, s, V = np.linalg.svd(W.double().numpy(), full_matrices=False)
    expected = torch.from_numpy((U * s.clip(max=radius)) @ V)
    held = ball.retract(W)
    torch.testing.assert_close(held.double(), expected, rtol=0, atol=20 * bound)
    assert ball.violation(held.double()) < bound and torch.equal(ball.retract(held, near=True), held)
    assert torch.equal(held, W) == (s[0] <= radius)


@shaped
@pytest.mark.parametrize("radius", [0.3, 2.0])
def test_a_step_off_the_spectral_ball_is_brought_back_from_near_by(shape, radius):
    ball = gnomon.SpectralBall(radius=radius)
    W = ball.retract(gaussian(*shape, dtype=torch.float32))
    A = gaussian(*shape, seed=4, dtype=torch.float32)
    moved = W + 0.1 * radius * A / torch.linalg.matrix_norm(A, 2)
    near = ball.retract(moved, near=True)
    assert ball.violation(near.double()) < 1e-5
    torch.testing.assert_close(near, ball.retract(moved), rtol=0, atol=2e-5 * radius)


@shaped
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_the_largest_singular_value_however_close_the_next(shape, dtype, bound):
    for gap in (1.0, 1e-3, 1e-6, 0.0):
        Q = gnomon.Stiefel().random(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        X = Q if shape[0] >= shape[1] else Q.T
        X = X * torch.linspace(1, 1 - gap, min(shape), dtype=torch.float64) * 1e-3
        for Y in (X, X.T):
            found = largest_singular_value(Y.to(dtype)).item()
            assert found == pytest.approx(np.linalg.svd(Y.numpy(), compute_uv=False)[0], rel=bound)
    assert largest_singular_value(torch.zeros(2, 3, 3)).flatten().tolist() == [0, 0]


@shaped
@pytest.mark.parametrize("lr", [1e-3, 0.02, 0.5])
def test_a_step_on_the_sphere_is_hyperballs(shape, lr):
    """Against the formula of arXiv 2606.16899 in numpy; the length is relative whatever the sizes of W and A."""
    W, A = (gaussian(*shape, seed=seed).numpy() for seed in (1, 2))
    R = np.linalg.norm(W)
    moved = W - lr * R * A / np.linalg.norm(A)
    expected = R * moved / np.linalg.norm(moved)
    for size, length in ((1.0, 1.0), (1e-3, 1e4)):
        given = torch.from_numpy(length * A)
        found = gnomon.Sphere().step(torch.from_numpy(size * W), given, lr, 7.0)
        np.testing.assert_allclose(found.numpy(), size * expected, rtol=1e-12, atol=1e-15)


def test_the_sphere_keeps_a_norm_over_many_steps():
    """Nothing is stored beside the matrix, so rounding must not add up."""
    W = gaussian(2, 48, 32, dtype=torch.float32) * torch.tensor([1.0, 30.0])[:, None, None]
    before = torch.linalg.matrix_norm(W.double())
    for step in range(300):
        W = gnomon.Sphere().step(W, gaussian(2, 48, 32, seed=step, dtype=torch.float32), 0.02)
    torch.testing.assert_close(torch.linalg.matrix_norm(W.double()), before, rtol=1e-5, atol=0)


@pytest.mark.parametrize("start", [0.0, 1e-3, 0.3, 1.0, 3.0])
def test_a_short_matrix_grows_onto_its_sphere_and_stays(start):
    """least=1 of 24 outputs: a length of sqrt(24). What is longer keeps its own."""
    sphere, R = gnomon.Sphere(least=1.0), 24**0.5
    W = gaussian(24, 8)
    W = W * (start * R / W.norm())
    lengths, fixed = [W.norm().item()], gaussian(24, 8, seed=9)
    for step in range(60):
        before, A = W.clone(), fixed if step % 2 else gaussian(24, 8, seed=step)
        W = sphere.step(W, A.clone(), 0.1, 5.0)
        lengths.append(W.norm().item())
        # On the way the step is plain, 0.1 R long.
        if lengths[-1] < R * (1 - 1e-9):
            torch.testing.assert_close(W, before - 0.1 * R * A / A.norm())
    assert lengths[-1] == pytest.approx(max(start, 1.0) * R, rel=1e-9)
    arrived = next(i for i, length in enumerate(lengths) if length >= R * (1 - 1e-9))
    assert lengths[arrived:] == pytest.approx([lengths[-1]] * len(lengths[arrived:]), rel=1e-9)
    assert (arrived == 0) == (start >= 1)


@pytest.mark.parametrize("manifold", [gnomon.Sphere(), gnomon.SpectralSphere(radius=3.0)], ids=lambda m: m.name)
def test_zeros_in_a_batch_stay_until_they_are_placed(manifold):
    W = torch.stack([gaussian(12, 8), torch.zeros(12, 8, dtype=torch.float64)])
    assert manifold.violation(W)[1] == 1 and not manifold.retract(W)[1].any()
    stepped = manifold.step(W.clone(), 0 * W, 0.1)
    torch.testing.assert_close(stepped[0], manifold.retract(W)[0])
    assert not stepped[1].any()
    placed = manifold.project(W, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(placed[0], manifold.retract(W)[0])
    assert placed[1].any() and (manifold.violation(placed) < 1e-10).all()


def test_manifolds_by_name_class_and_value():
    for name, kind in MANIFOLDS.items():
        assert named(name) == named(kind) == named(kind()) == kind()
    for wrong, words in (("stifel", "stiefel"), (3, "a manifold is a value"), (torch.nn.Linear, "a manifold is a value")):
        with pytest.raises(UserError, match=words):
            named(wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gnomon.SpectralBall(radius=0.0),
        lambda: gnomon.Sphere(least=-1.0),
        lambda: gnomon.DGram(cap=2.0, paper=True),
        lambda: gnomon.Stiefel(radius=0.0),
    ],
)
def test_settings_that_cannot_be_are_told(make):
    with pytest.raises(UserError):
        make()
