"""Putting weights on their manifolds before the first step, and telling what that did to them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon import sharding
from gnomon.errors import UserError
from gnomon.geometry.manifolds import Manifold
from gnomon.optim.groups import Parts
from gnomon.optim.rules import label, more

FAR = 0.5
"""A placement that changes a matrix by more than this share of its norm is warned of."""

_CALLER = 6
"""Frames from a warning here to the line that makes the optimizer."""


class PlacementWarning(UserWarning):
    """Putting weights on their manifolds changed what they were."""


@torch.no_grad()
def place(parameters: Mapping[str, Tensor], parts: Parts) -> list[dict[str, Any]]:
    """Write each part's nearest point of its manifold into its parameter; frozen parameters are left alone.

    Returns:
        name, shape, manifold and `change` of every part: |new - old| / |old|, infinite where the old was 0.

    Raises:
        UserError: no matrix of real numbers, not finite, or of a shape that its manifold cannot hold.
    """
    generator = torch.Generator().manual_seed(0)
    placed = []
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        full = sharding.whole(parameter)
        for block, manifold in parts[name]:
            W_MN = block.take(full)
            if W_MN.ndim != 2 or not W_MN.numel() or not W_MN.is_floating_point():
                raise UserError(
                    f"{name} has shape {tuple(W_MN.shape)} and dtype {W_MN.dtype}; {label(manifold)} holds matrices of real "
                    "numbers. Give it to AdamW."
                )
            try:
                new_MN, change = _placed(W_MN, manifold, generator)
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
            if change:
                block.put(full, new_MN.to(full))
            placed.append({"name": name, "shape": tuple(W_MN.shape), "manifold": label(manifold), "change": change})
        sharding.write(parameter, full)
    return placed


def _placed(W_MN: Tensor, manifold: Manifold, generator: torch.Generator) -> tuple[Tensor, float]:
    rounding = max(1e-5, 4 * torch.finfo(W_MN.dtype).eps)
    W_MN = W_MN.to(torch.promote_types(W_MN.dtype, torch.float32)).cpu()
    # What is there already, a weight of a checkpoint, stays as it is to the bit.
    if bool(W_MN.isfinite().all() & (manifold.violation(W_MN) <= rounding)):
        return W_MN, 0.0
    new_MN = manifold.project(W_MN, generator=generator)
    size, moved = float(W_MN.norm()), float((new_MN - W_MN).norm())
    return new_MN, moved / size if size else math.inf


def warn_of(placed: list[dict[str, Any]]) -> None:
    """Warn of what placing did to weights that were something before."""
    empty = [row for row in placed if row["change"] == math.inf]
    far = [row for row in placed if FAR < row["change"] < math.inf]
    if empty:
        warnings.warn(
            f"{empty[0]['name']}{more(empty)}: all zero, which {empty[0]['manifold']} does not hold, and random now. A sublayer "
            "that was silent speaks; give it to AdamW by a rule (gnomon.Rule(name, None)) if it should start at zero.",
            PlacementWarning,
            stacklevel=_CALLER,
        )
    if far:
        worst = max(far, key=lambda row: row["change"])
        warnings.warn(
            f"{len(far)} of {len(placed)} matrices changed by more than {FAR:.0%} of their norm when put on their manifolds, "
            f"{worst['name']} by {worst['change']:.0%} ({worst['manifold']}). A fresh model does not mind; a trained one has "
            "lost what they knew. `optimizer.placed` has all.",
            PlacementWarning,
            stacklevel=_CALLER,
        )
