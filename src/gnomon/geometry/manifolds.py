"""Manifolds of weight matrices, as frozen values.

A manifold constrains the *columns* of a weight W_MN, and `columns` says which axis they are indexed by:

  "in"     one column per input: the Gram matrix W^T W (N x N) is constrained
  "out"    one column per output: W W^T (M x M)
  "short"  whichever axis is shorter; "in" when they are equal (as in arXiv 2606.13276, which transposes wide weights)

Stiefel and DGram need orthogonal columns, hence no more columns than their length; asking for the longer axis is an
error, never a silent transpose. The last four have no columns, and the axis makes no difference to them.

  Stiefel(radius)          X^T X = radius^2 I          all singular values equal                           `gram_manifolds`
  DGram(floor, cap)        X^T X = diag(d)^2           columns orthogonal, each keeping its own norm d_j in [floor, cap]
  Oblique()                diag(X^T X) = 1             columns of norm 1
  Euclidean()              no constraint: plain Muon                                                       `norm_manifolds`
  Sphere()                 |W|_F what it was           every matrix keeps its own norm (Hyperball)
  SpectralBall(radius)     sigma_max <= radius         acts on the singular values above, and only there
  SpectralSphere(radius)   sigma_max = radius          the whole matrix is scaled

`paper=True` on the first three is for reproducing arXiv 2606.13276: directions come from its solver
(`steepest.paper_direction`), and DGram's retraction is its too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gnomon.errors import UserError, check_name, suggest
from gnomon.geometry.gram_manifolds import DGram, Oblique, Stiefel
from gnomon.geometry.norm_manifolds import Euclidean, SpectralBall, SpectralSphere, Sphere
from gnomon.geometry.weight_manifold import Manifold, require

__all__ = [
    "MANIFOLDS", "DGram", "Euclidean", "Manifold", "Oblique", "SpectralBall", "SpectralSphere", "Sphere", "Stiefel", "from_dict",
    "named",
]  # fmt: skip

MANIFOLDS: dict[str, type[Manifold]] = {
    kind.name: kind for kind in (Stiefel, DGram, Oblique, Euclidean, Sphere, SpectralBall, SpectralSphere)
}


def named(given: Manifold | type[Manifold] | str) -> Manifold:
    """A manifold from its name in `MANIFOLDS`, from its class, or as it is.

    Raises:
        UserError: an unknown name, or something else.
    """
    if isinstance(given, str):
        return MANIFOLDS[check_name("manifold", given, MANIFOLDS)]()
    if isinstance(given, type) and issubclass(given, Manifold):
        return given()
    require(isinstance(given, Manifold), f"a manifold is a value such as gnomon.Stiefel() or one of the names "
             f"{', '.join(MANIFOLDS)}; got {given!r}")
    return given  # type: ignore[return-value]


def from_dict(data: Mapping[str, Any]) -> Manifold:
    """The manifold that `to_dict` described.

    Raises:
        UserError: unknown name or field, e.g. from a checkpoint of a newer version.
    """
    options = dict(data)
    kind = MANIFOLDS[check_name("manifold", options.pop("name", "(no name)"), MANIFOLDS)]
    known = [field.name for field in fields(kind)]
    for option in options:
        if option not in known:
            raise UserError(f"manifold {kind.name!r} has no option {option!r}. {suggest(option, known)}")
    return kind(**options)
