"""One step of matrices on their manifolds: `advance` is the whole of it, `advance_all` steps equal shapes as one batch.

    A <- argmax <U, A> over tangent A, |A|_2 <= 1        `gnomon.geometry.steepest`; or U itself, Adam's
    W <- retract(decay(W) - lr scale A)                  `gnomon.geometry.manifolds`

Legend: W_MN a matrix, outputs x inputs; U_MN its update, the momentum looked ahead; B matrices of one batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnomon.anatomy import Block
from gnomon.geometry import steepest
from gnomon.geometry.manifolds import Manifold

SCALES: dict[str, Callable[[int, int], float]] = {
    "none": lambda out, into: 1.0,
    "spectral": lambda out, into: math.sqrt(out / into),
    "rms": lambda out, into: 0.2 * math.sqrt(max(out, into)),
    "muon": lambda out, into: math.sqrt(max(1.0, out / into)),
}
"""Factors on lr by shape, for learning-rate transfer: "none" (lr is the spectral norm of the step, arXiv 2606.13276),
"spectral" (arXiv 2310.17813), "rms" (steps as long as AdamW's, arXiv 2502.16982), "muon" (torch.optim.Muon's default)."""

def advance(
    W_MN: Tensor,
    U_MN: Tensor,
    manifold: Manifold,
    lr: float | Tensor,
    factor: float = 1.0,
    *,
    weight_decay: float = 0.0,
    direction: str = "msign",
    steps: int = 0,
    near: bool = True,
) -> Tensor:
    """One step of W_MN (..., M, N), which is on `manifold`, along the update U_MN.

    Args:
        lr: learning rate; the step's spectral norm is lr * factor, on `Sphere` its Frobenius norm is lr times that of W.
        factor: shape factor, see `SCALES`.
        weight_decay: decoupled, with the manifold's meaning: W for Euclidean, column norms for DGram, nothing where norms are
            fixed.
        direction: "msign" solves for A; "adam" takes U as it is, overwriting it.
        steps: accuracy of the solver, see `gnomon.geometry.steepest.direction`.
        near: one cubic step brings the result back to the manifold; False iterates to convergence.
    """
    A_MN = steepest.direction(W_MN, U_MN, manifold, steps=steps).A if direction == "msign" else U_MN
    if weight_decay:
        W_MN = manifold.decay(W_MN, 1 - lr * weight_decay)
    return manifold.step(W_MN, A_MN.to(W_MN.dtype), lr, factor, near=near)


@dataclass(slots=True)
class Matrix:
    """One part of a tensor on its way through a step.

    Args:
        tensor: the whole tensor, fp32 or wider; the step is written into it.
        update: its update, of the same shape.
        block: where the part lies in both.
        manifold: what the part is on.
    """

    tensor: Tensor
    update: Tensor
    block: Block
    manifold: Manifold


def advance_all(matrices: Sequence[Matrix], options: Mapping[str, Any], compiled: bool = False) -> None:
    """Step every matrix in place, with the options of its parameter group.

    A step of no length leaves weights as they are to the bit, where retracting would round them; what is remembered
    comes into being all the same, since torch.distributed.checkpoint makes an optimizer's state by such a step.
    """
    batches: dict[tuple, list[Matrix]] = {}
    for matrix in matrices:
        W_MN = matrix.block.take(matrix.tensor)
        batches.setdefault((matrix.manifold, W_MN.shape, W_MN.dtype, W_MN.device), []).append(matrix)
    for (manifold, shape, *_), batch in batches.items():
        _advance_batch(batch, manifold, shape, options, compiled)


def _advance_batch(
    batch: list[Matrix], manifold: Manifold, shape: tuple[int, int], options: Mapping[str, Any], compiled: bool
) -> None:
    W_BMN = torch.stack([m.block.take(m.tensor) for m in batch])
    U_BMN = sized(torch.stack([m.block.take(m.update) for m in batch]), manifold, options["momentum"])
    lr, factor, radius = options["lr"], SCALES[options["scale"]](*shape), getattr(manifold, "radius", 1.0)
    # A cubic step is enough for small steps from the manifold, and each squares what the last one left. Columns that start
    # near zero turn by more than that in their first steps.
    near = options["step"] > 10 and float(lr) * factor <= 0.1 * radius
    # A tensor, so that a schedule does not recompile.
    rate = torch.as_tensor(lr, dtype=W_BMN.dtype, device=W_BMN.device) if compiled else lr
    call = compiled_advance() if compiled else advance
    W_BMN = call(
        *(W_BMN, U_BMN, manifold, rate, factor),
        **{key: options[key] for key in ("weight_decay", "direction", "steps")},
        near=near,
    )
    for matrix, new in zip(batch, W_BMN) if lr else ():
        matrix.block.put(matrix.tensor, new)


def sized(U_MN: Tensor, manifold: Manifold, momentum: float) -> Tensor:
    """The update at the size its solver expects: the paper's has fixed steps, and there the buffer is a sum; ours, an
    average, is seen by its direction only."""
    return U_MN / (1 - momentum) if getattr(manifold, "paper", False) else U_MN


@functools.cache
def compiled_advance() -> Callable[..., Any]:
    return torch.compile(advance, dynamic=False)
