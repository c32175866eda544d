"""Steepest descent under the spectral norm, inside the tangent space of a weight manifold.

    maximise <G, A>   subject to   |A|_2 <= 1   and   A tangent at W            (arXiv 2606.13276; Bernstein 2025)

W and G are (..., M, N); below X_LC is the orientation with the C constrained columns last (`manifolds`), L >= C.
A Gram-constrained W = Q diag(d) has orthonormal Q_LC, and A splits into a part in the span of W and one outside it:

    A = Q K + G' B,     K_CC = Q^T A,     G' = (1 - Q Q^T) G,     A^T A = K^T K + B^T (G'^T G') B.

Only K is constrained: d_i K_ij + d_j K_ji = 0, a linear space we call span tangents and project onto entry by entry;
the norm bound couples the two. So, with N the projection of Q^T G and S = G'^T G' (all C x C; arXiv ids aside, ours):

  1. K. At the optimum the dual matrix Z = Q (N + E) + G', E normal, has modulus T = (Z^T Z)^(1/2) and A = Z T^-1,
     hence K T = N + E. Given any T this is a positive definite linear system, project(K T) = N: conjugate gradients,
     one C x C product an iteration. It is the exact minimiser of the majoriser |Z|_* <= (tr T + tr Z T^-1 Z^T) / 2,
     so alternating T <- (Z^T Z)^(1/2) and K lowers the dual bound every time: iteratively reweighted least squares,
     Su's fixed point (kexue.fm 11221) without its singular value decomposition.
  2. B. Given K, anything with B^T S B <= 1 - K^T K is feasible, and S^(-1/2) (1 - K^T K)^(1/2) is within second order
     of the best. The loss from an inexact K is second order too, because what K leaves unused B takes up.

A is therefore tangent and in the unit ball whatever the accuracy of T. `steps` = 0 takes T from the arithmetic-geometric
mean inequality, T = (H + a) / (2 sqrt a) >= H^(1/2) for H = N^T N + S and a = tr H / C, which costs nothing;
`steps` = k alternates k times, one C x C square root each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gnomon.errors import UserError
from gnomon.geometry.manifolds import Euclidean, Manifold, Oblique, Stiefel
from gnomon.geometry.polar import (
    add_identity,
    diagonal_mean,
    gram,
    inverse_sqrt,
    multiply,
    polar,
    polar_restarted,
    spectral_norm,
    sqrt,
    unit,
)


@dataclass(frozen=True, eq=False)
class Direction:
    """A descent direction: the step is W - lr * A.

    A is (..., M, N) in the working dtype, |A|_2 <= 1. The measures below are computed when first read (never in an
    optimizer step), as tensors on the device, one per matrix of the batch.
    """

    A: Tensor
    W: Tensor
    G: Tensor
    manifold: Manifold
    normal: Tensor | None = None  # the dual variable: E_CC, or one number a column for Oblique; None is zero

    @cached_property
    def tangency(self) -> Tensor:
        """|A - tangent(A)|_F / |A|_F, the part of A that leaves the manifold; 0 is perfect. (...)"""
        A = self.A.double()
        off = torch.linalg.matrix_norm(A - self.manifold.tangent(self.W.double(), A))
        return off / _nonzero(torch.linalg.matrix_norm(A))

    @cached_property
    def alignment(self) -> Tensor:
        """<G, A> over a certified upper bound of the optimum, so the true alignment is at least this; 1 is perfect. (...)

        The bound is the nuclear norm of tangent(G) + normal vectors, with and without the solver's dual variable.
        """
        manifold, W = self.manifold, self.W.double()
        G = unit(self.G.double())
        Z = manifold.orient(manifold.tangent(W, G))
        bound = _nuclear(Z)
        if self.normal is not None:
            normal = self.normal.double()
            lift = manifold.orient(W) * normal if isinstance(manifold, Oblique) else manifold.frame(W)[0] @ normal
            bound = torch.minimum(bound, _nuclear(Z + lift))
        gain = (G * self.A.double()).sum((-2, -1))
        return torch.where(bound == 0, torch.ones_like(gain), gain / _nonzero(bound))


def direction(
    W_MN: Tensor,
    G_MN: Tensor,
    manifold: Manifold,
    *,
    steps: int = 0,
    warm: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Direction:
    """The unit spectral-norm tangent direction A that a gradient or momentum G_MN gains most from: step W - lr * A.

    Invariant to the scale of G, equivariant to rotations of the columns' space and to permutations of the columns.
    G = 0 gives A = 0; a G whose tangent part is rounding noise (1e-2 of G and below) fades to 0 instead of being blown
    up. No host synchronisation, no Python branch on values.

    Args:
        W_MN: (..., M, N) on the manifold (`project` first; a violation of 1e-3 costs as much in tangency).
        G_MN: (..., M, N), any floating dtype.
        manifold: Stiefel: square is closed form, W msign(skew(W^T G)), exact to 1e-5. Stiefel and DGram with L > C
            columns: see above. DGram with L = C has no complement to make up for K, so it gains most from `steps`.
            Oblique: projected msign and scalar dual ascent, one number a column. Euclidean: msign(G), Muon's own.
        steps: refinements of the dual variable. 0 is one matrix function in all, the price of one msign.
        warm: `normal` of the previous Direction for this weight, where the refinement then starts.
        dtype: precision of the large last product. Default bfloat16 for L >= 3 C (its rounding is then 7e-4 of A in
            tangency), full precision below, float64 for float64.

    Returns:
        Direction with A, and `tangency`, `alignment` measured when read; `normal`, the dual variable divided by the
        root mean square singular value of tangent(G), when `steps` > 0.

    Raises:
        UserError: shapes differ, or the manifold cannot hold the shape.
    """
    if W_MN.shape != G_MN.shape:
        raise UserError(f"W has shape {tuple(W_MN.shape)} and G {tuple(G_MN.shape)}; they must be equal.")
    if isinstance(manifold, Euclidean):
        return Direction(polar(G_MN, "newton-schulz", dtype=dtype), W_MN, G_MN, manifold)
    work = torch.float64 if W_MN.dtype == torch.float64 else torch.float32
    G = unit(manifold.orient(G_MN).to(work))
    if isinstance(manifold, Oblique):
        A, normal = _oblique(manifold.orient(W_MN).to(work), G, steps, warm)
    else:
        A, normal = _gram_constrained(*manifold.frame(W_MN.to(work)), G, manifold, steps, warm, dtype)
    return Direction(A.mT if manifold.turned(W_MN.shape) else A, W_MN, G_MN, manifold, normal)


def _gram_constrained(
    Q_LC: Tensor,
    d_1C: Tensor,
    G_LC: Tensor,
    manifold: Manifold,
    steps: int,
    warm: Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    rows, columns = Q_LC.shape[-2:]
    quick = torch.bfloat16 if Q_LC.dtype == torch.float32 else None  # for products whose error A does not inherit
    noise = 1e-4 * G_LC.square().sum((-2, -1), keepdim=True)
    span = SpanTangents(*manifold.pair_weights(d_1C))
    if rows == columns and isinstance(manifold, Stiefel):
        N_CC = span.project(Q_LC.mT @ G_LC)
        # msign of a skew matrix is skew. For odd C one singular value is 0 and stays 0, which an SVD would not grant.
        return multiply(Q_LC, span.project(polar_restarted(N_CC, noise))), None
    K_CC = Q_LC.mT @ G_LC
    N_CC = span.project(K_CC)
    if rows == columns:
        S_CC = torch.zeros_like(K_CC)
    else:
        G_LC = G_LC - multiply(Q_LC, K_CC)
        S_CC = gram(G_LC)
    # Short of 2 C rows there is little complement to make up for a rough K, so the first refinement is not optional.
    steps = steps if rows >= 2 * columns else max(steps, 1)
    K_CC, normal = _in_span(N_CC, S_CC, span, noise, steps, warm, quick)
    if rows == columns:
        return multiply(Q_LC, _flatten(K_CC, span, quick)), normal
    K_CC = K_CC / (1.02 * spectral_norm(K_CC)).clamp_min(1.0)
    # Refined K deserve a complement as exact as they are: three more poles, four more terms.
    root = inverse_sqrt(S_CC, *((1e-2, 0.025) if steps == 0 else (2e-3, 3e-3)), noise=noise)
    B_CC = root @ _root_complement(K_CC, 3 if steps == 0 else 7, quick)
    if dtype is None and rows >= 3 * columns:
        dtype = quick
    # G' B stays in full precision: B is as ill-conditioned as the gradient, and rounding it would break the norm bound.
    return multiply(Q_LC, K_CC, dtype) + multiply(G_LC, B_CC), normal


@dataclass(frozen=True)
class SpanTangents:
    """The K_CC for which Q K is tangent: d_i K_ij + d_j K_ji = 0 (`_Orthogonal.pair_weights`)."""

    own: Tensor
    mirror: Tensor

    def project(self, K_CC: Tensor) -> Tensor:
        return self.own * K_CC - self.mirror * K_CC.mT


def _in_span(
    N_CC: Tensor, S_CC: Tensor, span: SpanTangents, noise: Tensor, steps: int, warm: Tensor | None, quick: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """K_CC of step 1 of the module docstring, and the scale-free dual variable where it was refined."""
    columns = N_CC.size(-1)
    H_CC = multiply(N_CC.mT, N_CC, quick) + S_CC
    a = torch.maximum(diagonal_mean(H_CC), noise / columns)
    E_CC = None if warm is None else warm * a.sqrt()
    if steps == 0:
        if E_CC is not None:
            H_CC = gram(N_CC + E_CC) + S_CC
        T_CC = add_identity(H_CC / (2 * _nonzero(a.sqrt())), a.sqrt() / 2)
        K_CC = _solve(N_CC, T_CC, span, 2, quick)
        if E_CC is None:
            return K_CC, None
    best_T, best_value, K_CC = None, None, None
    for _ in range(steps):
        T_CC = sqrt((gram(N_CC) if E_CC is None else gram(N_CC + E_CC)) + S_CC)
        value = diagonal_mean(T_CC)
        if best_T is not None:
            T_CC = torch.where(value < best_value, T_CC, best_T)
            value = torch.minimum(value, best_value)
        best_T, best_value = T_CC, value
        K_CC = _solve(N_CC, T_CC, span, 4, quick, K_CC)
        E_CC = K_CC @ T_CC
        E_CC = E_CC - span.project(E_CC)
    return K_CC, E_CC / _nonzero(a.sqrt())


def _solve(
    N_CC: Tensor,
    T_CC: Tensor,
    span: SpanTangents,
    iterations: int,
    quick: torch.dtype | None,
    start: Tensor | None = None,
) -> Tensor:
    """K_CC with project(K T) = N, by conjugate gradients from `start` or 0; every iterate is a span tangent."""
    K_CC = torch.zeros_like(N_CC) if start is None else start
    rest = N_CC if start is None else N_CC - span.project(multiply(start, T_CC, quick))
    search = rest
    size = _dot(rest, rest)
    for _ in range(iterations):
        image = span.project(multiply(search, T_CC, quick))
        step = size / _nonzero(_dot(search, image))
        K_CC = K_CC + step * search
        rest = rest - step * image
        smaller = _dot(rest, rest)
        search = rest + smaller / _nonzero(size) * search
        size = smaller
    return K_CC


def _root_complement(K_CC: Tensor, terms: int, quick: torch.dtype | None) -> Tensor:
    """R_CC with R^2 <= 1 - F for F = K^T K <= 1: the series of (1 - F) (1 - F)^(-1/2), always from below."""
    F_CC = multiply(K_CC.mT, K_CC, quick)
    series = [math.comb(2 * k, k) / 4**k for k in range(terms)]
    R_CC = add_identity(F_CC * series[-1], series[-2])
    for coefficient in reversed(series[:-2]):
        R_CC = add_identity(multiply(F_CC, R_CC, quick), coefficient)
    return R_CC - multiply(F_CC, R_CC, quick)


def _flatten(K_CC: Tensor, span: SpanTangents, quick: torch.dtype | None) -> Tensor:
    """K_CC with its singular values pushed towards 1 by alternating cubic steps and projections, then |K|_2 <= 1."""
    K_CC = K_CC / _nonzero(1.02 * spectral_norm(K_CC))
    for _ in range(3):
        F_CC = multiply(K_CC.mT, K_CC, quick)
        K_CC = span.project(1.5 * K_CC - 0.5 * multiply(K_CC, F_CC, quick))
    return K_CC / _nonzero(1.02 * spectral_norm(K_CC))


def _oblique(X_LC: Tensor, G_LC: Tensor, steps: int, warm: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """msign of the projected gradient plus dual ascent on one multiplier a column, then projected and renormalised."""

    def column(A: Tensor) -> Tensor:
        return (X_LC * A).sum(-2, keepdim=True)

    Z_LC = G_LC - X_LC * column(G_LC)
    scale = _frobenius(Z_LC) / min(X_LC.shape[-2:]) ** 0.5
    dual = torch.zeros_like(column(Z_LC)) if warm is None else warm * scale
    best = None
    for step in range(steps + 1):
        A = polar(Z_LC + X_LC * dual, "gram")
        value = ((Z_LC + X_LC * dual) * A).sum((-2, -1), keepdim=True)
        if best is not None:
            better = value < best[0]
            A, value, dual = (torch.where(better, new, old) for new, old in zip((A, value, dual), best[1:2] + best[:1] + best[2:]))
        best = value, A, dual
        if step < steps:
            dual = dual - column(A) * value / min(X_LC.shape[-2:])
    A = A - X_LC * column(A)
    return A / (1.02 * spectral_norm(A)).clamp_min(1.0), dual / _nonzero(scale) if steps or warm is not None else None


def _frobenius(X: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(X, keepdim=True)


def _nuclear(X_LC: Tensor) -> Tensor:
    return torch.linalg.svdvals(X_LC).sum(-1)


def _dot(A: Tensor, B: Tensor) -> Tensor:
    return (A * B).sum((-2, -1), keepdim=True)


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)
