"""Steepest descent under the spectral norm, inside the tangent space of a weight manifold.

    maximise <G, A>   subject to   |A|_2 <= 1   and   A tangent at W        (Bernstein 2025; arXiv 2606.13276, eq. 5)

Shapes: W_MN and G_MN are (..., M, N); X_LC is the orientation with the C constrained columns last (`manifolds`), L >= C.

A Gram-constrained W = Q diag(d) has orthonormal Q_LC, and a direction splits into a part inside the span of W and one
outside it:

    A = Q K + G' B,      K_CC = Q^T A,      G' = (1 - Q Q^T) G,      A^T A = K^T K + B^T S B  with  S = G'^T G'.

Only K is constrained: d_i K_ij + d_j K_ji = 0, a linear space onto which we project entry by entry. The norm bound
couples K and B. Let N be the projection of Q^T G. Then everything happens in C x C matrices:

1. K. At the optimum the dual matrix Z = Q (N + E) + G', with E normal to the span tangents, has a modulus
   T = (Z^T Z)^(1/2), and A = Z T^-1, so K T = N + E. For any fixed T this is the positive definite linear system
   project(K T) = N, solved by conjugate gradients at one product an iteration. Its solution minimises the majoriser
   |Z|_* <= (tr T + tr Z T^-1 Z^T) / 2 over E, so alternating T <- (Z^T Z)^(1/2) and K lowers the dual bound every time
   (iteratively reweighted least squares; Su's fixed point, kexue.fm 11221, without its singular value decomposition).
2. B. Given K, every B with B^T S B <= 1 - K^T K is feasible, and S^(-1/2) (1 - K^T K)^(1/2) is within second order of
   the best. What a rough K leaves unused, B takes up: the loss is second order in the error of K as well.

So A is tangent and in the unit ball however rough T is. `steps` = 0 takes T = (H + a) / (2 sqrt a) >= H^(1/2), with
H = N^T N + S and a = tr H / C, from the arithmetic-geometric mean inequality; `steps` = k alternates k times, one C x C
square root each. Measured cost and alignment: docs and `benchmarks/bench_steepest.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gnomon.errors import UserError
from gnomon.geometry.manifolds import DGram, Manifold, Oblique, Stiefel
from gnomon.geometry.polar import (
    accumulate_,
    add_identity,
    diagonal_mean,
    gram,
    inverse_sqrt,
    multiply,
    nonzero,
    polar,
    polar_restarted,
    spectral_norm,
    sqrt,
    unit,
    working_dtype,
)

# Polynomials in F below (1 - F)^(1/2), lowest power first. The rough one holds for F <= 0.8 and loses at most 2% of it up
# to 0.5; the fine one, (1 - F) times seven terms of the series of (1 - F)^(-1/2), holds up to 1.
ROUGH_ROOT = (1.0, -0.5, -0.24)
_SERIES: list[float] = [0.0, *(math.comb(2 * k, k) / 4**k for k in range(7)), 0.0]
FINE_ROOT: tuple[float, ...] = tuple(after - before for before, after in zip(_SERIES[:-2], _SERIES[1:-1])) + (-_SERIES[-2],)


@dataclass(frozen=True, eq=False)
class Direction:
    """A descent direction; the step is W - lr * A.

    A is (..., M, N), float32 (float64 for a float64 W), with |A|_2 <= 1. The two measures are taken when first read, in
    float64, and cost more than the direction did: read them in probes, not in every step. Each is a tensor on the
    device with one entry per matrix of the batch.
    """

    A: Tensor
    W: Tensor
    G: Tensor
    manifold: Manifold
    @cached_property
    def tangency(self) -> Tensor:
        """|A - tangent(A)|_F / |A|_F: the share of A that leaves the manifold. 0 is perfect."""
        A = self.A.double()
        off = torch.linalg.matrix_norm(A - self.manifold.tangent(self.W.double(), A))
        return off / nonzero(torch.linalg.matrix_norm(A))

    @cached_property
    def alignment(self) -> Tensor:
        """<G, A> over an upper bound of the optimum (the dual after four refinements): the true alignment is at least
        this. 1 is perfect; 1 for G = 0."""
        G = unit(self.G.double())
        gain = (G * self.A.double()).sum((-2, -1))
        bound = _dual_bound(self.W.double(), G, self.manifold)
        return torch.where(bound == 0, torch.ones_like(gain), gain / nonzero(bound))


@torch.no_grad()
def direction(
    W_MN: Tensor,
    G_MN: Tensor,
    manifold: Manifold,
    *,
    steps: int = 0,
    dtype: torch.dtype | None = None,
) -> Direction:
    """The tangent direction A with |A|_2 <= 1 along which a gradient or momentum G_MN falls fastest.

    Invariant to the scale of G and of DGram's column norms, equivariant to rotations of the columns' space and to
    permutations of the columns. G = 0 gives A = 0, and a tangent part below 1e-2 of G, which on a converged weight is
    mostly rounding, fades out instead of being blown up to size 1. NaN gives NaN. No host synchronisation.

    Args:
        W_MN: (..., M, N) on the manifold: `project` or `retract` first.
        G_MN: (..., M, N), any floating dtype.
        manifold:
            Stiefel, square: closed form W msign(skew(W^T G)), within 1e-3 of the optimum, |A|_2 within 6e-3 of 1; `steps`
                is not used.
            Stiefel and DGram with L > C: the module docstring. For L < 2 C there is little complement to make up for a
                rough K, and one refinement is always made.
            DGram, square: no complement at all; K is refined, then flattened. The hardest case: 0.88-0.95.
            Oblique: msign of the projected gradient and dual ascent on one multiplier a column.
            Euclidean, Sphere, SpectralBall, SpectralSphere: msign(G), exactly `torch.optim.Muon`'s, tangent or not.
            With `paper=True`: `paper_direction`, and none of the options below is read.
        steps: refinements of the dual variable.
        dtype: precision of the product Q K. Default bfloat16 for L >= 3 C, which leaves at most 6e-4 of A off the
            tangent space, full precision below; float64 for float64.

    Raises:
        UserError: the shapes differ, or the manifold cannot hold them.
    """
    if W_MN.shape != G_MN.shape:
        raise UserError(f"W has shape {tuple(W_MN.shape)} and G {tuple(G_MN.shape)}; they must be equal.")
    if getattr(manifold, "paper", False):
        return paper_direction(W_MN, G_MN, manifold)
    if manifold.free:
        return Direction(polar(G_MN, "newton-schulz", dtype=dtype), W_MN, G_MN, manifold)
    return Direction(_solve_for_direction(W_MN, G_MN, manifold, steps, dtype), W_MN, G_MN, manifold)


@torch.no_grad()
def paper_direction(W_MN: Tensor, G_MN: Tensor, manifold: Manifold, *, steps: int = 20, alpha: float = 0.1) -> Direction:
    """The dual ascent of arXiv 2606.13276 with its fixed step, for reproduction: `steps` msigns of ten bfloat16 Polar
    Express iterations each. Depends on the scale of G (near |G|_F = 1 it is good) and, for DGram, on the column norms.

    L <- L - alpha (1 - k / steps) P(W^T A + A^T W),  A = msign(G + 2 W L),  L_0 = -P(W^T G + G^T W) / 4, with P the
    identity (Stiefel), the off-diagonal part (DGram) or the diagonal (Oblique).
    """
    if not isinstance(manifold, Stiefel | DGram | Oblique):
        raise UserError(f"the paper's dual ascent is defined for Stiefel, DGram and Oblique, not {manifold}.")
    X_LC, G_LC = manifold.orient(W_MN), manifold.orient(G_MN).to(W_MN.dtype)

    def constrained(S_CC: Tensor) -> Tensor:
        S_CC = S_CC + S_CC.mT
        diagonal = torch.diag_embed(S_CC.diagonal(dim1=-2, dim2=-1))
        return S_CC if isinstance(manifold, Stiefel) else S_CC - diagonal if isinstance(manifold, DGram) else diagonal

    L_CC = -0.25 * constrained(X_LC.mT @ G_LC)
    A_LC = torch.zeros_like(G_LC)
    for k in range(steps):
        A_LC = polar(G_LC + 2 * X_LC @ L_CC, "polar-express", steps=10)
        L_CC = L_CC - alpha * (1 - k / steps) * constrained(X_LC.mT @ A_LC)
    return Direction(A_LC.mT if manifold.turned(W_MN.shape) else A_LC, W_MN, G_MN, manifold)


def _solve_for_direction(W_MN: Tensor, G_MN: Tensor, manifold: Manifold, steps: int, dtype: torch.dtype | None) -> Tensor:
    work = working_dtype(W_MN)
    G_LC = unit(manifold.orient(G_MN).to(work))
    if isinstance(manifold, Oblique):
        A_LC, _ = _oblique(manifold.orient(W_MN).to(work), G_LC, steps)
    elif isinstance(manifold, Stiefel) and W_MN.size(-2) == W_MN.size(-1):
        A_LC = _square_stiefel(manifold.frame(W_MN.to(work))[0], G_LC)
    else:
        A_LC = _gram_constrained(W_MN.to(work), G_LC, manifold, steps, dtype)
    return A_LC.mT if manifold.turned(W_MN.shape) else A_LC


@dataclass(frozen=True)
class SpanTangents:
    """The K_CC for which Q K is tangent, d_i K_ij + d_j K_ji = 0, as `pair_weights` of the manifold."""

    own: Tensor
    mirror: Tensor

    def project(self, K_CC: Tensor) -> Tensor:
        return self.own * K_CC - self.mirror * K_CC.mT

    def normal(self, K_CC: Tensor) -> Tensor:
        return K_CC - self.project(K_CC)


def _square_stiefel(Q_CC: Tensor, G_CC: Tensor) -> Tensor:
    N_CC = Q_CC.mT @ G_CC
    N_CC = (N_CC - N_CC.mT) / 2
    # msign of a skew matrix is skew. For odd C one singular value is 0 and stays 0, which an SVD would not grant.
    A_CC = polar_restarted(N_CC, _noise(G_CC), settled=False)
    return multiply(Q_CC, (A_CC - A_CC.mT) / 2)


def _gram_constrained(W_MN: Tensor, G_LC: Tensor, manifold: Manifold, steps: int, dtype: torch.dtype | None) -> Tensor:
    Q_LC, d_1C = manifold.frame(W_MN)
    rows, columns = Q_LC.shape[-2:]
    quick = _quick(Q_LC)
    noise = _noise(G_LC)
    span, N_CC, S_CC, G_LC = _in_frame(Q_LC, d_1C, G_LC, manifold)
    steps = steps if rows >= 2 * columns else max(steps, 1)
    K_CC, _ = _span_part(N_CC, S_CC, span, noise, steps, quick)
    if rows == columns:
        return multiply(Q_LC, _flatten(K_CC, span, quick))
    if steps == 0:
        K_CC = _within(K_CC, 0.894, 6)
        B_CC = inverse_sqrt(S_CC, noise=noise) @ _root_complement(K_CC, ROUGH_ROOT, quick)
    else:  # a refined K deserves a complement as exact as it is
        K_CC = _within(K_CC, 1.0, 16)
        B_CC = inverse_sqrt(S_CC, 5e-3, 3e-3, noise=noise) @ _root_complement(K_CC, FINE_ROOT, None)
    if dtype is None and rows >= 3 * columns:
        dtype = quick
    # G' B keeps full precision: B is as ill-conditioned as the gradient, and rounding it would break the norm bound.
    return accumulate_(multiply(Q_LC, K_CC, dtype), G_LC, B_CC)


def _in_frame(
    Q_LC: Tensor, d_1C: Tensor, G_LC: Tensor, manifold: Manifold
) -> tuple[SpanTangents, Tensor, Tensor, Tensor]:
    """The span tangents, N_CC, S_CC and the complement G'_LC of the module docstring; G_LC is overwritten by G'."""
    span = SpanTangents(*manifold.pair_weights(d_1C))
    K_CC = Q_LC.mT @ G_LC
    if Q_LC.size(-2) == Q_LC.size(-1):
        return span, span.project(K_CC), torch.zeros_like(K_CC), torch.zeros_like(G_LC)
    accumulate_(G_LC, Q_LC, K_CC, scale=-1)
    return span, span.project(K_CC), gram(G_LC), G_LC


def _span_part(
    N_CC: Tensor, S_CC: Tensor, span: SpanTangents, noise: Tensor, steps: int, quick: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """K_CC of step 1, and E_CC as far as it was refined."""
    E_CC = torch.zeros_like(N_CC)
    if steps == 0:
        H_CC = multiply(N_CC.mT, N_CC, quick) + S_CC
        root = nonzero(torch.maximum(diagonal_mean(H_CC), noise / N_CC.size(-1)).sqrt())
        return _solve(N_CC, add_identity(H_CC / (2 * root), root / 2), span, 2, quick), E_CC
    K_CC: Any = None
    best_T: Any = None
    best: Any = None
    for _ in range(steps):
        T_CC = sqrt(gram(N_CC + E_CC) + S_CC)
        value = diagonal_mean(T_CC)
        if best is not None:  # the dual bound falls for exact solves; inexact ones may undo a refinement
            T_CC = torch.where(value < best, T_CC, best_T)
            value = torch.minimum(value, best)
        best_T, best = T_CC, value
        K_CC = _solve(N_CC, T_CC, span, 4, quick, K_CC)
        E_CC = span.normal(K_CC @ T_CC)
    return K_CC, E_CC


def _solve(
    N_CC: Tensor,
    T_CC: Tensor,
    span: SpanTangents,
    iterations: int,
    quick: torch.dtype | None,
    start: Tensor | None = None,
) -> Tensor:
    """K_CC with project(K T) = N by conjugate gradients, from `start` or 0; every iterate is a span tangent."""
    K_CC = torch.zeros_like(N_CC) if start is None else start
    rest = N_CC if start is None else N_CC - span.project(multiply(start, T_CC, quick))
    search, size = rest, _dot(rest, rest)
    for _ in range(iterations):
        image = span.project(multiply(search, T_CC, quick))
        step = size / nonzero(_dot(search, image))
        K_CC = K_CC + step * search
        rest = rest - step * image
        smaller = _dot(rest, rest)
        search = rest + smaller / nonzero(size) * search
        size = smaller
    return K_CC


def _within(K_CC: Tensor, bound: float, steps: int) -> Tensor:
    """K_CC scaled down to |K|_2 <= bound where it exceeds it, by a power iteration and 1% for its error."""
    return K_CC / (1.01 / bound * spectral_norm(K_CC, steps)).clamp_min(1.0)


def _root_complement(K_CC: Tensor, polynomial: tuple[float, ...], quick: torch.dtype | None) -> Tensor:
    """R_CC = p(F) with R^2 <= 1 - F, F = K^T K."""
    F_CC = multiply(K_CC.mT, K_CC, quick)
    R_CC = add_identity(F_CC * polynomial[-1], polynomial[-2])
    for coefficient in reversed(polynomial[:-2]):
        R_CC = add_identity(multiply(F_CC, R_CC, quick), coefficient)
    return R_CC


def _flatten(K_CC: Tensor, span: SpanTangents, quick: torch.dtype | None) -> Tensor:
    """K_CC with its singular values pushed towards 1 by alternating cubic steps and projections, then |K|_2 <= 1."""
    K_CC = K_CC / nonzero(spectral_norm(K_CC, 16))
    for _ in range(3):
        F_CC = multiply(K_CC.mT, K_CC, quick)
        K_CC = span.project(1.5 * K_CC - 0.5 * multiply(K_CC, F_CC, quick))
    return K_CC / nonzero(1.01 * spectral_norm(K_CC, 16))


def _oblique(X_LC: Tensor, G_LC: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Dual ascent on one multiplier a column, its step the mean singular value of Z; best iterate; project; rescale."""
    rank = min(X_LC.shape[-2:])
    Z_LC = G_LC - X_LC * _columns_dot(X_LC, G_LC)
    dual = torch.zeros_like(_columns_dot(X_LC, Z_LC))
    best: Any = None
    for step in range(steps + 1):
        shifted = Z_LC + X_LC * dual
        A_LC = polar(shifted, "gram")
        value = _dot(shifted, A_LC)
        if best is not None:
            better = value < best[0]
            value, A_LC, dual = (torch.where(better, new, old) for new, old in zip((value, A_LC, dual), best))
        best = value, A_LC, dual
        if step < steps:
            dual = dual - value / rank * _columns_dot(X_LC, A_LC)
    value, A_LC, dual = best
    A_LC = A_LC - X_LC * _columns_dot(X_LC, A_LC)
    return A_LC / (1.01 * spectral_norm(A_LC, 16)).clamp_min(1.0), dual


