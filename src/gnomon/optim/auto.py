"""Assignments that look at each matrix, with nothing to choose: "auto" and "qk-ball".

"auto": every matrix of attention and MLP is on `Sphere(least=g)`: free until |W|_F = g sqrt(outputs), of fixed length from then on.
One that is longer already, a trained one or a larger init, keeps the length it has. The gain g is

    1                     of a matrix that reads the stream: inputs with entries of size 1 go to outputs of size 1
    1 / sqrt(sublayers)   of a matrix that writes to it: what all sublayers add together is as long as one state (GPT-2's init)

So the constraint is there where it begins to pay: a matrix that starts at zero or small is not held there, and none grows until
attention saturates or steps are lost in its length. The rate is the relative length of a step, so no shape factor and no weight
decay is left to tune.

"qk-ball": plain Muon, with query and key in a spectral ball that bounds the logits of inputs of root mean square 1,
|q . k| / sqrt(head) <= sigma_q sigma_k width / sqrt(head) <= LOGITS.

What was measured, and the rules that did worse: docs/results/auto.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from gnomon.anatomy import Anatomy, Part
from gnomon.geometry.manifolds import Euclidean, Manifold, SpectralBall, Sphere

LOGITS = 45.0
"""Bound on attention logits under "qk-ball": the one that was tried."""


def spheres(parts: Anatomy) -> Callable[[Part], Manifold]:
    """The sphere of each matrix of attention or MLP in a model of these parts."""
    writing = {(p.stack, p.layer, p.role) for p in parts if p.writes_stream and p.is_matrix and p.layer is not None}
    sublayers = Counter(stack for stack, _, _ in writing)
    return lambda part: Sphere(least=round(sublayers[part.stack] ** -0.5, 4) if part.writes_stream else 1.0)


def balls(parts: Anatomy) -> Callable[[Part], Manifold]:
    """SpectralBall for query and key of heads of known width, no constraint for other matrices."""

    def manifold(part: Part) -> Manifold:
        if part.role not in ("query", "key") or part.head_dim is None:
            return Euclidean()
        return SpectralBall(radius=round((LOGITS * part.head_dim**0.5 / part.shape[1]) ** 0.5, 4))

    return manifold


BY_PART: dict[str, Callable[[Anatomy], Callable[[Part], Manifold]]] = {"auto": spheres, "qk-ball": balls}
"""Name of an assignment -> what it makes of a model: the manifold of each matrix."""
