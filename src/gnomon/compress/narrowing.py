"""Fewer channels between two matrices: which stay, and what the second matrix becomes (the pieces of MoDeGPT, arXiv 2408.09632).

A sublayer makes channels z of the stream and maps them back, y = W z. Keep fewer, z' = P z, and the best second matrix is the one of
least squares, W' z' ~ W z (`refit`). P is a choice of channels in an MLP (`leverage`), where the nonlinearity leaves no other, and a
few directions in each value head (`value_directions`), where any will do. Queries and keys meet in a product and nothing is refitted
(`query_key`).

All sums are float64. Moments are raw second moments E[z z^T] over tokens; their scale does not matter.

Legend: N channels, K those kept, M outputs, H query heads that share a key or value head, C channels of a head, R those kept of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Of the mean of a moment matrix's diagonal: keeps a solve defined where channels are dead or copies of each other.
_RIDGE = 1e-8

# Of a kept channel's own energy: what a combination of channels must have for a calibration text to tell its coefficients. Heads that
# share a value head average nearly the same where all look at one token, so that a combination of theirs has next to none; fitted all the
# same it took weights a hundred times as large, and SmolLM2 at 60 % lost 5 nats in one block. From 1e-5 to 1e-3 the loss is the same.
_KNOWN = 1e-5


class Spectrum(NamedTuple):
    """Eigenvalues of second moments, and how much of each channel is in each eigenvector (its square, fp32)."""

    values_N: Tensor
    squares_NN: Tensor


def spectrum(moment_NN: Tensor) -> Spectrum:
    """What `leverage` reads, whatever the number of channels that stay."""
    values_N, vectors_NN = torch.linalg.eigh(moment_NN.double())
    return Spectrum(values_N.clamp_min(0), vectors_NN.square().float())


def leverage(spectrum: Spectrum, count: int) -> Tensor:
    """The `count` channels with the largest ridge leverage scores, ascending, int64 (Nystrom; arXiv 2408.09632, Algorithm 1).

    The score of a channel is diag(S (S + ridge)^-1), the share of it that the others cannot stand in for. The paper's ridge is 1,
    which depends on the scale of S; ours is the mean energy per kept channel of what any `count` directions must lose, for which
    the error is bounded (arXiv 1511.07263, Definition 1).

    Args:
        spectrum: of the channels' second moments S.
        count: from 1 to N.
    """
    values_N = spectrum.values_N
    ridge = values_N[: len(values_N) - count].sum() / count + _RIDGE * values_N.mean()
    # Where all is zero so is the ridge, and any choice will do.
    score_N = spectrum.squares_NN.double() @ (values_N / (values_N + ridge).clamp_min(torch.finfo(torch.float64).tiny))
    return score_N.topk(count).indices.sort().values


def refit(W_MN: Tensor, moment_NN: Tensor, P: Tensor) -> Tensor:
    """W'_MK with the least E|W z - W' P z|^2, W' = W S P^T (P S P^T)^-1, in the dtype of W.

    Args:
        W_MN: reads the channels z.
        moment_NN: S, their second moments.
        P: what is kept of them, (K, N); or the numbers of those that are, (K,) int64, which spares two products.
    """
    S_NN = moment_NN.double()
    if P.is_floating_point():
        SP_NK = S_NN @ P.double().T
        kept_KK = P.double() @ SP_NK
    else:
        SP_NK = S_NN[:, P]
        kept_KK = SP_NK[P]
    # Relative to each kept channel, so that a scale of its own does no harm.
    size_K = kept_KK.diagonal()
    scale_K = torch.where(size_K > 0, size_K, 1.0).rsqrt()
    values_K, vectors_KK = torch.linalg.eigh(scale_K[:, None] * (kept_KK + kept_KK.T) / 2 * scale_K)
    # No moment is negative, so the most negative eigenvalue tells how far rounding goes, and below that nothing is known either.
    known_K = values_K > torch.maximum(-2 * values_K[0], torch.full_like(values_K[0], _KNOWN))
    turned_MK = (W_MN.double() @ SP_NK * scale_K) @ vectors_KK * torch.where(known_K, 1 / values_K, 0.0)
    return (turned_MK @ vectors_KK.T * scale_K).to(W_MN.dtype)


def value_directions(moment_CC: Tensor, W_HMC: Tensor, count: int) -> Tensor:
    """T_RC, the `count` combinations of a value head's channels that matter most to what its output projections make of them.

    With S = L L^T they are V^T L^-1, V the leading right singular vectors of W L: then W z ~ (W L V) (T z) is the best of its rank.
    The paper weighs by the values' moments, we by those of their averages, which is what the output projection reads.

    Args:
        moment_CC: second moments of the head's averaged values, mean over the query heads that use it.
        W_HMC: columns of the output projection, for each of those heads.
        count: R, from 1 to C.
    """
    S_CC = moment_CC.double()
    ridge = _RIDGE * S_CC.diagonal().mean()
    ridge = torch.where(ridge > 0, ridge, 1.0)
    L_CC = torch.linalg.cholesky(S_CC + ridge * torch.eye(len(S_CC), dtype=S_CC.dtype, device=S_CC.device))
    # Of the outputs, of which there are many more than channels, their triangular factor tells as much.
    R = torch.linalg.qr(W_HMC.double().flatten(0, 1) @ L_CC, mode="r").R
    right_CC = torch.linalg.svd(R, full_matrices=True).Vh
    return torch.linalg.solve_triangular(L_CC, right_CC[:count], upper=False, left=False)


def query_key(q_HC: Tensor, k_C: Tensor, unit_C: Tensor, count: int) -> Tensor:
    """Channels of a key head, and of the query heads that share it, that make the largest part of their product, ascending (CR).

    What is taken is units, a channel or a rotary pair, by |q| |k| a channel, as long as no more than `count` channels are taken; for
    a pair both norms are those of the pair, which no rotation changes.

    Args:
        q_HC: mean square of each channel of the queries.
        k_C: of the key.
        unit_C: number of the unit that a channel belongs to.
        count: from 1 to C.
    """
    units = int(unit_C.max()) + 1
    zero_U = torch.zeros(units, dtype=torch.float64, device=k_C.device)
    q_U, k_U = (zero_U.index_add(0, unit_C, square_C.double()) for square_C in (q_HC.sum(0), k_C))
    size_U = torch.bincount(unit_C, minlength=units)
    taken, left = [], count
    for unit in ((q_U * k_U).sqrt() / size_U).argsort(descending=True).tolist():
        if size_U[unit] <= left:
            taken.append(unit)
            left -= int(size_U[unit])
    return torch.isin(unit_C, torch.tensor(taken, dtype=unit_C.dtype, device=unit_C.device)).nonzero()[:, 0]


def rotary_pairs(width: int, rotated: int, neighbours: bool = False) -> Tensor:
    """`unit_C` of `query_key` for a head of which the first `rotated` channels turn in pairs (arXiv 2104.09864); 0 where none do.

    Args:
        neighbours: pairs are (2 i, 2 i + 1), as in GPT-J; else (i, i + rotated / 2), as in Llama.
    """
    half = rotated // 2
    pair = torch.arange(half)
    return torch.cat((pair.repeat_interleave(2) if neighbours else pair.repeat(2), torch.arange(half, width - half)))