def _dual_bound(W_MN: Tensor, G_MN: Tensor, manifold: Manifold) -> Tensor:
    """An upper bound on <G, A> over all feasible A, (...): |tangent(G) + any normal vector|_*, the lesser of two."""
    G_LC = manifold.orient(G_MN)
    if manifold.free:
        return _nuclear(G_LC.mT @ G_LC)
    if isinstance(manifold, Oblique):
        X_LC = manifold.orient(W_MN)
        Z_LC = G_LC - X_LC * _columns_dot(X_LC, G_LC)
        Y_LC = Z_LC + X_LC * _oblique(X_LC, G_LC, 4)[1]
        return torch.minimum(_nuclear(Z_LC.mT @ Z_LC), _nuclear(Y_LC.mT @ Y_LC))
    span, N_CC, S_CC, _ = _in_frame(*manifold.frame(W_MN), G_LC, manifold)
    bound = _nuclear(gram(N_CC) + S_CC)
    if isinstance(manifold, Stiefel) and W_MN.size(-2) == W_MN.size(-1):
        return bound
    _, E_CC = _span_part(N_CC, S_CC, span, _noise(G_LC), 4, None)
    return torch.minimum(bound, _nuclear(gram(N_CC + E_CC) + S_CC))


def _nuclear(H_CC: Tensor) -> Tensor:
    """Nuclear norm of X from H = X^T X."""
    return torch.linalg.eigvalsh(H_CC).clamp_min(0).sqrt().sum(-1)


def _noise(G_LC: Tensor) -> Tensor:
    """The squared size at which a tangent part of G_LC starts to fade: rounding, not descent."""
    return 1e-4 * _frobenius(G_LC).square()


def _quick(X: Tensor) -> torch.dtype | None:
    """Precision of the C x C products whose error A does not inherit."""
    return torch.bfloat16 if X.dtype == torch.float32 else None


def _frobenius(X: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(X, keepdim=True)


def _columns_dot(X_LC: Tensor, A_LC: Tensor) -> Tensor:
    return (X_LC * A_LC).sum(-2, keepdim=True)


def _dot(A: Tensor, B: Tensor) -> Tensor:
    return (A * B).sum((-2, -1), keepdim=True)
