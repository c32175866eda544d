"""How sublayers join the residual stream: one module type, `residual(h, branch)`, chosen by name; a stack for a model.

>>> stack = gnomon.residual.stack("sphere", 768, blocks=12, clamp=math.pi / 4)
>>> h = stack(embedding(tokens), branches)       # attention, mlp, attention, mlp …
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, get_type_hints

from gnomon.errors import UserError, check_name, suggest
from gnomon.ranges import convert
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
from gnomon.residual.base import DyT, Gain, Residual, ScaleNorm, Stack
from gnomon.residual.spherical import GeoNorm, NGPTStep, SphereResidual

__all__ = [
    "DyT",
    "Gain",
    "GeoNorm",
    "NGPTStep",
    "Residual",
    "ScaleNorm",
    "SphereResidual",
    "Stack",
    "make",
    "names",
    "options",
    "stack",
]

BOUNDED: dict[str, Any] = {"clamp": math.pi / 4, "decay": "harmonic", "count": "block"}
"""Options with which the turns of all sublayers together stay bounded at any depth: those of GeoNorm."""

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
    "bounded-sphere": partial(SphereResidual, p=1.0, **BOUNDED),
}


def names() -> Mapping[str, str]:
    """Every residual by name, with a one-line description and its source."""
    lines = {name: f"{_class(kind).summary} ({_class(kind).source})" for name, kind in _KINDS.items()}
    lines["proj-spheret"] = f"sphere with p = 1, the projection ({SphereResidual.source})"
    lines["cay-spheret"] = f"sphere with p = 2, the Cayley transform ({SphereResidual.source})"
    lines["bounded-sphere"] = (
        f"sphere with p = 1 and GeoNorm's bound on the turns, pi/4 over the block's number ({SphereResidual.source}, 2601.22095)"
    )
    return lines


def stack(name: str, dim: int, *, blocks: int, per_block: int = 2, **options: Any) -> Stack:
    """Build the residuals of a whole model, entry and exit included.

    Args:
        name: one of `names()`.
        dim: channels of the stream.
        blocks: number of blocks.
        per_block: sublayers in a block; the first is its attention.
        options: the method's own; see `options(name)`.

    Raises:
        UserError: unknown name or option, or a value out of range.
    """
    if blocks < 1 or per_block < 1:
        raise UserError(f"a stack has at least one block of at least one sublayer; got {blocks} of {per_block}")
    depth = blocks * per_block
    return Stack([make(name, dim, index=i, depth=depth, per_block=per_block, **options) for i in range(depth)])


def make(name: str, dim: int, *, index: int, depth: int, **options: Any) -> Residual:
    """Build the residual of one sublayer.

    Args:
        name: one of `names()`.
        dim: channels of the stream.
        index: which sublayer, from 0 at the input.
        depth: number of sublayers in the model; two for each transformer block.
        options: `per_block` for every method, and the method's own (`options(name)` lists them). What a method would
            not read, as `norm` on the sphere, is refused.

    Raises:
        UserError: unknown name or option, or a value out of range.
    """
    kind = _KINDS[check_name("residual", name, _KINDS)]
    known = _options(kind)
    for key in options:
        if key not in known:
            raise UserError(f"residual {name!r} has no option {key!r}. {suggest(key, known)}")
    hints = _hints(_class(kind))
    options = {key: convert(hints[key], value, f"{name}'s option {key}") for key, value in options.items()}
    return kind(dim, index=index, depth=depth, **options)


def options(name: str) -> dict[str, Any]:
    """The options of a residual and their defaults."""
    return _options(_KINDS[check_name("residual", name, _KINDS)])


def _class(kind: type[Residual] | partial[SphereResidual]) -> type[Residual]:
    return SphereResidual if isinstance(kind, partial) else kind


def _hints(kind: type[Residual]) -> dict[str, Any]:
    """Types of the keyword parameters of the class and its bases."""
    owners = kind.__mro__[: kind.__mro__.index(Residual) + 1]
    return {key: hint for owner in reversed(owners) for key, hint in get_type_hints(owner.__init__).items()}


def _options(kind: type[Residual] | partial[SphereResidual]) -> dict[str, Any]:
    """Keyword parameters of the class and its bases, less those that `make` gives itself."""
    preset = kind.keywords if isinstance(kind, partial) else {}
    found: dict[str, Any] = {}
    for owner in _class(kind).__mro__[: _class(kind).__mro__.index(Residual) + 1]:
        for key, parameter in inspect.signature(owner.__init__).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and key not in ("index", "depth") and key not in preset:
                found.setdefault(key, parameter.default)
    return found
