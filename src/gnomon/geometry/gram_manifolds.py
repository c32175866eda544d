"""Manifolds that constrain the Gram matrix of a weight's columns: Stiefel, DGram, Oblique.

Leading dimensions are a batch. Nothing here synchronises with the host except `project` and `DGram(paper=True)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gnomon.errors import UserError
from gnomon.geometry import polar as polar_factor
from gnomon.geometry.polar import nonzero
from gnomon.geometry.weight_manifold import Manifold, column_norms, require


@dataclass(frozen=True)
class _Orthogonal(Manifold):
    """Orthogonal columns: the part Stiefel and DGram share."""

    def _check(self, shape: torch.Size) -> None:
        rows, columns = shape[-2:]
        if columns > rows:
            raise UserError(f"{type(self).__name__}(columns={self.columns!r}) asks for {columns} orthogonal columns of "
                            f"length {rows}, which cannot exist. Use columns='short' (the shorter axis).")

    def step(self, W_MN: Tensor, A_MN: Tensor, lr: float | Tensor, factor: float = 1.0, *, near: bool = False) -> Tensor:
        """As everywhere, except that the way back from far away is `polar`'s "gram" and a cubic step, at a fifth of the price of
        "precise": what lies lr from orthogonal columns has no singular values near zero, unless lr is close to 1."""
        X_LC = self.orient(A_MN.mul_(-lr * factor).add_(W_MN)).to(polar_factor.working_dtype(W_MN))
        X_LC = self._retract(X_LC, near, far="gram")
        return (X_LC.mT if self.turned(W_MN.shape) else X_LC).to(W_MN.dtype).contiguous()

    def pair_weights(self, d_1C: Tensor) -> tuple[Tensor, Tensor]:
        """(a_CC, b_CC) with a * K - b * K^T the projection of K_CC onto the in-span tangents {K : Q K is tangent}.

        W^T A + A^T W = 0 reads d_i K_ij + d_j K_ji = 0 for A = Q K: one equation for each pair (i, j).
        """
        square = d_1C.mT.square() + d_1C.square()
        return d_1C.square() / square, d_1C.mT * d_1C / square

    def _tangent(self, X_LC: Tensor, M_LC: Tensor) -> Tensor:
        d_1C = column_norms(X_LC)
        P_CC = X_LC.mT @ M_LC
        S_CC = (P_CC + P_CC.mT) / nonzero(d_1C.mT.square() + d_1C.square())
        return M_LC - X_LC @ self._constrained(S_CC)

    def _constrained(self, S_CC: Tensor) -> Tensor:
        return S_CC

    def _complete(self, X_LC: Tensor, generator: torch.Generator | None) -> Tensor:
        """The polar factor of X_LC, its null space filled by random directions orthogonal to the rest."""
        U_LC, s_C, V_CC = torch.linalg.svd(X_LC.double(), full_matrices=False)
        missing_1C = (s_C <= s_C[..., :1] * 1e-6)[..., None, :]  # all of them when X is zero
        noise_LC = torch.randn(X_LC.shape, generator=generator, dtype=torch.float64, device=X_LC.device)
        U_LC = torch.where(missing_1C, 0.0, U_LC)
        noise_LC = torch.where(missing_1C, noise_LC - U_LC @ (U_LC.mT @ noise_LC), 0.0)
        return ((U_LC + polar_factor.polar(noise_LC, "svd")) @ V_CC).to(X_LC.dtype)


@dataclass(frozen=True)
class Stiefel(_Orthogonal):
    """Matrices with orthogonal columns of one norm: X^T X = radius^2 I, every singular value equal to radius.

    violation: largest entry of X^T X / radius^2 - I. decay: no-op (it is purely normal; only the radius could decay,
    and that is fixed). An input of rank below C retracts to a partial isometry; `project` completes it.
    """

    name: ClassVar[str] = "stiefel"
    decays: ClassVar[bool] = False

    radius: float = 1.0
    paper: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.radius > 0, f"Stiefel(radius={self.radius}): the radius must be positive.")

    def frame(self, W_MN: Tensor) -> tuple[Tensor, Tensor]:
        X_LC = self.orient(W_MN)
        d_1C = X_LC.new_full((*X_LC.shape[:-2], 1, X_LC.size(-1)), self.radius)
        return X_LC / self.radius, d_1C

    def _retract(self, X_LC: Tensor, near: bool, far: str = "precise") -> Tensor:
        return _polar_(X_LC / self.radius, near, far).mul_(self.radius)

    def _violation(self, X_LC: Tensor) -> Tensor:
        return _off_identity(X_LC / self.radius)


@dataclass(frozen=True)
class DGram(_Orthogonal):
    """Matrices with orthogonal columns of free norms: X^T X is diagonal (arXiv 2606.13276, "DGram").

    The singular values *are* the column norms d_j, so `cap` bounds the spectral norm at no cost, and `floor` > 0 keeps
    every column's direction defined. Retraction: normalise the columns, take the polar factor, put each column's own
    norm back, clamped to [floor, cap].

    violation: the largest of the correlations |x_i . x_j| / (d_i d_j), i != j, and of the relative excess of a norm over
    `cap` or its relative lack below `floor`. decay: shrinks the column norms (not below `floor`).

    In the paper's retraction (`paper=True`) column j of the polar factor is scaled by the j-th *largest singular value*.
    It moves points whose columns are not in descending order of norm, so it is not a retraction
    (`checks.retraction_order` measures -1); it knows neither floor nor cap.
    """

    name: ClassVar[str] = "dgram"

    floor: float = 1e-3
    cap: float | None = None
    paper: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.floor > 0, f"DGram(floor={self.floor}): the floor must be positive; a column of norm 0 has no "
                 "direction to keep orthogonal.")
        require(self.cap is None or self.cap > self.floor, f"DGram(floor={self.floor}, cap={self.cap}): the cap must "
                 "be above the floor.")
        require(not (self.paper and self.cap), f"DGram(cap={self.cap}, paper=True): the paper's retraction knows no cap.")

    def random(
        self,
        m: int,
        n: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Orthogonal columns in random directions; norms uniform in [0.5, 2] (inside floor and cap), in no order."""
        device = generator.device if generator is not None and device is None else device
        W_MN = torch.randn(m, n, generator=generator, dtype=torch.float64, device=device)
        X_LC = polar_factor.polar(self.orient(W_MN))
        high = 2.0 if self.cap is None else min(2.0, 0.9 * self.cap)
        high = max(high, 2 * self.floor) if self.cap is None else max(high, (self.floor + self.cap) / 2)
        low = max(high / 4, self.floor)
        norms_C = torch.rand(X_LC.size(-1), generator=generator, dtype=torch.float64, device=device)
        X_LC = (X_LC * (low + (high - low) * norms_C)).to(dtype)
        return X_LC.mT.contiguous() if self.turned((m, n)) else X_LC

    def decay(self, W_MN: Tensor, factor: float | Tensor) -> Tensor:
        X_LC = self.orient(W_MN)
        d_1C = column_norms(X_LC)
        X_LC = X_LC * torch.maximum((self.floor / nonzero(d_1C)).clamp_max(1.0), torch.as_tensor(factor).to(X_LC))
        return X_LC.mT if self.turned(W_MN.shape) else X_LC

    def pair_weights(self, d_1C: Tensor) -> tuple[Tensor, Tensor]:
        a_CC, b_CC = super().pair_weights(d_1C)
        # i = j constrains nothing: a K_jj - b K_jj must be K_jj.
        a_CC.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        b_CC.diagonal(dim1=-2, dim2=-1).fill_(0.0)
        return a_CC, b_CC

    def _constrained(self, S_CC: Tensor) -> Tensor:
        S_CC.diagonal(dim1=-2, dim2=-1).fill_(0.0)
        return S_CC

    def _retract(self, X_LC: Tensor, near: bool, far: str = "precise") -> Tensor:
        if self.paper:
            U_LC, s_C, V_CC = torch.linalg.svd(X_LC, full_matrices=False)
            return (U_LC @ V_CC) * s_C[..., None, :]
        Q_LC, d_1C = _normalised(X_LC)
        return _polar_(Q_LC, near, far).mul_(d_1C.clamp(self.floor, self.cap))

    def _complete(self, X_LC: Tensor, generator: torch.Generator | None) -> Tensor:
        Q_LC, d_1C = _normalised(X_LC)
        return super()._complete(Q_LC, generator) * d_1C.clamp(self.floor, self.cap)

    def _violation(self, X_LC: Tensor) -> Tensor:
        Q_LC, d_1C = _normalised(X_LC)
        off = _off_identity(Q_LC, diagonal=False)
        if self.paper:
            return off
        low = ((self.floor - d_1C) / self.floor).amax((-2, -1))
        high = low if self.cap is None else ((d_1C - self.cap) / self.cap).amax((-2, -1))
        return torch.maximum(off, torch.maximum(low, high))


