"""Manifolds that constrain a norm of a weight as a whole: none at all, the Frobenius norm, the largest singular value.

All take Muon's direction, msign(G) wherever W is; the constraint is met on the way back.
Leading dimensions are a batch. Nothing here synchronises with the host except `project` and `SpectralSphere`'s tangent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gnomon.geometry import polar as polar_factor
from gnomon.geometry.polar import add_identity, gram, nonzero, spectral_norm
from gnomon.geometry.weight_manifold import Manifold, require


@dataclass(frozen=True)
class Euclidean(Manifold):
    """No constraint: plain Muon. tangent is the identity, decay is W * factor, violation is 0."""

    name: ClassVar[str] = "euclidean"
    free: ClassVar[bool] = True

    def _retract(self, X_LC: Tensor, near: bool) -> Tensor:
        return X_LC.clone()

    def _tangent(self, X_LC: Tensor, M_LC: Tensor) -> Tensor:
        return M_LC.clone()

    def _violation(self, X_LC: Tensor) -> Tensor:
        return X_LC.new_zeros(X_LC.shape[:-2])

    def _complete(self, X_LC: Tensor, generator: torch.Generator | None) -> Tensor:
        return X_LC  # nothing is left out


@dataclass(frozen=True)
class Sphere(Manifold):
    """Every matrix keeps the Frobenius norm R it has: Hyperball (arXiv 2606.16899).

        W <- R normalise(W - lr R normalise(A)),     R = |W|_F,     normalise(X) = X / |X|_F

    `lr` is the *relative* length of a step: whatever the norms of W and A, W turns by arctan(lr) or less. So shape factors
    (`gnomon.optim.SCALES`) have no say here. R is not stored: it is what the matrix has, so any matrix lies on its sphere, to
    the bit, and scaling one (a loader, an init) gives it another sphere. decay: no-op (purely normal).

    With `least` a matrix shorter than R' = least sqrt(M), M its outputs, has not reached its sphere yet: it moves freely, by steps
    of lr R', until it is R' long, and stays on that sphere from then on. So matrices may start at zero, or small. A gain of 1 takes
    inputs with entries of size 1 to such outputs.

    Without, a matrix of zeros has no direction and would stay zero for ever: violation 1, and 0 for all others. `retract` leaves
    it; `project` draws one with entries of variance 1 / max(M, N), whose singular values are about 1.
    """

    name: ClassVar[str] = "sphere"
    free: ClassVar[bool] = True
    decays: ClassVar[bool] = False

    least: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.least >= 0, f"Sphere(least={self.least}): a length must not be negative.")

    def move(self, W_MN: Tensor, X_MN: Tensor) -> Tensor:
        """R normalise(W + X): the retraction at W, of second order."""
        return self._back(W_MN, W_MN + X_MN)

    def step(self, W_MN: Tensor, A_MN: Tensor, lr: float | Tensor, factor: float = 1.0, *, near: bool = False) -> Tensor:
        """R normalise(W - lr R normalise(A)); `factor` and `near` change nothing."""
        return self._back(W_MN, A_MN.mul_(-lr * self._radius(W_MN) / nonzero(_frobenius(A_MN))).add_(W_MN))

    def _radius(self, W_MN: Tensor) -> Tensor:
        return _frobenius(W_MN).clamp_min(self.least * W_MN.size(-2) ** 0.5)

    def _back(self, W_MN: Tensor, moved_MN: Tensor) -> Tensor:
        """`moved_MN`, overwritten, at the length of W or, on the way to its sphere, at its own."""
        R, size = self._radius(W_MN), nonzero(_frobenius(moved_MN))
        short = _frobenius(W_MN) < 0.999 * R  # what has arrived stays, also where rounding took a little off
        return moved_MN.mul_(torch.where(short, torch.minimum(size, R), R) / size)

    def _retract(self, X_LC: Tensor, near: bool) -> Tensor:
        return X_LC.clone()

    def _tangent(self, X_LC: Tensor, M_LC: Tensor) -> Tensor:
        return M_LC - X_LC * (_dot(X_LC, M_LC) / nonzero(_dot(X_LC, X_LC)))

    def _violation(self, X_LC: Tensor) -> Tensor:
        return ((X_LC == 0).all(-1).all(-1) & (self.least == 0)).to(X_LC.dtype)

    def _complete(self, X_LC: Tensor, generator: torch.Generator | None) -> Tensor:
        empty = (X_LC == 0).all(-1, keepdim=True).all(-2, keepdim=True)
        return torch.where(empty, _noise(X_LC, generator), X_LC)


@dataclass(frozen=True)
class _Spectral(Manifold):
    """A bound on the largest singular value."""

    free: ClassVar[bool] = True

    radius: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.radius > 0, f"{type(self).__name__}(radius={self.radius}): the radius must be positive.")


@dataclass(frozen=True)
class SpectralBall(_Spectral):
    """Matrices whose singular values are at most `radius`: an inequality, which acts only where it binds.

    Singular values above the radius come down to it and the rest of the matrix stays (the nearest point of the ball in every
    unitarily invariant norm); a matrix inside stays as it is to the bit. tangent is the identity: inside, every direction is
    one. decay is W * factor. violation: the relative excess of the largest singular value.
    """

    name: ClassVar[str] = "spectral-ball"

    def random(self, m: int, n: int, **options: Any) -> Tensor:
        """A Gaussian scaled to half the radius: a point inside, where nothing binds."""
        W_MN = torch.randn(m, n, generator=options.get("generator"), dtype=torch.float64, device=options.get("device"))
        return (W_MN * (0.5 * self.radius / torch.linalg.matrix_norm(W_MN, 2))).to(options.get("dtype", torch.float32))

    def _retract(self, X_LC: Tensor, near: bool) -> Tensor:
        if not near:
            X_LC = self._cut(X_LC, polar_factor.near(polar_factor.polar(X_LC)))
        # From far away the difference of large numbers left an error, which a second cut takes off. A step from inside leaves
        # singular values below sqrt(3): the cubic iteration takes those from 1 on to 1, and smaller ones up towards it. Of
        # these Q^T X is less than the singular value, so what was no excess is none.
        return self._cut(X_LC, polar_factor.near(X_LC / self.radius, 4))

    def _cut(self, X_LC: Tensor, Q_LC: Tensor) -> Tensor:
        """X - Q (Q^T X - radius)+ with Q the polar factor of X, and (S)+ = (S + S sign(S)) / 2 of a symmetric S."""
        S_CC = Q_LC.mT @ X_LC / self.radius
        S_CC = add_identity((S_CC + S_CC.mT) / 2, -1.0)
        excess_CC = (S_CC + S_CC @ polar_factor.near(polar_factor.polar(S_CC))) / 2
        rounding = 1e-12 if X_LC.dtype == torch.float64 else 5e-6
        excess_CC = torch.where(spectral_norm(excess_CC) <= rounding, 0.0, excess_CC)
        return X_LC - self.radius * Q_LC @ excess_CC

    def _tangent(self, X_LC: Tensor, M_LC: Tensor) -> Tensor:
        return M_LC.clone()

    def _violation(self, X_LC: Tensor) -> Tensor:
        return (torch.linalg.matrix_norm(X_LC, 2) / self.radius - 1).clamp_min(0)

    def _complete(self, X_LC: Tensor, generator: torch.Generator | None) -> Tensor:
        return X_LC  # a bound leaves nothing out


@dataclass(frozen=True)
class SpectralSphere(_Spectral):
    """Matrices whose largest singular value is `radius` (arXiv 2601.08393 with its multiplier at 0, "MuonSphere").

    Retraction: the whole matrix is scaled. violation: how far the largest singular value is from the radius, relative. decay:
    no-op, since a factor on the whole is scaled away. A matrix of zeros has no direction: `retract` leaves it zero (violation
    1), `project` draws one.
    """

    name: ClassVar[str] = "spectral-sphere"
    decays: ClassVar[bool] = False

    def _retract(self, X_LC: Tensor, near: bool) -> Tensor:
        return X_LC * (self.radius / nonzero(largest_singular_value(X_LC)))

    def _tangent(self, X_LC: Tensor, M_LC: Tensor) -> Tensor:
        """Without the part along u v^T, the leading singular vectors of X."""
        U_LC, _, V_CC = torch.linalg.svd(X_LC, full_matrices=False)
        lead_LC = U_LC[..., :1] @ V_CC[..., :1, :]
        return M_LC - lead_LC * _dot(lead_LC, M_LC)

    def _violation(self, X_LC: Tensor) -> Tensor:
        return (torch.linalg.matrix_norm(X_LC, 2) / self.radius - 1).abs()

    def _complete(self, X_LC: Tensor, generator: torch.Generator | None) -> Tensor:
        empty = (X_LC == 0).all(-1, keepdim=True).all(-2, keepdim=True)
        return torch.where(empty, _noise(X_LC, generator), X_LC)


def largest_singular_value(X_LC: Tensor) -> Tensor:
    """sigma_max, (..., 1, 1), within 1e-5 (float64: 1e-10) from above, without waiting for the device.

    Repeated squaring: with H_0 = X^T X and H_k+1 = (H_k / |H_k|)^2 the product of |H_k|^(1 / 2^k) falls to sigma_max^2, and is
    C^(1 / 2^k) of it at most, whatever the gaps between singular values.
    """
    scale = nonzero(X_LC.abs().amax((-2, -1), keepdim=True))
    H_CC = gram(X_LC / scale)
    found = torch.ones_like(scale)
    squarings = 34 if X_LC.dtype == torch.float64 else 19
    for k in range(squarings):
        size = nonzero(_frobenius(H_CC))
        found = found * size ** (0.5 ** (k + 1))
        H_CC = H_CC / size
        H_CC = H_CC @ H_CC
    return torch.where((X_LC == 0).all(-1, keepdim=True).all(-2, keepdim=True), torch.zeros_like(found), found * scale)


def _noise(X_LC: Tensor, generator: torch.Generator | None) -> Tensor:
    noise_LC = torch.randn(X_LC.shape, generator=generator, dtype=X_LC.dtype, device=X_LC.device)
    return noise_LC / max(X_LC.shape[-2:]) ** 0.5


def _frobenius(X: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(X, keepdim=True)


def _dot(X: Tensor, Y: Tensor) -> Tensor:
    return (X * Y).sum((-2, -1), keepdim=True)
