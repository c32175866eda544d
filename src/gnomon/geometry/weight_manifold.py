"""What every manifold of weight matrices offers; the members are in `gram_manifolds` and `norm_manifolds`.

W_MN acts on vectors of N inputs and returns M outputs (the layout of `torch.nn.Linear.weight`; a Hugging Face Conv1D
is transposed first). Below, X_LC is the matrix with its C constrained columns of length L last.

Leading dimensions are a batch. Nothing here synchronises with the host except `project`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gnomon.errors import UserError, check_name
from gnomon.geometry import polar as polar_factor
from gnomon.geometry.polar import nonzero


@dataclass(frozen=True)
class Manifold:
    """What all weight manifolds offer. A subclass supplies the four `_` methods on X_LC."""

    name: ClassVar[str]
    # Whether weight decay does anything; where it does not, `decay` returns W unchanged and an optimizer should say so.
    decays: ClassVar[bool] = True
    # Whether the direction of descent is msign(G) wherever W is, so that only the way back knows the constraint.
    free: ClassVar[bool] = False

    columns: str = "short"

    def __post_init__(self) -> None:
        check_name("columns", self.columns, ("in", "out", "short"))

    def turned(self, shape: torch.Size | tuple[int, ...]) -> bool:
        """Whether a weight of this shape (..., M, N) is transposed so that its constrained columns come last."""
        rows, columns = shape[-2:]
        return self.columns == "out" or (self.columns == "short" and rows < columns)

    def orient(self, W_MN: Tensor) -> Tensor:
        """W_MN or its transpose (a view), constrained columns last. Applying it to the result's shape undoes it."""
        require(W_MN.ndim >= 2, f"{self} holds matrices (..., M, N); got shape {tuple(W_MN.shape)}. Vectors, scalars "
                 "and biases belong to another optimizer (AdamW).")
        X_LC = W_MN.mT if self.turned(W_MN.shape) else W_MN
        self._check(X_LC.shape)
        return X_LC

    @torch.no_grad()
    def retract(self, W_MN: Tensor, near: bool = False) -> Tensor:
        """The point of the manifold that W_MN stands for, in its dtype; a first-order retraction of W + X at W.

        Args:
            W_MN: (..., M, N), any floating dtype; computed in float32, or in float64 for float64.
            near: the input is a small step (0.1 or less in spectral norm, relative to the columns) off the manifold.
                One cubic step then replaces the whole iteration; the result is 1e-6 exact for steps of 0.02.
        """
        work = polar_factor.working_dtype(W_MN)
        X_LC = self._retract(self.orient(W_MN).to(work), near)
        return (X_LC.mT if self.turned(W_MN.shape) else X_LC).to(W_MN.dtype).contiguous()

    def move(self, W_MN: Tensor, X_MN: Tensor) -> Tensor:
        """From W_MN along X_MN and back onto the manifold: retract(W + X)."""
        return self.retract(W_MN + X_MN)

    def step(self, W_MN: Tensor, A_MN: Tensor, lr: float | Tensor, factor: float = 1.0, *, near: bool = False) -> Tensor:
        """One step of descent from W_MN along A_MN (overwritten): retract(W - lr factor A); `near` as in `retract`."""
        # In place: A is the optimizer's own, and a fresh temporary of its size costs as much as the arithmetic.
        return self.retract(A_MN.mul_(-lr * factor).add_(W_MN), near=near)

    def tangent(self, W_MN: Tensor, M_MN: Tensor) -> Tensor:
        """The Frobenius-orthogonal projection of M_MN onto the tangent space at W_MN (which is on the manifold)."""
        work = polar_factor.working_dtype(W_MN)
        T_LC = self._tangent(self.orient(W_MN).to(work), self.orient(M_MN).to(work))
        return (T_LC.mT if self.turned(W_MN.shape) else T_LC).to(M_MN.dtype)

    def violation(self, W_MN: Tensor) -> Tensor:
        """How far W_MN is off the manifold: the largest entry of a dimensionless residual (class docstring), (...)."""
        return self._violation(self.orient(W_MN).to(polar_factor.working_dtype(W_MN)))

    def random(
        self,
        m: int,
        n: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """A random point (m, n) of the manifold: a retracted Gaussian."""
        device = generator.device if generator is not None and device is None else device
        W_MN = torch.randn(m, n, generator=generator, dtype=torch.float64, device=device)
        return self.project(W_MN, generator=generator).to(dtype)

    @torch.no_grad()
    def project(self, W_MN: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """First placement of any finite matrix, e.g. an initialisation; waits for the device.

        A full-rank W_MN is retracted. Directions it does not have (zero, rank-1 or duplicated columns) are completed at
        random, uniformly, from `generator`.

        Raises:
            UserError: W_MN is not finite.
        """
        if not bool(torch.isfinite(W_MN).all()):
            raise UserError(f"cannot place a weight of shape {tuple(W_MN.shape)} on {self}: it has NaN or infinite "
                            "entries. Check its initialisation or the checkpoint it came from.")
        X_LC = self.orient(W_MN).to(polar_factor.working_dtype(W_MN))
        placed = self._retract(X_LC, near=False)
        if bool((self._violation(placed) > 1e-4).any()):
            placed = self._retract(self._complete(X_LC, generator), near=False)
        return (placed.mT if self.turned(W_MN.shape) else placed).to(W_MN.dtype).contiguous()

    def decay(self, W_MN: Tensor, factor: float | Tensor) -> Tensor:
        """Weight decay by `factor` (1 - lr * weight_decay) as this manifold understands it; see the class docstring."""
        return W_MN * factor if self.decays else W_MN

    def to_dict(self) -> dict[str, Any]:
        """Plain data from which `from_dict` makes an equal manifold."""
        return {"name": self.name, **asdict(self)}

    def frame(self, W_MN: Tensor) -> tuple[Tensor, Tensor]:
        """(Q_LC, d_1C): columns of norm 1 and the norms, X_LC = Q_LC * d_1C, of a point of Stiefel or DGram."""
        X_LC = self.orient(W_MN)
        d_1C = column_norms(X_LC)
        return X_LC / nonzero(d_1C), nonzero(d_1C)

    def _check(self, shape: torch.Size) -> None:
        pass

    def _retract(self, X_LC: Tensor, near: bool) -> Tensor:
        raise NotImplementedError

    def _tangent(self, X_LC: Tensor, M_LC: Tensor) -> Tensor:
        raise NotImplementedError

    def _violation(self, X_LC: Tensor) -> Tensor:
        raise NotImplementedError

    def _complete(self, X_LC: Tensor, generator: torch.Generator | None) -> Tensor:
        raise NotImplementedError


def column_norms(X_LC: Tensor) -> Tensor:
    return torch.linalg.vecdot(X_LC, X_LC, dim=-2)[..., None, :].sqrt()  # vector_norm is nine times slower on a CPU


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
