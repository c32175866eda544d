"""Measures of a pair, of a series and of sharing, each against its definition on the matrices themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from continuity_cases import LLAMA, llama

from gnomon.continuity import heads, inspect, pair_measures, sharing, summary
from gnomon.continuity.one_pass import Measured
from gnomon.geometry import subspace


def pair(M=40, N=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(M, N, generator=g, dtype=torch.float64)
    return A, 0.5 * A + torch.randn(M, N, generator=g, dtype=torch.float64)


def cosine(A, B):
    return float((A * B).sum() / A.norm() / B.norm())


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (30, 30)])
def test_a_pair_against_the_definitions(shape):
    A, B = pair(*shape)
    M, N = shape
    row = pair_measures.compare(subspace.spectrum(A), subspace.spectrum(B), 5, full=True)
    (UA, sA, VA), (UB, sB, VB) = torch.linalg.svd(A), torch.linalg.svd(B)
    assert row["v1_cos"] == pytest.approx(abs(float(VA[0] @ VB[0])), abs=1e-5)
    assert row["u1_cos"] == pytest.approx(abs(float(UA[:, 0] @ UB[:, 0])), abs=1e-5)
    assert row["subspace_v"] == pytest.approx(float((VA[:5] @ VB[:5].T).square().sum()) / 5, abs=1e-5)
    angles = torch.rad2deg(torch.acos(torch.linalg.svdvals(UA[:, :5].T @ UB[:, :5])))
    assert row["angles_u"] == pytest.approx(angles.tolist(), abs=1e-3)
    eye_N, eye_M = torch.eye(N, dtype=A.dtype), torch.eye(M, dtype=A.dtype)
    centred = [G - G.trace() / N * eye_N for G in (A.T @ A, B.T @ B)]
    assert row["gram_v"] == pytest.approx(cosine(*centred), abs=1e-5)
    centred = [G - G.trace() / M * eye_M for G in (A @ A.T, B @ B.T)]
    assert row["gram_u"] == pytest.approx(cosine(*centred), abs=1e-5)
    assert row["frobenius"] == pytest.approx(cosine(A, B), abs=1e-5)
    r = min(M, N)
    weights = sA.square() / sA.square().sum()
    aligned = (VA[:r] * VB[:r]).sum(1).abs()
    assert row["weighted_v"] == pytest.approx(float(weights @ aligned), abs=1e-5)
    assert row["gap"] == pytest.approx(min(float(s[0] / s[1]) for s in (sA, sB)), rel=1e-6)


def test_effective_and_stable_rank():
    at = subspace.spectrum(torch.diag(torch.tensor([2.0, 2.0, 2.0, 0.0])))
    assert pair_measures.effective_rank(at.sigma_k) == pytest.approx(3)
    assert at.stable_rank == pytest.approx(3)
    p = np.array([4, 1]) / 5
    two = subspace.spectrum(torch.diag(torch.tensor([2.0, 1.0])))
    assert pair_measures.effective_rank(two.sigma_k) == pytest.approx(math.exp(-(p * np.log(p)).sum()))


def test_gram_cosine_of_a_multiple_of_the_identity_is_none():
    Q = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))[0]
    row = pair_measures.compare(subspace.spectrum(Q), subspace.spectrum(pair(12, 12)[0]), 4, full=True)
    assert row["gram_v"] is None and row["gram_v_z"] is None


@pytest.mark.parametrize("full", [False, True])
def test_a_random_model_sits_at_the_null(full):
    report = inspect(llama(layers=12, d=64, f=96), k=4, full=full, config=LLAMA)
    prefixes = [prefix for key, prefix in summary.MEASURES.items() if full or "_" not in prefix or "subspace" in prefix]
    seen = [line[f"{prefix}_z"] for line in report.summary for prefix in prefixes if f"{prefix}_z" in line]
    seen = [z for z in seen if z is not None]
    assert len(seen) >= (60 if full else 28)
    # Three standard deviations are rare but not unheard of among so many: few beyond three, none beyond four.
    assert sum(abs(z) > 3 for z in seen) <= 1 and max(map(abs, seen)) < 4
    assert abs(sum(seen) / len(seen)) < 4 / math.sqrt(len(seen))
    serial = [row["uv_z"] for row in report.serial if row["defined"]]
    assert len(serial) > 50 and abs(sum(serial)) / math.sqrt(len(serial)) < 3


def test_summary_is_the_mean_over_defined_pairs():
    tensors = llama(layers=5)
    tensors["model.layers.2.self_attn.q_proj.weight"].zero_()
    report = inspect(tensors, k=2, config=LLAMA)
    line = next(line for line in report.summary if line["role"] == "query")
    rows = [row for row in report.rows if row["role"] == "query"]
    assert (line["pairs"], line["defined"]) == (4, 2)
    usable = [row for row in rows if row["defined"]]
    assert line["v1_cos"] == pytest.approx(sum(row["v1_cos"] for row in usable) / 2)
    null = subspace.cosine_null(32)
    assert line["v1_z"] == pytest.approx((line["v1_cos"] - null.mean) / null.sd * math.sqrt(2))


def test_shuffled_level_tells_neighbours_from_all():
    L = 10
    shared = torch.full((L, L), 0.8) + 0.2 * torch.eye(L)
    mean, z = summary.shuffle(shared)
    assert mean == pytest.approx(0.8, abs=1e-5) and (z is None or abs(z) < 3)
    place = torch.arange(L).float()
    mean, z = summary.shuffle(torch.exp(-(place[:, None] - place).abs() / 2))
    assert mean < 0.4 and z > 4
    assert summary.shuffle(torch.eye(3)) is None


def test_best_of_many_heads_against_sampling():
    g = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(4000, 12, 64, generator=g), dim=-1)[..., 0].abs().amax(1)
    null = heads.best_of(12, 64)
    assert float(x.mean()) == pytest.approx(null.mean, rel=0.03)
    assert float(x.std()) == pytest.approx(null.sd, rel=0.1)


def test_heads_find_their_renumbered_partner():
    tensors = llama(layers=2)
    for name in ("q_proj", "k_proj", "v_proj"):
        first = tensors[f"model.layers.0.self_attn.{name}.weight"]
        count = len(first) // 8
        order = torch.arange(count).roll(1)
        tensors[f"model.layers.1.self_attn.{name}.weight"] = first.reshape(count, 8, -1)[order].flatten(0, 1) * 3
    out = tensors["model.layers.0.self_attn.o_proj.weight"]
    tensors["model.layers.1.self_attn.o_proj.weight"] = out.reshape(32, 4, 8).roll(1, 1).reshape(32, 32)
    report = inspect(tensors, k=2, per_head=True, config=LLAMA)
    assert {row["role"] for row in report.heads} == {"query", "key", "value", "output"}
    for row in report.heads:
        count = 4 if row["role"] in ("query", "output") else 2
        assert row["best_head"] == (row["head"] + 1) % count
        assert row["best_cos"] == pytest.approx(1, abs=1e-4)


def relative_error(matrices, approximations):
    return sum(float((A - B).square().sum()) for A, B in zip(matrices, approximations)) / sum(
        float(A.square().sum()) for A in matrices
    )


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (32, 32)])
def test_sharing_is_the_best_approximation_of_its_kind(shape):
    (M, N), keep = shape, 0.6
    A, B = pair(M, N)
    part = inspect(llama(layers=2), config=LLAMA).leading.keys().__iter__().__next__()
    row = sharing.row(Measured(part, subspace.spectrum(A)), Measured(part, subspace.spectrum(B)), keep)
    budget = keep * 2 * M * N

    def cut(W, rank):
        U, s, V = torch.linalg.svd(W, full_matrices=False)
        return U[:, :rank] * s[:rank] @ V[:rank]

    rank = round(budget / 2 / (M + N))
    assert row["private"] == pytest.approx(relative_error([A, B], [cut(A, rank), cut(B, rank)]), rel=1e-4)
    stacked = torch.cat([A, B])
    assert row["input"] == pytest.approx(
        relative_error([stacked], [cut(stacked, round(budget / (N + 2 * M)))]), rel=1e-4
    )
    beside = torch.cat([A, B], 1)
    assert row["output"] == pytest.approx(
        relative_error([beside], [cut(beside, round(budget / (M + 2 * N)))]), rel=1e-4
    )