@dataclass(frozen=True)
class Oblique(Manifold):
    """Matrices with columns of norm 1 and any angles between them: diag(X^T X) = 1. Any shape will do.

    violation: largest | |x_j| - 1 |. decay: no-op (purely normal). A zero column has no direction: `retract` leaves it
    zero (violation 1), `project` draws one.
    """

    name: ClassVar[str] = "oblique"
    decays: ClassVar[bool] = False

    paper: bool = False

    def _retract(self, X_LC: Tensor, near: bool) -> Tensor:
        return _normalised(X_LC)[0]

    def _tangent(self, X_LC: Tensor, M_LC: Tensor) -> Tensor:
        square = nonzero((X_LC * X_LC).sum(-2, keepdim=True))
        return M_LC - X_LC * ((X_LC * M_LC).sum(-2, keepdim=True) / square)

    def _violation(self, X_LC: Tensor) -> Tensor:
        return (torch.linalg.vector_norm(X_LC, dim=-2) - 1).abs().amax(-1)

    def _complete(self, X_LC: Tensor, generator: torch.Generator | None) -> Tensor:
        noise_LC = torch.randn(X_LC.shape, generator=generator, dtype=X_LC.dtype, device=X_LC.device)
        return torch.where((X_LC == 0).all(-2, keepdim=True), noise_LC, X_LC)


def _polar_(X_LC: Tensor, near: bool, far: str) -> Tensor:
    """The polar factor of X_LC, which may be overwritten: by a cubic step, or first by the method `far`."""
    if not near:
        X_LC = polar_factor.polar(X_LC, far)
        if far == "precise":
            return X_LC
    return polar_factor.near_(X_LC, dtype=torch.bfloat16 if X_LC.dtype == torch.float32 else None)


def _off_identity(Q_LC: Tensor, diagonal: bool = True) -> Tensor:
    R_CC = polar_factor.add_identity(polar_factor.gram(Q_LC), -1.0)
    if not diagonal:
        R_CC.diagonal(dim1=-2, dim2=-1).fill_(0.0)
    return R_CC.abs().amax((-2, -1))


def _normalised(X_LC: Tensor) -> tuple[Tensor, Tensor]:
    """(columns of norm 1 or 0, norms_1C)."""
    d_1C = column_norms(X_LC)
    return X_LC / nonzero(d_1C), d_1C
