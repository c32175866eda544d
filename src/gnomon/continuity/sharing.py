"""What one basis for two neighbouring layers would cost, beside a private SVD of each at the same size.

For layers 2i and 2i+1 and a share `keep` of their parameters: the relative squared error of the best

    private      W_l = A_l B_l               rank keep MN / (M + N) each
    input        W_l = A_l B, B shared       rank keep 2MN / (N + 2M): the top right vectors of [W_1; W_2]
    output       W_l = A B_l, A shared       rank keep 2MN / (M + 2N): the top left vectors of [W_1, W_2]

in the Frobenius norm and with nothing about the data (Basis Sharing, arXiv:2410.03765, without its
whitening).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnomon.continuity.one_pass import Measured
from gnomon.geometry.subspace import Singular


def row(first: Measured, second: Measured, keep: float) -> dict[str, Any] | None:
    """Errors of the three ways for one pair; None when a spectrum is missing or zero, or the shapes differ."""
    a, b = first.at, second.at
    if a is None or b is None or not (a.norm and b.norm) or first.part.shape != second.part.shape:
        return None
    M, N = a.U_kM.shape[1], a.V_kN.shape[1]
    if min(len(a.sigma_k), len(b.sigma_k)) < min(M, N):
        return None
    budget = keep * 2 * M * N
    whole = a.norm**2 + b.norm**2
    rank = round(budget / 2 / (M + N))
    private = float(a.sigma_k[rank:].square().sum() + b.sigma_k[rank:].square().sum()) / whole
    return {
        "stack": first.part.stack,
        "role": first.part.role,
        "layer": first.part.layer,
        "next_layer": second.part.layer,
        "keep": keep,
        "private": private,
        "input": _tail(_sum_of_grams(a, b, inputs=True), round(budget / (N + 2 * M))) / whole,
        "output": _tail(_sum_of_grams(a, b, inputs=False), round(budget / (M + 2 * N))) / whole,
    }


def _sum_of_grams(a: Singular, b: Singular, inputs: bool) -> Tensor:
    """A matrix with the non-zero eigenvalues of W^T W + W'^T W' (or W W^T + …), on its smaller side."""
    rows = [
        at.sigma_k[:, None].to(vectors) * vectors
        for at, vectors in ((one, (one.V_kN if inputs else one.U_kM).double()) for one in (a, b))
    ]
    stacked = torch.cat(rows)
    return stacked @ stacked.T if stacked.shape[0] < stacked.shape[1] else stacked.T @ stacked


def _tail(gram: Tensor, rank: int) -> float:
    """Energy outside the top `rank` directions."""
    return float(torch.linalg.eigvalsh(gram).flip(0)[rank:].clamp_min(0).sum())
