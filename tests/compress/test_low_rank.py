"""Optimal low rank on the calibration inputs, against an independent computation in fp64 by singular value decompositions in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gnomon.compress.block_matrices import BlockMatrices, Matrix
from gnomon.compress.low_rank import pivoted, private
from gnomon.compress.methods import METHODS
from gnomon.compress.replacements import numel
from gnomon.compress.shared_basis import BY_ROLE, SIDES, shared
from gnomon.compress.whitened_svd import coefficients, input_basis, lost, output_basis
from gnomon.errors import UserError

SHAPES = {"query": (24, 24), "key": (8, 24), "value": (8, 24), "output": (24, 24), "gate": (40, 24), "up": (40, 24), "down": (24, 40)}
LAYERS = 3


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def inputs(N, seed, tokens=400):
    """X_NX whose directions have scales from 1 to 0.01, in a frame of its own."""
    scales = torch.logspace(0, -2, N, dtype=torch.float64)
    return torch.linalg.qr(drawn(N, N, seed=seed)).Q @ (scales[:, None] * drawn(N, tokens, seed=seed + 1))


def block(index, fused=False, singular=False):
    matrices, moments = [], {}
    for number, (role, (M, N)) in enumerate(SHAPES.items()):
        X = inputs(N, 100 * index + N)
        if singular:
            X = X.clone()
            X[: N // 2] = 0
        matrices.append(Matrix(role, role, drawn(M, N, seed=10 * index + number).float()))
        moments[role] = X @ X.T / X.shape[1]
    shapes = {role: shape for role, shape in SHAPES.items()}
    if fused:  # query, key and value as one linear, rows taking turns by eight
        part = {"query": range(0, 24), "key": range(24, 32), "value": range(32, 40)}
        matrices = [
            Matrix("qkv", m.role, m.W_MN, tuple(part[m.role])) if m.role in part else m for m in matrices
        ]
        moments, shapes = moments | {"qkv": moments["query"]}, shapes | {"qkv": (40, 24)}
    return BlockMatrices(index, tuple(matrices), shapes, dict.fromkeys(shapes), moments, 400)


def whitened_tail(W, C, rank):
    """What the best matrix of this rank loses: singular values of W L, C = L Lᵀ."""
    values = np.linalg.svd(W.double().numpy() @ np.linalg.cholesky(C.numpy()), compute_uv=False)
    return float((values[rank:] ** 2).sum())


@pytest.mark.parametrize("role", SHAPES)
def test_private_loses_the_tail_of_the_whitened_singular_values(role):
    one = block(0)
    matrix = one.of(role)
    W, C = matrix.W_MN, one.C_NN(matrix)
    for rank in (1, 3, 7):
        U = output_basis([W], [C], rank)
        assert lost(W, U @ U.T @ W.double(), C) == pytest.approx(whitened_tail(W, C, rank), rel=1e-6)


@pytest.mark.parametrize("method", [private, pivoted])
def test_methods_reach_the_optimum_of_their_rank_and_stay_in_budget(method):
    for index in range(LAYERS):
        one = block(index)
        (made,) = method([one], 0.6)
        assert set(made) == set(SHAPES) and numel(made.values()) <= 0.6 * one.numel
        for matrix in one.matrices:
            term, C = made[matrix.linear].terms[0], one.C_NN(matrix)
            assert numel([made[matrix.linear]]) <= 0.6 * matrix.W_MN.numel()
            tail = whitened_tail(matrix.W_MN, C, len(term.B_RN))
            assert lost(matrix.W_MN, made[matrix.linear].W_MN, C) == pytest.approx(tail, rel=1e-4)  # kept in fp32


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_another_share_of_the_same_block_is_what_it_would_be_alone(method):
    """What is kept of a block between two shares is not of the share."""
    one = block(0)
    method([one], 0.8)
    for linear, made in method([one], 0.4)[0].items():
        torch.testing.assert_close(made.W_MN, method([block(0)], 0.4)[0][linear].W_MN, rtol=0, atol=0)


def test_private_beats_plain_truncation_on_every_layer():
    for index in range(LAYERS):
        one = block(index)
        (made,) = private([one], 0.5)
        for matrix in one.matrices:
            rank = len(made[matrix.linear].terms[0].B_RN)
            U, S, V = np.linalg.svd(matrix.W_MN.numpy(), full_matrices=False)
            plain = torch.from_numpy((U[:, :rank] * S[:rank]) @ V[:rank])
            C = one.C_NN(matrix)
            assert lost(matrix.W_MN, made[matrix.linear].W_MN, C) < lost(matrix.W_MN, plain, C)


def test_pivots_pay_for_more_rank_at_equal_numbers():
    one = block(0)
    (by_products,), (by_pivots,) = private([one], 0.6), pivoted([one], 0.6)
    for matrix in one.matrices:
        C, name = one.C_NN(matrix), matrix.linear
        assert lost(matrix.W_MN, by_pivots[name].W_MN, C) < 0.7 * lost(matrix.W_MN, by_products[name].W_MN, C)
        assert by_pivots[name].terms[0].A_MR.abs().max() < 10


def test_a_shared_input_basis_is_the_optimum_of_the_stack():
    W = [drawn(16, 24, seed=s).float() for s in range(LAYERS)]
    C = block(0).moments["query"]
    rank = 9
    B = input_basis(W, [C] * LAYERS, rank)
    made = sum(lost(w, coefficients(w, C, B) @ B, C) for w in W)
    assert made == pytest.approx(whitened_tail(torch.cat(W), C, rank), rel=1e-6)


def test_a_shared_output_basis_is_the_optimum_of_whitened_matrices_side_by_side():
    W = [drawn(16, 24, seed=s).float() for s in range(LAYERS)]
    C = [block(index).moments["query"] for index in range(LAYERS)]
    rank = 9
    U = output_basis(W, C, rank)
    made = sum(lost(w, U @ U.T @ w.double(), c) for w, c in zip(W, C))
    beside = np.concatenate([w.double().numpy() @ np.linalg.cholesky(c.numpy()) for w, c in zip(W, C)], axis=1)
    assert made == pytest.approx(float((np.linalg.svd(beside, compute_uv=False)[rank:] ** 2).sum()), rel=1e-6)


def test_coefficients_are_the_least_squares_of_each_layer():
    W, B, X = drawn(16, 24), drawn(5, 24, seed=3), inputs(24, 9)
    expected = np.linalg.lstsq((B @ X).numpy().T, (W @ X).numpy().T, rcond=None)[0].T
    np.testing.assert_allclose(coefficients(W, X @ X.T / X.shape[1], B).numpy(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("sides", SIDES)
def test_groups_share_by_role_within_the_budget(sides):
    group = [block(index) for index in range(LAYERS)]
    made = shared(group, 0.6, SIDES[sides])
    assert numel(one for layer in made for one in layer.values()) <= 0.6 * sum(one.numel for one in group)
    for role in SHAPES:
        terms = [layer[role].terms[0] for layer in made]
        side = SIDES[sides].get(role)
        assert all((a.B_RN is terms[0].B_RN) is (side == "input") for a in terms[1:])
        assert all((a.A_MR is terms[0].A_MR) is (side == "output") for a in terms[1:])
        assert bool(terms[0].B_shared) is (side == "input") and bool(terms[0].A_shared) is (side == "output")


def test_a_group_of_one_is_private():
    (ours,), (theirs,) = shared([block(1)], 0.5), private([block(1)], 0.5)
    for role in SHAPES:
        torch.testing.assert_close(ours[role].W_MN, theirs[role].W_MN)


@pytest.mark.parametrize("method", [private, pivoted, shared])
def test_parts_of_a_fused_linear_stay_at_their_rows(method):
    fused, apart = [[block(index, fused=same) for index in range(2)] for same in (True, False)]
    C = fused[0].moments["query"]
    for one in apart:
        one.moments.update(key=one.moments["query"], value=one.moments["query"])
    for ours, theirs in zip(method(fused, 0.6), method(apart, 0.6)):
        beside = torch.cat([theirs[role].W_MN for role in ("query", "key", "value")])
        torch.testing.assert_close(ours["qkv"].W_MN, beside, rtol=1e-3, atol=1e-4)
    assert C.shape == (24, 24)


@pytest.mark.parametrize("method", [private, pivoted, shared])
def test_inputs_that_never_go_somewhere(method):
    group = [block(index, singular=True) for index in range(2)]
    for one, made in zip(group, method(group, 0.7)):
        for matrix in one.matrices:
            found, C = made[matrix.linear].W_MN, one.C_NN(matrix)
            assert torch.isfinite(found).all() and found.abs().max() < 100
            assert lost(matrix.W_MN, found, C) < 0.2 * lost(matrix.W_MN, torch.zeros_like(found), C)


@pytest.mark.parametrize("method", [private, pivoted, shared])
def test_a_rank_of_zero_is_told(method):
    with pytest.raises(UserError, match=r"block 0, query \(24 x 24\): 0.01 of its numbers pay for no rank"):
        method([block(0)], 0.01)


def test_a_wrong_side_is_told():
    with pytest.raises(UserError, match="Did you mean 'input'"):
        shared([block(0), block(1)], 0.5, BY_ROLE | {"query": "inpt"})
