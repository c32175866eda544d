"""Numerical checks of retractions: does a step along a tangent vector go where it should?

The same checks serve users who write a manifold of their own and our tests.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gnomon.errors import UserError
from gnomon.geometry import sphere


@runtime_checkable
class Manifold(Protocol):
    """What a check needs: random points, the tangent projection, and a step along a tangent vector."""

    def random(self, *shape: int, generator: torch.Generator | None = None, dtype: torch.dtype = ...) -> Tensor: ...

    def tangent(self, W: Tensor, M: Tensor) -> Tensor: ...

    def move(self, W: Tensor, X: Tensor) -> Tensor: ...


def retraction_order(
    manifold: Manifold | ModuleType,
    shape: tuple[int, ...] = (48, 16),
    *,
    seed: int = 0,
    steps: tuple[float, float] = (1e-3, 1e-1),
    points: int = 9,
    **options: float,
) -> float:
    """Measure the order of a retraction by halving steps, in float64.

    With e(t) = R_W(tX) - (W + tX) for a random point W and a random unit tangent X, a retraction has order 1 when
    |e| = O(t^2), and order 2 (it follows geodesics to second order) when moreover the tangent part of e is O(t^3).
    The result is min(slope of |e|, slope of |P_T e| - 1) on a log-log scale: about 2 for every member of the
    sphere's p-family and for the polar retraction of Stiefel; -1 for a map that does not even return W at t = 0.

    Args:
        manifold: a `Manifold`, for instance `gnomon.Stiefel()`; or the module `gnomon.geometry.sphere`, with p=….
        shape: shape of the points; (tokens, channels) for the sphere, (m, n) for matrices.
        seed: of the random point and direction.
        steps: smallest and largest t, relative to |W|.
        points: number of steps between them, spaced geometrically.

    Returns:
        The measured order, a float; `inf` where the steps are exact.

    Raises:
        UserError: `manifold` lacks one of the three methods.
    """
    found: Any = manifold
    if manifold is sphere:
        found = sphere.Sphere(**options)
    elif options:
        raise UserError(f"options {sorted(options)} are for the sphere module; give them to the manifold itself")
    if not isinstance(found, Manifold):
        raise UserError(f"{manifold!r} needs the methods random, tangent and move to be checked as a manifold")
    generator = torch.Generator().manual_seed(seed)
    W = found.random(*shape, generator=generator, dtype=torch.float64)
    X = found.tangent(W, torch.randn(W.shape, generator=generator, dtype=torch.float64))
    X = X * (W.norm() / X.norm())
    times = torch.logspace(math.log10(steps[0]), math.log10(steps[1]), points, dtype=torch.float64)
    errors = [found.move(W, t * X) - (W + t * X) for t in times]
    tangential = [found.tangent(W, e) for e in errors]
    floor = 1e3 * torch.finfo(torch.float64).eps * W.norm()
    return min(_slope(times, errors, floor), _slope(times, tangential, floor) - 1)


def _slope(times: Tensor, errors: list[Tensor], floor: Tensor) -> float:
    """Least-squares slope of log|e| against log t, over the steps whose error stands above rounding."""
    sizes = torch.stack([e.norm() for e in errors])
    seen = sizes > floor
    if int(seen.sum()) < 2:
        return math.inf
    x, y = times[seen].log(), sizes[seen].log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())
