"""How a sublayer joins the residual stream: one module type, `residual(h, branch)`, chosen by name.

>>> residual = gnomon.residual.make("sphere", 768, index=0, depth=24, p=1)
>>> h = residual(h, attention)
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from gnomon.errors import UserError, check_name, suggest
from gnomon.residual.additive import (
    DeepNorm,
    Keel,
    LayerNormScaling,
    Orthogonal,
    PeriNorm,
    PostNorm,
    PreDyT,
    PreNorm,
    Sandwich,
)
from gnomon.residual.base import DyT, Gain, Residual, ScaleNorm
from gnomon.residual.spherical import GeoNorm, NGPTStep, SphereResidual

__all__ = ["DyT", "Gain", "GeoNorm", "NGPTStep", "Residual", "ScaleNorm", "SphereResidual", "make", "names", "options"]

_KINDS: dict[str, type[Residual] | partial[SphereResidual]] = {
    "pre-norm": PreNorm,
    "post-norm": PostNorm,
    "peri-norm": PeriNorm,
    "sandwich": Sandwich,
    "pre-dyt": PreDyT,
    "keel": Keel,
    "deepnorm": DeepNorm,
    "layernorm-scaling": LayerNormScaling,
    "orthogonal": Orthogonal,
    "ngpt-step": NGPTStep,
    "geonorm": GeoNorm,
    "sphere": SphereResidual,
    "proj-spheret": partial(SphereResidual, p=1.0),
    "cay-spheret": partial(SphereResidual, p=2.0),
}


def names() -> Mapping[str, str]:
    """Every residual by name, with a one-line description and its source."""
    lines = {name: f"{_class(kind).summary} ({_class(kind).source})" for name, kind in _KINDS.items()}
    lines["proj-spheret"] = f"sphere with p = 1, the projection ({SphereResidual.source})"
    lines["cay-spheret"] = f"sphere with p = 2, the Cayley transform ({SphereResidual.source})"
    return lines


def make(name: str, dim: int, *, index: int, depth: int, **options: Any) -> Residual:
    """Build the residual of one sublayer.

    Args:
        name: one of `names()`.
        dim: channels of the stream.
        index: which sublayer, from 0 at the input.
        depth: number of sublayers in the model; two for each transformer block.
        options: `norm`, `eps`, `per_block` for every method, and the method's own (`options(name)` lists them).

    Raises:
        UserError: unknown name or option, or a value out of range.
    """
    kind = _KINDS[check_name("residual", name, _KINDS)]
    known = _options(kind)
    for key in options:
        if key not in known:
            raise UserError(f"residual {name!r} has no option {key!r}. {suggest(key, known)}")
    return kind(dim, index=index, depth=depth, **options)


def options(name: str) -> dict[str, Any]:
    """The options of a residual and their defaults."""
    return _options(_KINDS[check_name("residual", name, _KINDS)])


def _class(kind: type[Residual] | partial[SphereResidual]) -> type[Residual]:
    return SphereResidual if isinstance(kind, partial) else kind


def _options(kind: type[Residual] | partial[SphereResidual]) -> dict[str, Any]:
    """Keyword parameters of the class and of the base, less those that `make` gives itself."""
    preset = kind.keywords if isinstance(kind, partial) else {}
    found = {}
    for owner in (_class(kind), Residual):
        for key, parameter in inspect.signature(owner.__init__).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and key not in ("index", "depth") and key not in preset:
                found.setdefault(key, parameter.default)
    return found
