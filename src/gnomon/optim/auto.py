"""The assignment "auto": which sphere each matrix grows onto, with nothing to choose.

Every matrix of attention and MLP is on `Sphere(least=g)`: free until |W|_F = g sqrt(outputs), of fixed length from then on. One that
is longer already, a trained one or a larger init, keeps the length it has. The gain g is

    1                     of a matrix that reads the stream: inputs with entries of size 1 go to outputs of size 1
    1 / sqrt(sublayers)   of a matrix that writes to it: what all sublayers add together is as long as one state (GPT-2's init)

So the constraint is there where it begins to pay: a matrix that starts at zero or small is not held there, and none grows until
attention saturates or steps are lost in its length. The rate is the relative length of a step, so no shape factor and no weight
decay is left to tune. What was measured, and the rules that did worse: docs/results/auto.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from gnomon.anatomy import Anatomy, Part
from gnomon.geometry.manifolds import Sphere


def spheres(parts: Anatomy) -> Callable[[Part], Sphere]:
    """The sphere of each matrix of attention or MLP in a model of these parts."""
    writing = {(p.stack, p.layer, p.role) for p in parts if p.writes_stream and p.is_matrix and p.layer is not None}
    sublayers = Counter(stack for stack, _, _ in writing)
    return lambda part: Sphere(least=round(sublayers[part.stack] ** -0.5, 4) if part.writes_stream else 1.0)
