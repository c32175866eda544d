"""What is kept of the channels between two matrices, against numpy in float64 and against every other choice there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from gnomon.compress.narrowing import leverage, query_key, refit, rotary_pairs, spectrum, value_directions


def channels(tokens, N, rank=None, seed=0):
    """z_TN with correlated channels of unequal size."""
    made = torch.Generator().manual_seed(seed)
    mix = torch.randn(rank or N, N, generator=made, dtype=torch.float64) * torch.logspace(0, -1.5, N, dtype=torch.float64)
    return torch.randn(tokens, rank or N, generator=made, dtype=torch.float64) @ mix


def moment(z_TN):
    return z_TN.T @ z_TN / len(z_TN)


def random(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def chosen(kept, N):
    return torch.eye(N, dtype=torch.float64)[kept]


def test_refit_is_least_squares():
    z_TN, W_MN = channels(400, 12), random(5, 12)
    P_KN = random(4, 12, seed=2)
    ours = refit(W_MN, moment(z_TN), P_KN)
    theirs = np.linalg.lstsq((z_TN @ P_KN.T).numpy(), (z_TN @ W_MN.T).numpy(), rcond=None)[0].T
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-6, atol=1e-7)


def test_channels_are_kept_by_number_as_by_a_matrix():
    S_NN, W_MN, kept = moment(channels(400, 12)), random(5, 12), torch.tensor([1, 4, 5, 11])
    torch.testing.assert_close(refit(W_MN, S_NN, kept), refit(W_MN, S_NN, chosen(kept, 12)), rtol=1e-12, atol=1e-12)


def test_refit_keeps_what_can_be_kept():
    # Channels of rank 5: any 5 that span them stand for all.
    z_TN, W_MN = channels(300, 9, rank=5), random(4, 9)
    P_KN = chosen(torch.arange(5), 9)
    torch.testing.assert_close(z_TN @ P_KN.T @ refit(W_MN, moment(z_TN), P_KN).T, z_TN @ W_MN.T, rtol=1e-5, atol=1e-5)


def test_refit_bears_dead_and_doubled_channels():
    z_TN = channels(300, 6)
    z_TN[:, 1] = 0
    z_TN[:, 3] = z_TN[:, 2]
    W_MN = random(4, 6, dtype=torch.float32)
    W = refit(W_MN, moment(z_TN), torch.eye(6))
    assert W.dtype == torch.float32 and torch.isfinite(W).all()
    torch.testing.assert_close(z_TN @ W.double().T, z_TN @ W_MN.double().T, rtol=1e-4, atol=1e-4)


def test_refit_bears_moments_that_rounding_made_indefinite():
    z_TN, W_MN = channels(300, 12, rank=5), random(4, 12)
    noise_NN = random(12, 12, seed=3)
    S_NN = moment(z_TN) + 1e-6 * (noise_NN + noise_NN.T)
    P_KN = chosen(torch.arange(8), 12)
    assert torch.linalg.eigvalsh(S_NN).min() < -1e-7
    W_MK = refit(W_MN, S_NN, P_KN)
    torch.testing.assert_close(z_TN @ P_KN.T @ W_MK.T, z_TN @ W_MN.T, rtol=1e-3, atol=1e-3)


def test_leverage_is_numpys():
    S_NN = moment(channels(200, 10))
    values = np.linalg.eigvalsh(S_NN.numpy())
    ridge = values[:6].sum() / 4
    score = np.diag(S_NN.numpy() @ np.linalg.inv(S_NN.numpy() + ridge * np.eye(10)))
    assert leverage(spectrum(S_NN), 4).tolist() == sorted(np.argsort(-score)[:4].tolist())


def test_leverage_sees_through_copies():
    """The norm would take both copies of the largest channel; leverage shares its weight between them."""
    z_TN = random(500, 4)
    z_TN = torch.cat((1.2 * z_TN, 1.2 * z_TN[:, :1]), dim=1)
    assert len({0, 4} & set(leverage(spectrum(moment(z_TN)), 4).tolist())) == 1


def test_refit_does_not_fit_what_a_sample_cannot_tell():
    """Two channels that are alike but for a thousandth: their difference is no ground for weights a thousand times as large."""
    torch.manual_seed(0)
    z_TN, W_MN = torch.randn(4000, 6).double(), torch.randn(4, 6).double()
    z_TN[:, 1] = z_TN[:, 0] + 1e-3 * torch.randn(4000)
    W_MN[:, :2] += torch.tensor([[-300.0, 300.0]])
    y_TM = z_TN @ W_MN.T
    found_MN = refit(W_MN, moment(z_TN), torch.eye(6))
    assert W_MN.norm() > 800 and found_MN.norm() < 10
    assert (y_TM - z_TN @ found_MN.T).square().sum() < 0.05 * y_TM.square().sum()


def test_leverage_and_refit_lose_less_than_the_median_choice():
    z_TN, W_MN = channels(500, 9), random(6, 9)
    S_NN = moment(z_TN)

    def lost(kept):
        P_KN = chosen(torch.as_tensor(kept), 9)
        return float((z_TN @ W_MN.T - z_TN @ P_KN.T @ refit(W_MN, S_NN, P_KN).T).square().sum())

    every = sorted(lost(kept) for kept in itertools.combinations(range(9), 5))
    assert lost(leverage(spectrum(S_NN), 5)) < every[len(every) // 4]


@pytest.mark.parametrize("heads", [1, 3])
def test_value_directions_are_the_best_of_their_rank(heads):
    z_TC, W_HMC = channels(400, 8), random(heads, 10, 8)
    T_RC = value_directions(moment(z_TC), W_HMC, 3)
    W_MC = W_HMC.flatten(0, 1)
    found = refit(W_MC, moment(z_TC), T_RC) @ T_RC
    lost = ((z_TC @ (W_MC - found).T).square().sum() / len(z_TC)).item()
    values, vectors = np.linalg.eigh(moment(z_TC).numpy())
    root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
    tail = np.linalg.svd(W_MC.numpy() @ root, compute_uv=False)[3:]
    assert lost == pytest.approx((tail**2).sum(), rel=1e-6)


def test_all_directions_lose_nothing():
    S_CC, W_HMC = moment(channels(100, 6)), random(2, 7, 6)
    T_RC = value_directions(S_CC, W_HMC, 6)
    torch.testing.assert_close(refit(W_HMC[0], S_CC, T_RC) @ T_RC, W_HMC[0], rtol=1e-6, atol=1e-6)


def test_more_directions_than_outputs_or_energy():
    S_CC = moment(channels(100, 6, rank=2))
    T_RC = value_directions(S_CC, random(1, 3, 6), 5)
    assert T_RC.shape == (5, 6) and torch.isfinite(T_RC).all()
    assert torch.isfinite(value_directions(torch.zeros(6, 6), random(1, 3, 6), 2)).all()


def test_query_key_takes_the_largest_products():
    q_HC, k_C = random(3, 8).square(), random(8, seed=3).square()
    norms = np.sqrt(q_HC.sum(0).numpy() * k_C.numpy())
    assert query_key(q_HC, k_C, torch.arange(8), 3).tolist() == sorted(np.argsort(-norms)[:3].tolist())


def test_rotary_pairs_stay_pairs():
    pairs = rotary_pairs(8, 8)
    assert pairs.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    for count in range(1, 9):
        kept = query_key(random(2, 8).square(), random(8, seed=3).square(), pairs, count)
        assert len(kept) == count // 2 * 2 and set(kept.tolist()) == {(i + 4) % 8 for i in kept.tolist()}
    assert rotary_pairs(6, 4).tolist() == [0, 1, 0, 1, 2, 3]
    assert rotary_pairs(4, 0).tolist() == [0, 1, 2, 3]
    assert rotary_pairs(6, 4, neighbours=True).tolist() == [0, 0, 1, 1, 2, 3]


def test_a_single_channel_fills_what_a_pair_would_overrun():
    q_HC, k_C = torch.tensor([[9.0, 5.0, 9.0, 5.0, 4.0, 1.0]]), torch.ones(6)
    assert query_key(q_HC, k_C, rotary_pairs(6, 4), 3).tolist() == [0, 2, 4]


def test_the_pairs_are_those_transformers_turns():
    """A pair's norm does not change by the rotation of the Llama of transformers."""
    rotary = pytest.importorskip("transformers.models.llama.modeling_llama")
    q_BHTC = random(1, 1, 5, 8, dtype=torch.float32)
    angle_BTC = random(1, 5, 4, seed=5, dtype=torch.float32).repeat(1, 1, 2)
    turned, _ = rotary.apply_rotary_pos_emb(q_BHTC, q_BHTC, angle_BTC.cos(), angle_BTC.sin())
    for unit in range(4):
        pair = rotary_pairs(8, 8) == unit
        torch.testing.assert_close(turned[..., pair].norm(dim=-1), q_BHTC[..., pair].norm(dim=-1))
