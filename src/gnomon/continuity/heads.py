"""Continuity head by head: a head of one layer against every head of the next, on the side of the stream.

Heads of a layer may be renumbered without changing the model, so equal numbers mean nothing by themselves:
the best partner is given too, against what the best of H random directions would reach.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from gnomon.continuity.one_pass import Measured
from gnomon.geometry.subspace import Null, cosine_null


def rows(first: Measured, second: Measured) -> list[dict[str, Any]]:
    """One row per head of `first`: |cos| with the head of the same number, and with its best partner."""
    if first.heads is None or second.heads is None or first.heads.shape[1] != second.heads.shape[1]:
        return []
    C_HH = (first.heads.double() @ second.heads.double().T).abs()
    dim = first.heads.shape[1]
    null, best_null = cosine_null(dim), best_of(len(second.heads), dim)
    found = []
    for head, cosines in enumerate(C_HH):
        best = int(cosines.argmax())
        same = float(cosines[head]) if head < len(cosines) else None
        found.append(
            {
                "stack": first.part.stack,
                "role": first.part.role,
                "layer": first.part.layer,
                "next_layer": second.part.layer,
                "head": head,
                "cos": same,
                "null": null.mean,
                "z": None if same is None else (same - null.mean) / null.sd,
                "best_head": best,
                "best_cos": float(cosines[best]),
                "best_null": best_null.mean,
                "best_z": (float(cosines[best]) - best_null.mean) / best_null.sd,
            }
        )
    return found


@cache
def best_of(count: int, dim: int) -> Null:
    """The largest |cos| of one direction with `count` random ones in R^dim, as a normal of variance 1/dim.

    E max = integral of 1 - F(t)^count with F(t) = erf(t sqrt(dim/2)); the second moment likewise.
    """
    step = 12 / math.sqrt(dim) / 4000
    grid = [(i + 0.5) * step for i in range(4000)]
    above = [1 - math.erf(t * math.sqrt(dim / 2)) ** count for t in grid]
    mean = step * sum(above)
    square = step * sum(2 * t * p for t, p in zip(grid, above))
    return Null(mean, math.sqrt(max(square - mean**2, 1e-300)))
