"""The polar factor by every method: against a float64 SVD, at the edges, and what its building blocks promise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import UserError
from gnomon.geometry import polar as P
from gnomon.geometry.minimax import polar_express

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
EXACT = ("precise", "svd", "gram")  # the others make directions: singular values near 1, not at it
SHAPES = [(40, 16), (16, 40), (24, 24), (33, 17), (17, 33), (9, 1), (1, 9), (1, 1), (2, 3, 20, 12), (2, 3, 12, 20)]

# Largest |U - U V^T|_2 for singular values in [0.05, 1]. In bfloat16 the rounding of the result is most of it.
DISTANCE = {
    "precise": {F64: 1e-12, F32: 1e-5, BF16: 1e-2},
    "svd": {F64: 1e-12, F32: 1e-6, BF16: 1e-2},
    "gram": {F64: 1e-12, F32: 1e-3, BF16: 1e-2},
    "polar-express": dict.fromkeys((F64, F32, BF16), 0.14),
    "newton-schulz": dict.fromkeys((F64, F32, BF16), 0.35),
}
# Where the singular values of the result lie, for the same input in float32.
INTERVAL = {
    "precise": (1 - 1e-6, 1 + 1e-6),
    "svd": (1 - 1e-6, 1 + 1e-6),
    "gram": (1 - 1.1e-5, 1 + 1e-6),
    "polar-express": (0.86, 1.14),
    "newton-schulz": (0.65, 1.25),
}
methods = pytest.mark.parametrize("method", P.METHODS)
roots = pytest.mark.parametrize("method", ["zolotarev", "newton-schulz"])


def gaussian(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def graded(m, n, least, dtype=F64, batch=(), seed=0):
    """Singular values log-uniform in [least, 1]."""
    U, _, Vh = torch.linalg.svd(gaussian(*batch, m, n, seed=seed), full_matrices=False)
    return ((U * torch.logspace(0, math.log10(least), min(m, n), dtype=F64)) @ Vh).to(dtype)


def exact(X):
    U, _, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    return U @ Vh


def size(X):
    """Spectral norm, the largest in the batch."""
    return float(torch.linalg.matrix_norm(X.double(), 2).max())


def violation(X):
    return size(X.mT @ X - torch.eye(X.size(-1), dtype=X.dtype))


@methods
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_polar_is_the_factor_svd_gives(method, dtype, shape):
    X = graded(*shape[-2:], 0.05, dtype, shape[:-2])
    U = P.polar(X, method)
    assert U.dtype == dtype and U.shape == X.shape and U.is_contiguous()
    assert size(U - exact(X)) < DISTANCE[method][dtype]


@methods
def test_singular_values_end_in_the_interval_of_the_method(method):
    s = torch.linalg.svdvals(P.polar(graded(300, 100, 0.05, F32), method).double())
    low, high = INTERVAL[method]
    assert low < s.min() and s.max() < high
    if method not in EXACT:
        assert s.max() - s.min() > 0.1  # they are cheaper because they do not converge


def test_a_number_becomes_its_sign():
    for method in EXACT:
        for value in (-3.0, 2.5, -1e-20):
            assert float(P.polar(torch.tensor([[value]]), method)) == pytest.approx(math.copysign(1, value), abs=2e-5)


@pytest.mark.parametrize("dtype, least", [(F32, 1e-5), (F64, 1e-11)], ids=str)
def test_precise_resolves_ill_conditioned_matrices(dtype, least):
    s = torch.linalg.svdvals(P.polar(graded(128, 64, least, dtype)).double())
    assert (s - 1).abs().max() < (1e-5 if dtype == F32 else 1e-10)
    s = torch.linalg.svdvals(P.polar(graded(128, 64, least / 10, dtype)).double())
    assert s.min() > 0.99


@pytest.mark.parametrize("dtype, off", [(F32, 1.2e-5), (F64, 1e-12)], ids=str)
def test_gram_resolves_what_lies_above_its_lower_end(dtype, off):
    X = graded(96, 48, 1e-3, dtype)
    X = P.unit(X)
    S = torch.linalg.svdvals(X.double())
    resolved = S > 2.1e-3 * torch.linalg.matrix_norm(X.double().mT @ X.double()).sqrt()
    assert resolved.sum() > 30 and (~resolved).sum() > 3
    U, V = torch.linalg.svd(X.double(), full_matrices=False)[::2]
    lifted = (U.mT @ P.polar(X, "gram").double() @ V.mT).diagonal()
    s = torch.linalg.svdvals(P.polar(X, "gram").double())
    assert (s[: resolved.sum()] - 1).abs().max() < off
    assert s.max() < 1 + 1e-6 and (lifted[~resolved] > 0).all()
    assert (lifted[~resolved].diff() < 0).all(), "what is not resolved stays in order"


@pytest.mark.parametrize("n", [131, 260, pytest.param(512, marks=pytest.mark.slow)])
def test_gram_stays_in_the_unit_ball_however_ill_conditioned(n):
    for seed in range(2 if n < 512 else 1):
        for least in (1e-5, 1e-8):
            assert size(P.polar(graded(2 * n, n, least, F32, seed=seed), "gram")) < 1.001


@pytest.mark.parametrize(
    "method, steps", [("newton-schulz", None), ("newton-schulz", 3), ("polar-express", None), ("polar-express", 7)]
)
def test_quintics_act_on_the_singular_values(method, steps):
    """The scalar form of the iteration, in float64."""
    X = graded(30, 20, 0.01)
    U, s, Vh = torch.linalg.svd(X, full_matrices=False)
    s = s / s.norm()
    triples = [P.MUON_QUINTIC] * (steps or 5) if method == "newton-schulz" else list(polar_express(1e-3, steps or 5))
    for i, (a, b, c) in enumerate(triples):
        x = s if method == "newton-schulz" or i == len(triples) - 1 else s / 1.001
        s = a * x + b * x**3 + c * x**5
    assert size(P.polar(X, method, steps=steps) - (U * s) @ Vh) < 1e-12


def test_dtype_is_the_precision_of_the_products():
    X = graded(40, 20, 0.1, F32)
    coarse, fine = (size(P.polar(X, "polar-express", steps=10, dtype=d) - exact(X)) for d in (None, F32))
    assert fine < 1e-4 and coarse > 10 * fine


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32), (65, 33), (5, 1), (256, 96)])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_newton_schulz_is_torch_muons_to_the_bit(shape, dtype):
    from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _zeropower_via_newtonschulz

    G = gaussian(*shape, dtype=dtype)
    theirs = _zeropower_via_newtonschulz(G.clone(), (DEFAULT_A, DEFAULT_B, DEFAULT_C), 5, 1e-7)
    assert torch.equal(P.polar(G, "newton-schulz").bfloat16(), theirs)


@methods
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_zero_is_zero_also_inside_a_batch(method, dtype):
    assert not P.polar(torch.zeros(5, 3, dtype=dtype), method).any()
    X = graded(10, 6, 0.2, dtype, (3,))
    X[1] = 0
    U = P.polar(X, method)
    assert not U[1].any()
    assert size((U - P.polar(X, method))[::2]) == 0 and size(U[::2] - exact(X[::2])) < DISTANCE[method][dtype]


@methods
@pytest.mark.parametrize("kind", ["rank one", "columns twice", "zero columns"])
def test_rank_deficient_matrices_keep_their_span(method, kind):
    X = {
        "rank one": torch.outer(gaussian(12), gaussian(6, seed=1)),
        "columns twice": gaussian(12, 3).repeat(1, 2),
        "zero columns": gaussian(12, 6) * (torch.arange(6) > 1),
    }[kind]
    U = P.polar(X, method)
    left, S, right = torch.linalg.svd(X, full_matrices=False)
    kept = S > 1e-10 * S[0]
    on_span = left[:, kept].mT @ U @ right[kept].mT
    assert size(on_span - torch.eye(int(kept.sum()), dtype=F64)) < (1e-9 if method in EXACT else 0.35)
    assert size(U) < (1 + 1e-9 if method in EXACT else 1.25)
    if kind == "zero columns":
        assert size(U @ right[~kept].mT) < 1e-12
    # Rounded to float32 the null space is only nearly null, and may be lifted, but never past 1.
    assert size(P.polar(X.float(), method)) < (1 + 1e-5 if method in EXACT else 1.25)


@methods
@pytest.mark.parametrize("scale", [1e30, 1e-30])
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_huge_and_tiny_entries_are_as_good_as_one(method, scale, dtype):
    X = graded(20, 8, 0.05, dtype)
    assert size(P.polar(X * scale, method) - exact(X)) < DISTANCE[method][dtype] + (1e-2 if dtype == BF16 else 0)


@methods
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_bad_numbers_come_out_as_nan(method, bad, dtype):
    X = gaussian(2, 10, 6, dtype=dtype)
    X[0, 3, 2] = bad
    for U in (P.polar(X, method), P.polar(X.mT, method)):
        assert U[0].isnan().all() and U[1].isfinite().all()


@methods
@pytest.mark.parametrize("dtype", [F64, F32, BF16, torch.float16], ids=str)
def test_the_input_is_neither_written_nor_returned(method, dtype):
    X = gaussian(12, 12, dtype=dtype)
    for view in (X, X.mT, X[::2, 1:], X[None].expand(2, -1, -1)):
        before = view.clone()
        U = P.polar(view, method)
        assert U.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()
        U.zero_()
        assert torch.equal(view, before) and U.dtype == dtype


@methods
def test_the_same_input_gives_the_same_bits_and_draws_no_random_numbers(method):
    X, state = gaussian(2, 30, 20, dtype=F32), torch.get_rng_state()
    assert torch.equal(P.polar(X, method), P.polar(X.clone(), method))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_unknown_method_names_its_neighbour():
    with pytest.raises(UserError, match="polar-express"):
        P.polar(gaussian(3, 2), "polar_express")


def rotation(n, seed):
    return torch.linalg.qr(gaussian(n, n, seed=seed)).Q


@methods
@settings(max_examples=12)
@given(m=st.integers(1, 24), n=st.integers(1, 24), seed=st.integers(0, 999), power=st.integers(-80, 80))
def test_invariances(method, m, n, seed, power):
    X = graded(m, n, 0.05, seed=seed)
    U = P.polar(X, method)
    for left, right in (
        (rotation(m, seed + 1), torch.eye(n, dtype=F64)),
        (torch.eye(m, dtype=F64), rotation(n, seed + 2)),
    ):
        assert size(P.polar(left @ X @ right, method) - left @ U @ right) < 1e-11
    assert size(P.polar(X.mT, method) - U.mT) < 1e-11
    assert torch.equal(P.polar(-X, method), -U)
    for dtype in (F64, F32):
        assert torch.equal(P.polar(X.to(dtype) * 2.0**power, method), P.polar(X.to(dtype), method))


@settings(max_examples=12)
@given(seed=st.integers(0, 999), power=st.integers(-100, 100))
def test_unit_divides_by_a_power_of_two(seed, power):
    X = gaussian(3, 4, 5, seed=seed, dtype=F32)
    U = P.unit(X * 2.0**power)
    peak = U.abs().amax((-2, -1))
    assert (peak >= 0.5).all() and (peak < 1).all()
    assert ((X / U).frexp().mantissa.abs() == 0.5).all()


def tangent_step(Q, length, seed=1):
    E = gaussian(*Q.shape, seed=seed)
    A = Q.mT @ E
    E = E - Q @ (A + A.mT) / 2
    return Q + length * E / size(E)


def test_near_squares_the_distance():
    X = tangent_step(exact(gaussian(64, 24)), math.sqrt(0.02))
    assert violation(X) == pytest.approx(0.02, rel=0.05)
    truth = exact(X)
    for bound in (2e-4, 3e-8, 1e-14):
        X = P.near(X)
        assert violation(X) < bound and size(X - truth) < bound


@settings(max_examples=12)
@given(off=st.floats(1e-4, 0.3), seed=st.integers(0, 999), n=st.integers(1, 20), more=st.integers(0, 20))
def test_near_is_quadratic_from_anywhere_and_stays_in_the_unit_ball(off, seed, n, more):
    noise = gaussian(n + more, n, seed=seed)
    X = exact(gaussian(n + more, n, seed=seed + 1)) + off * noise / size(noise)
    assert size(P.near(X) - exact(X)) < 2 * off**2 + 1e-14
    assert size(P.near(X)) < 1 + 1e-12
    assert size(P.near(X, 8) - exact(X)) < 1e-12


def test_near_converges_on_all_of_zero_to_root_three():
    U, _, Vh = torch.linalg.svd(gaussian(30, 12), full_matrices=False)
    X = (U * torch.linspace(1.73, 0.01, 12, dtype=F64)) @ Vh
    assert size(P.near(X, 25) - U @ Vh) < 1e-12


def test_near_divides_the_common_factor_out_first():
    Q = exact(gaussian(64, 24))
    assert size(P.near(1.2 * Q) - Q) < 1e-14


@pytest.mark.parametrize("off", [1e-2, 1e-3])
def test_near_with_a_bfloat16_correction_errs_by_its_precision_times_the_correction(off):
    Q, noise = exact(gaussian(256, 64)), gaussian(256, 64, seed=1)
    X = (Q + off * noise / size(noise)).float()
    full, quick = P.near(X), P.near(X, dtype=BF16)
    assert 0 < size(quick - full) < off * 2**-8
    assert size(quick - exact(X)) < 2 * off**2 + off * 2**-8


def test_near_of_bfloat16_is_computed_in_float32_and_shapes_agree():
    X = (exact(gaussian(2, 3, 20, 8)) + 0.005 * gaussian(2, 3, 20, 8, seed=1)).float()
    assert torch.equal(P.near(X.bfloat16()), P.near(X.bfloat16().float()).bfloat16())
    for view in (X.mT, X.mT.contiguous()):
        torch.testing.assert_close(P.near(view), P.near(X).mT)
    torch.testing.assert_close(P.near(X)[1, 2], P.near(X[1, 2]))


def test_near_leaves_its_input_and_near_writes_it():
    for dtype in (F64, F32, BF16):
        X = (exact(gaussian(9, 4)) * 1.01).to(dtype)
        before = X.clone()
        Q = P.near(X)
        assert torch.equal(X, before) and Q.dtype == dtype and Q.data_ptr() != X.data_ptr()
    X = exact(gaussian(9, 4)) * 1.01
    expected = P.near(X)
    assert P.near_(X) is X and torch.equal(X, expected)
    X[0, 0] = math.nan
    assert P.near(X).isnan().any()


def gram_matrix(n, lower, least=1e-5, seed=0):
    """(H, V, s, lower |H|_F^(1/2)): H = V s^2 V^T with s log-uniform in [least, 1], in float64."""
    V, s = rotation(n, seed), torch.logspace(0, math.log10(least), n, dtype=F64)
    H = (V * s**2) @ V.mT
    return (H + H.mT) / 2, V, s, lower * (s**4).sum() ** 0.25


@roots
@pytest.mark.parametrize("n", [1, 24, 131])  # 131: inverted by halves, of unequal size
@pytest.mark.parametrize("lower, tolerance", [(1e-2, 0.025), (5e-3, 0.05), (0.1, 1e-3)])
def test_inverse_square_root_against_eigh(method, n, lower, tolerance):
    H, V, s, edge = gram_matrix(n, lower)
    R = P.inverse_sqrt(H, lower, tolerance, method=method)
    E = V.mT @ R @ V
    assert size(E - torch.diag(E.diagonal())) < 1e-8 * size(R), "a function of H shares its eigenvectors"
    f = E.diagonal() * s
    assert f.max() < 1 + 1e-9 and f[s > edge].min() > 1 - tolerance - 1e-9
    below = s < edge / 30
    if below.any():
        slope = f[below] / s[below] * edge
        assert slope.max() < 1.02 * slope.min() and slope.min() > 1 - tolerance, "proportional below the edge"


@roots
@pytest.mark.parametrize("n", [1, 24, 131])
def test_inverse_square_root_in_float32_and_in_batches(method, n):
    H, V, s, edge = gram_matrix(n, 1e-2)
    batch = torch.stack([H, 4 * H, torch.zeros_like(H)]).float()[None]
    R = P.inverse_sqrt(batch, method=method).double()
    f = torch.linalg.eigvalsh(R[0, 0] @ H @ R[0, 0])
    assert f.max() < 1.003
    assert torch.linalg.eigvalsh(V[:, s > edge].mT @ (R[0, 0] @ H @ R[0, 0]) @ V[:, s > edge]).min() > 0.975**2 - 3e-3
    torch.testing.assert_close(R[0, 1], R[0, 0] / 2, rtol=1e-3, atol=1e-2 * size(R[0, 0]))
    assert R.isfinite().all()


@roots
@pytest.mark.parametrize("n", [1, 24, 131])
@pytest.mark.parametrize("lower, tolerance", [(5e-3, 0.05), (1e-2, 1e-3)])
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_square_root_is_a_close_upper_estimate(method, n, lower, tolerance, dtype):
    H, V, s, edge = gram_matrix(n, lower, least=1e-3)
    T = P.sqrt(H.to(dtype), lower, tolerance, method=method).double()
    noise = 1e-9 if dtype == F64 else 0.5 * edge
    assert torch.linalg.eigvalsh(T - (V * s) @ V.mT).min() > -noise
    excess = (V.mT @ T @ V).diagonal() - s
    assert (excess < s * tolerance / (1 - tolerance) + edge + noise).all()


@roots
def test_roots_leave_their_input_and_carry_nan(method):
    H, *_ = gram_matrix(8, 1e-2)
    before = H.clone()
    for root in (P.inverse_sqrt, P.sqrt):
        assert torch.equal(root(H, method=method), root(H, method=method)) and torch.equal(H, before)
        bad = torch.stack([H, H])
        bad[0, 2, 3] = bad[0, 3, 2] = math.nan
        R = root(bad, method=method)
        assert R[0].isnan().all() and R[1].isfinite().all()
        assert root(torch.zeros(3, 3), method=method).isfinite().all()
        with pytest.raises(UserError, match="zolotarev"):
            root(H, method="zolotarow")


def test_unsettled_is_enough_for_a_direction_and_costs_less():
    X = graded(96, 48, 0.05, F32)
    rough, fine = P.polar_restarted(X, settled=False), P.polar_restarted(X)
    found = torch.linalg.svdvals(rough.double())
    assert found.max() < 1.006 and found.min() > 0.994 and size(rough - exact(X)) < 0.01
    assert size(fine - exact(X)) < 1e-3
    assert torch.equal(P.polar_restarted(X.double(), settled=False), P.polar_restarted(X.double()))


@roots
def test_a_matrix_below_the_noise_fades_out(method):
    H, *_ = gram_matrix(12, 1e-2, least=0.1)
    floor = torch.linalg.matrix_norm(H)

    def largest(H, noise=floor):
        R = P.inverse_sqrt(H, method=method, noise=noise)
        return size(R @ H @ R)

    assert largest(H) > 0.95 and largest(1e-12 * H, None) > 0.95
    faded = largest(1e-12 * H)
    assert faded < 1e-7 and largest(1e-14 * H) == pytest.approx(faded / 100, rel=1e-3)


@settings(max_examples=15)
@given(m=st.integers(1, 80), n=st.integers(1, 80), seed=st.integers(0, 9999))
def test_spectral_norm_is_a_lower_bound_and_close(m, n, seed):
    X = gaussian(2, m, n, seed=seed)
    truth = torch.linalg.matrix_norm(X, 2)[:, None, None]
    for steps, close in ((6, 0.93), (24, 0.98)):
        found = P.spectral_norm(X, steps)
        assert found.shape == (2, 1, 1)
        assert (found <= truth * (1 + 1e-12)).all() and (found >= close * truth).all()


def test_spectral_norm_is_within_two_percent_as_a_rule():
    truths, found = [], []
    for seed in range(0, 60, 3):
        X = gaussian(10 + 3 * seed, 190 - 3 * seed, seed=seed)
        truths.append(size(X)), found.append(float(P.spectral_norm(X)))
    ratios = torch.tensor(found) / torch.tensor(truths)
    assert ratios.median() > 0.98 and P.spectral_norm(X).item() == found[-1]


def test_spectral_norm_at_the_edges():
    assert float(P.spectral_norm(torch.zeros(4, 3))) == 0
    assert float(P.spectral_norm(torch.diag(torch.tensor([5.0, 1.0, 0.0])))) == pytest.approx(5, rel=1e-6)
    X, state = gaussian(6, 5), torch.get_rng_state()
    assert torch.equal(P.spectral_norm(X), P.spectral_norm(X.clone())) and torch.equal(torch.get_rng_state(), state)
    for bad in (math.nan, math.inf):
        X[1, 2] = bad
        assert P.spectral_norm(X).isnan().all()


@pytest.mark.parametrize("n", [5, 512, 515])  # from 512 on by blocks
def test_gram_is_the_product_with_its_transpose(n):
    X = gaussian(2, 40, n)
    R = P.gram(X)
    assert torch.allclose(R, X.mT @ X, rtol=0, atol=1e-12) and torch.allclose(R, R.mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
def test_products_keep_the_layout_of_their_first_factor(dtype):
    exactly = 2e-2 if dtype else 1e-5
    for X in (gaussian(6, 4, dtype=F32), gaussian(4, 6, dtype=F32).mT, gaussian(2, 6, 4, dtype=F32)):
        B = gaussian(*X.shape[:-2], 4, 4, seed=1, dtype=F32)
        before, limit = X.clone(), exactly * size(X) * size(B)
        XB = P.multiply(X, B, dtype)
        assert XB.stride() == X.stride() and XB.dtype == F32 and (XB - X @ B).abs().max() < limit
        C = torch.ones_like(X)
        assert P.accumulate_(C, X, B, dtype, scale=-2.0) is C and torch.equal(X, before)
        assert (C - (1 - 2 * X @ B)).abs().max() < 2 * limit


@pytest.mark.parametrize("shape", [(6, 4), (2, 6, 4), (4, 6)], ids=str)
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_a_product_may_be_added_to_its_own_factor(shape, dtype):
    X, B = gaussian(*shape, dtype=dtype), gaussian(*shape[:-2], 4, 4, seed=1, dtype=dtype)
    X = X if shape[-1] == 4 else X.mT
    expected = X + X @ B
    torch.testing.assert_close(P.accumulate_(X, X, B), expected)
    coarse = P.accumulate_(X.clone(), X, B, BF16)
    assert 0 < size(coarse - (X + X @ B)) < 2e-2 * size(X) * size(B)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_near_of_a_wide_matrix_is_that_of_its_transpose(dtype):
    X = (exact(gaussian(8, 5)) + 0.01 * gaussian(8, 5, seed=1)).to(dtype)
    torch.testing.assert_close(P.near(X.mT.contiguous()), P.near(X).mT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["precise", "newton-schulz", "polar-express", "gram", "near"],
)
@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (2, 12, 12)], ids=str)
def test_compiled_equals_eager(method, shape):
    def run(X):
        return P.near(X) if method == "near" else P.polar(X, method)

    torch._dynamo.reset()
    X = graded(*shape[-2:], 0.9 if method == "near" else 0.1, F32, shape[:-2])
    compiled = torch.compile(run, fullgraph=True)
    directions = method in DISTANCE and method not in EXACT
    assert size(compiled(X) - run(X)) < (2 * DISTANCE[method][F32] if directions else 1e-5)
    assert size(compiled(X) - exact(X)) < (0.02 if method == "near" else DISTANCE[method][F32])
    assert compiled(torch.full_like(X, math.nan)).isnan().all() and not compiled(torch.zeros_like(X)).any()
