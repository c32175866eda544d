"""Leading subspaces, angles and chance levels, against float64 SVD, mpmath and sampling."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import UserError
from gnomon.geometry import subspace


def exact(W, k=None):
    """The readable form of `leading` and `spectrum`: rows are vectors."""
    U, sigma, V = torch.linalg.svd(W.double(), full_matrices=False)
    return U.T[:k], sigma[:k], V[:k]


def spiked(M, N, spikes, seed=0, dtype=torch.float32):
    """A random bulk with edge 2 at most, plus spikes of the given singular values."""
    g = torch.Generator().manual_seed(seed)
    r = len(spikes)
    U = torch.linalg.qr(torch.randn(M, r, generator=g))[0]
    V = torch.linalg.qr(torch.randn(N, r, generator=g))[0]
    bulk = torch.randn(M, N, generator=g) / max(M, N) ** 0.5
    return (bulk + U * torch.tensor(spikes) @ V.T).to(dtype)


SPIKES = [3.33, 3.28, 3.0, 2.95, 2.8, 2.75, 2.7, 2.6]


@pytest.mark.parametrize("shape", [(320, 320), (512, 224), (224, 512), (200, 800)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_leading_is_the_exact_answer(shape, dtype):
    W = spiked(*shape, SPIKES, dtype=dtype)
    U, sigma, V = exact(W, 8)
    at = subspace.leading(W, 8)
    assert at.U_kM.shape == (8, shape[0]) and at.V_kN.shape == (8, shape[1])
    assert float(at.residual_k.max()) <= 1e-4
    assert torch.allclose(at.sigma_k, sigma, rtol=1e-6)
    assert float(subspace.principal_angles(at.V_kN, V).max()) < 1e-3
    assert float(subspace.principal_angles(at.U_kM, U).max()) < 1e-3
    assert abs(float(at.V_kN[0].double() @ V[0])) > 1 - 1e-6  # gap 1.015
    assert at.norm == pytest.approx(float(W.double().norm()), rel=1e-6)
    assert at.gap == pytest.approx(float(sigma[0] / sigma[1]), rel=1e-5)


def test_the_residual_is_the_one_it_says():
    W = spiked(600, 400, SPIKES)
    at = subspace.leading(W, 8, tol=1e-2)
    U, V = at.U_kM.double(), at.V_kN.double()
    true = (U @ W.double() - at.sigma_k[:, None] * V).norm(dim=1) / at.sigma_k[0]
    assert float(true.max()) > 1e-5, "stopped too late for the test to see anything"
    assert torch.allclose(at.residual_k, true, rtol=0.25, atol=2e-6)


def test_vectors_are_orthonormal_and_the_call_is_deterministic():
    W = spiked(700, 300, SPIKES)
    a, b = subspace.leading(W, 8), subspace.leading(W, 8)
    for rows in (a.U_kM, a.V_kN):
        assert torch.allclose(rows @ rows.T, torch.eye(8), atol=1e-5)
    assert torch.equal(a.V_kN, b.V_kN) and torch.equal(a.U_kM, b.U_kM)


def test_transposed_storage_gives_the_same():
    W = spiked(640, 256, SPIKES, dtype=torch.bfloat16)
    a, b = subspace.leading(W, 4), subspace.leading(W.T.contiguous().T, 4)
    assert float(subspace.principal_angles(a.V_kN, b.V_kN).max()) < 1e-3
    assert torch.allclose(a.sigma_k, b.sigma_k, rtol=1e-6)


def test_a_flat_spectrum_converges_too():
    W = torch.randn(400, 400, generator=torch.Generator().manual_seed(1))
    at = subspace.leading(W, 8)
    assert float(at.residual_k.max()) <= 1e-4
    assert torch.allclose(at.sigma_k, exact(W, 8)[1], rtol=1e-6)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_low_rank_like_a_lora_update(rank):
    g = torch.Generator().manual_seed(rank)
    W = torch.randn(500, rank, generator=g) @ torch.randn(rank, 400, generator=g)
    at = subspace.leading(W, 8)
    U, sigma, V = exact(W, rank)
    assert torch.allclose(at.sigma_k[:rank], sigma, rtol=1e-5)
    assert float(at.sigma_k[rank:].sum()) < 1e-4 * float(sigma[0])
    assert float(subspace.principal_angles(at.V_kN[:rank], V).max()) < 1e-3
    assert torch.isfinite(at.U_kM).all() and torch.isfinite(at.V_kN).all()


@pytest.mark.parametrize("tier", [subspace.leading, subspace.spectrum])
def test_zero_identity_and_orthogonal(tier):
    zero = tier(torch.zeros(300, 300))
    assert zero.norm == 0 and zero.gap == 1 and not zero.V_kN.any() and zero.stable_rank == 0
    flat = tier(torch.linalg.qr(torch.randn(300, 300, generator=torch.Generator().manual_seed(0)))[0])
    assert flat.gap == pytest.approx(1, abs=1e-5)
    assert tier(torch.eye(300)).stable_rank == pytest.approx(300, rel=1e-5)


@pytest.mark.parametrize("tier", [subspace.leading, subspace.spectrum])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_entries_are_counted_not_measured(tier, bad):
    W = torch.randn(300, 200)
    W[3, 4] = W[7, 8] = bad
    with pytest.raises(UserError, match="2 of 60000 entries"):
        tier(W)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (2, 0)])
def test_not_a_matrix(shape):
    with pytest.raises(UserError):
        subspace.leading(torch.zeros(shape))
    with pytest.raises(UserError, match="int64"):
        subspace.leading(torch.ones(3, 3).long())


@settings(max_examples=8)
@given(st.floats(-30, 30), st.booleans())
def test_scale_and_sign_do_not_matter(exponent, negative):
    W = spiked(256, 224, SPIKES)
    factor = 10.0**exponent * (-1 if negative else 1)
    a, b = subspace.leading(W, 4), subspace.leading(W.double() * factor, 4)
    assert float(subspace.principal_angles(a.V_kN, b.V_kN).max()) < 1e-3
    assert torch.allclose(a.sigma_k * abs(factor), b.sigma_k, rtol=1e-5)


@pytest.mark.parametrize("shape", [(96, 40), (40, 96), (64, 64)])
def test_spectrum_is_the_svd(shape):
    W = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    U, sigma, V = exact(W)
    at = subspace.spectrum(W)
    assert torch.allclose(at.sigma_k, sigma, rtol=1e-6)
    assert torch.allclose((at.U_kM.double() * U).sum(1).abs(), torch.ones_like(sigma), atol=1e-5)
    assert torch.allclose((at.U_kM.T * at.sigma_k.float() @ at.V_kN), W, atol=1e-4)


def test_warm_start_saves_steps_and_changes_nothing(monkeypatch):
    W = spiked(512, 512, SPIKES)
    steps = []
    plain = subspace._gram_times
    monkeypatch.setattr(subspace, "_gram_times", lambda *a: steps.append(1) or plain(*a))
    cold = subspace.leading(W, 8)
    cold_steps, steps[:] = len(steps), []
    warm = subspace.leading(W + 1e-3 * torch.randn(512, 512) / 512**0.5, 8, start=cold.V_kN)
    assert len(steps) < cold_steps
    assert float(subspace.principal_angles(cold.V_kN, warm.V_kN).max()) < 0.02


def test_principal_angles_are_exact_when_tiny():
    g = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(64, 4, generator=g, dtype=torch.float64))[0].T
    turns = torch.tensor([1e-7, 1e-4, 0.3, 1.5], dtype=torch.float64)
    B = Q[:2].repeat(2, 1)
    A, C = Q[:2], Q[2:]
    B = torch.cos(turns[1:3])[:, None] * A + torch.sin(turns[1:3])[:, None] * C
    assert torch.allclose(subspace.principal_angles(A, B), turns[1:3], atol=1e-9)
    B = torch.cos(turns[::3])[:, None] * A + torch.sin(turns[::3])[:, None] * C
    assert torch.allclose(subspace.principal_angles(A, B), turns[::3], rtol=1e-6, atol=0)
    assert subspace.overlap(A, B) == pytest.approx(float(torch.cos(turns[::3]).square().mean()))


@pytest.mark.parametrize("dim", [2, 7, 256, 4096, 28672])
def test_cosine_null_against_an_integral(dim):
    # The cosine of two random directions has density (1 - t^2)^((d-3)/2) / B(1/2, (d-1)/2).
    mpmath.mp.dps = 40
    beta = mpmath.beta(mpmath.mpf(1) / 2, mpmath.mpf(dim - 1) / 2)
    mean = 2 / beta / (dim - 1)  # the integral of t (1-t^2)^((d-3)/2) over [0, 1] is 1/(d-1)
    null = subspace.cosine_null(dim)
    assert null.mean == pytest.approx(float(mean), rel=1e-9)
    assert null.sd == pytest.approx(float(mpmath.sqrt(mpmath.mpf(1) / dim - mean**2)), rel=1e-6)


def test_null_levels_against_sampling():
    d, k, n = 48, 4, 600
    g = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(n, 2, d, d, generator=g, dtype=torch.float64))[0]
    A, B = Q[:, 0, :k], Q[:, 1, :k]
    shared = (A @ B.mT).square().sum((1, 2)) / k
    null = subspace.overlap_null(d, k)
    assert float(shared.mean()) == pytest.approx(null.mean, rel=0.02)
    assert float(shared.std()) == pytest.approx(null.sd, rel=0.1)
    spectrum = torch.arange(d, dtype=torch.float64) - (d - 1) / 2
    gram = Q[:, 0] * spectrum @ Q[:, 0].mT
    other = Q[:, 1] * spectrum.flip(0) ** 3 @ Q[:, 1].mT
    cosine = (gram * other).sum((1, 2)) / gram.flatten(1).norm(dim=1) / other.flatten(1).norm(dim=1)
    assert float(cosine.std()) == pytest.approx(subspace.gram_null(d).sd, rel=0.1)
    flat = (Q[:, 0] * Q[:, 1]).sum((1, 2)) / d
    assert float(flat.std()) == pytest.approx(subspace.frobenius_null(d, d).sd, rel=0.1)


def test_angle_null_is_the_edge():
    d, k = 512, 64
    g = torch.Generator().manual_seed(0)
    A, B = (torch.linalg.qr(torch.randn(d, k, generator=g))[0].T for _ in range(2))
    assert float(subspace.principal_angles(A, B)[0]) == pytest.approx(subspace.angle_null(d, k), abs=0.03)
