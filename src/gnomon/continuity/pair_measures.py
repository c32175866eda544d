"""Measures of continuity between two matrices, each with the level chance would reach and its z-score.

The two matrices have one role and shape and lie some layers apart. Everything is computed from their stored
singular vectors, so no two large matrices are ever in memory. Shapes: U_kM, V_kN rows are vectors.

    v1_cos, u1_cos            |cos| of the leading right (input) and left (output) vectors, arXiv:2605.04971 Eq. 1
    subspace_v, subspace_u    mean squared cosine of the principal angles of the k leading vectors
    angles_v, angles_u        those angles, degrees, ascending
    weighted_v, weighted_u    sum_i w_i |cos(v_i, v_i')|, w_i = sigma_i^2 / ||W||_F^2 of the first, Eq. 2 (full)
    gram_v, gram_u            cosine of W^T W and W'^T W' (W W^T), each less its mean eigenvalue: no basis (full)
    frobenius                 cosine of W and W' as vectors, with sign (full)

The absolute value is taken because singular vectors have no sign.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gnomon.geometry import subspace
from gnomon.geometry.subspace import Null, Singular

# Below this ratio of sigma_1 to sigma_2, v_1 is a vector of a plane and its direction an accident.
GAP_UNDEFINED = 1.002
# Below this it is defined but fragile: a change of the weights by 2 % may turn it by a right angle.
GAP_FRAGILE = 1.02
# Largest angle (radians) by which an unfinished iteration may have v_1 wrong.
_TURN = 0.1


def undefined(at: Singular) -> str:
    """Why the leading vectors of this matrix mean nothing; "" when they do."""
    if at.norm == 0:
        return "the matrix is zero"
    if at.gap < GAP_UNDEFINED:
        return f"sigma1/sigma2 = {at.gap:.5f}: v1 and u1 may be any vector of a plane"
    if float(at.residual_k[0]) > _TURN * (1 - 1 / at.gap):
        return f"the iteration stopped at residual {float(at.residual_k[0]):.1e} with a gap of {at.gap:.4f}"
    return ""


def flat(at: Singular, k: int) -> bool:
    """Whether the k leading singular values are all equal, so that no subspace leads (Stiefel weights)."""
    k = min(max(k, 2), len(at.sigma_k))
    return at.norm == 0 or (k > 1 and float(at.sigma_k[0]) < GAP_UNDEFINED * float(at.sigma_k[k - 1]))


def compare(a: Singular, b: Singular, k: int, full: bool) -> dict[str, Any]:
    """All measures of a pair.

    None for those of the full tier without it, for all where one matrix is zero, and for a side on which the two have
    different widths.
    """
    row: dict[str, Any] = {}
    k = min(k, len(a.sigma_k), len(b.sigma_k))
    zero = a.norm == 0 or b.norm == 0
    for side, A, B in (("v", a.V_kN, b.V_kN), ("u", a.U_kM, b.U_kM)):
        if A.shape[1] != B.shape[1]:
            row |= _no_side(side)
            continue
        dim = A.shape[1]
        one = None if zero else abs(float(A[0].double() @ B[0].double()))
        row |= scored(f"{side}1", one, subspace.cosine_null(dim), name=f"{side}1_cos")
        shared = None if zero else subspace.overlap(A[:k], B[:k])
        row |= scored(f"subspace_{side}", shared, subspace.overlap_null(dim, k))
        angles = [] if zero else torch.rad2deg(subspace.principal_angles(A[:k], B[:k])).tolist()
        row[f"angles_{side}"] = [round(angle, 4) for angle in angles]
        row[f"angle_{side}_null"] = math.degrees(subspace.angle_null(dim, k))
    row |= _full(a, b) if full else _NO_FULL
    row["subspace_defined"] = not (flat(a, k) or flat(b, k))
    row["gap"] = min(a.gap, b.gap)
    row["residual"] = float(max(a.residual_k[:k].max(), b.residual_k[:k].max()))
    return row


def _no_side(side: str) -> dict[str, Any]:
    keys = [f"{name}{end}" for name in (f"{side}1", f"subspace_{side}") for end in ("_null", "_z")]
    nothing = dict.fromkeys([f"{side}1_cos", f"subspace_{side}", *keys, f"angle_{side}_null"])
    return nothing | {f"angles_{side}": []}


def unmeasured(shape: tuple[int, ...], next_shape: tuple[int, ...], k: int) -> dict[str, Any]:
    """The row of a pair of which a matrix could not be measured: null levels, and None for every value."""
    k = min(k, *shape, *next_shape)
    a, b = (
        Singular(torch.zeros(k, M), torch.zeros(k), torch.zeros(k, N), torch.zeros(k), 0.0)
        for M, N in (shape, next_shape)
    )
    return compare(a, b, k, full=False) | {"gap": None, "residual": None}


def scored(key: str, value: float | None, null: Null, name: str | None = None) -> dict[str, float | None]:
    """`key` with `key_null` and `key_z`, the number of null standard deviations above the null mean."""
    z = None if value is None or null.sd == 0 else (value - null.mean) / null.sd
    return {name or key: value, f"{key}_null": null.mean, f"{key}_z": z}


def _full(a: Singular, b: Singular) -> dict[str, float | None]:
    if a.norm == 0 or b.norm == 0 or any(len(x.sigma_k) < min(x.U_kM.shape[1], x.V_kN.shape[1]) for x in (a, b)):
        return _NO_FULL
    share_a, share_b = (x.sigma_k.square() / x.sigma_k.square().sum() for x in (a, b))
    spread = float(share_a.square().sum().sqrt())
    row, cross = dict(_NO_FULL), {}
    for side, A, B in (("v", a.V_kN, b.V_kN), ("u", a.U_kM, b.U_kM)):
        if (dim := A.shape[1]) != B.shape[1]:
            continue
        C_rr = cross[side] = (A.double() @ B.double().T).cpu()
        null, aligned = subspace.cosine_null(dim), C_rr.diagonal().abs()
        row |= scored(
            f"weighted_{side}", float((share_a[: len(aligned)] * aligned).sum()), Null(null.mean, null.sd * spread)
        )
        row |= scored(f"gram_{side}", gram_cosine(share_a, share_b, C_rr, dim), subspace.gram_null(dim))
    if len(cross) == 2:
        inner = float(a.sigma_k @ (cross["u"] * cross["v"]) @ b.sigma_k)
        row |= scored("frobenius", inner / (a.norm * b.norm), subspace.frobenius_null(a.U_kM.shape[1], a.V_kN.shape[1]))
    return row


def gram_cosine(share_a: Tensor, share_b: Tensor, C_rr: Tensor, dim: int, centred: bool = True) -> float | None:
    """Cosine of G = W^T W and G' from their eigenvalues (at trace 1) and the cosines of their eigenvectors.

    <G, G'> = sum_ij s_i s'_j C_ij^2. Not centred it is 1/(1 + N/M) already for random matrices; centring
    takes tr(G)/dim times the identity away, which takes 1/dim from each inner product. None when one is a
    multiple of the identity.
    """
    inner = float(share_a @ C_rr.square() @ share_b)
    own_a, own_b = float(share_a @ share_a), float(share_b @ share_b)
    mean = 1 / dim if centred else 0.0
    if min(own_a, own_b) - mean < 1e-6 * mean:
        return None
    return (inner - mean) / math.sqrt((own_a - mean) * (own_b - mean))


def effective_rank(sigma_k: Tensor) -> float:
    """exp of the entropy of p_i = sigma_i^2 / sum sigma^2 (arXiv:2605.04971 Eq. 3)."""
    p = sigma_k.square() / sigma_k.square().sum()
    return float(torch.exp(-torch.xlogy(p, p).sum()))


_NO_FULL: dict[str, float | None] = {
    f"{key}{end}": None
    for key in ("weighted_v", "weighted_u", "gram_v", "gram_u", "frobenius")
    for end in ("", "_null", "_z")
}
