"""Residuals that add: Pre-LN and the methods that move, double or rescale its norm.

Legend: x the stream (..., D), F the branch, N a norm, l the sublayer or block number from 1.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from gnomon.errors import check_name
from gnomon.geometry import sphere
from gnomon.residual.base import NORMS, WRITERS, Branch, DyT, Gain, Normed, Residual


class PreNorm(Normed):
    """x' = x + F(N(x)); a norm before the head; output projections start at 1/sqrt(depth) of their usual scale."""

    summary = "Pre-LN: add the branch of the normalised stream"
    source = "GPT-2 (Radford et al. 2019); arXiv 2002.04745"

    def __init__(self, dim: int, **place: Any):
        super().__init__(dim, **place)
        self.before: nn.Module = self.norm()

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        return h + branch(self.before(h))

    def exit(self) -> nn.Module:
        return self.norm()

    def init_scale(self, role: str) -> float:
        return self.depth**-0.5 if role in WRITERS else 1.0


class PostNorm(Normed):
    """x' = N(x + F(x)), as in the first transformer; wants a warm-up."""

    summary = "Post-LN: normalise after adding"
    source = "arXiv 1706.03762"

    def __init__(self, dim: int, **place: Any):
        super().__init__(dim, **place)
        self.after: nn.Module = self.norm()

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        return self.after(h + branch(h))


class Sandwich(Normed):
    """x' = x + N2(F(N1(x))), and a norm before the head."""

    summary = "Sandwich-LN: normalise the branch before and after"
    source = "arXiv 2105.13290 (CogView)"

    def __init__(self, dim: int, **place: Any):
        super().__init__(dim, **place)
        self.before: nn.Module = self.norm()
        self.after: nn.Module = self.norm()

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        return h + self.after(branch(self.before(h)).to(h.dtype))

    def exit(self) -> nn.Module:
        return self.norm()


class PeriNorm(Normed):
    """Sandwich-LN with a norm on the embeddings as well."""

    summary = "Peri-LN: Sandwich-LN plus a norm on the embeddings"
    source = "arXiv 2502.02732"

    def __init__(self, dim: int, **place: Any):
        super().__init__(dim, **place)
        self.before: nn.Module = self.norm()
        self.after: nn.Module = self.norm()

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        return h + self.after(branch(self.before(h)).to(h.dtype))

    def entry(self) -> nn.Module:
        return self.norm()

    def exit(self) -> nn.Module:
        return self.norm()


class PreDyT(Residual):
    """Pre-LN with N replaced by w tanh(a x) + b, and a learnable embedding scale that starts at sqrt(D).

    Args:
        a_attention, a_mlp, a_final: starting slopes; the defaults are the paper's for a 7B Llama (vision uses 0.5,
            wider models smaller slopes).
        norm: the kind it stands in for: "layer" has a bias b, "rms" and "layer-no-bias" have none.
    """

    summary = "Pre-DyT: Pre-LN with a learnable tanh instead of the norm"
    source = "arXiv 2503.10622"

    def __init__(
        self,
        dim: int,
        *,
        a_attention: float = 0.8,
        a_mlp: float = 0.2,
        a_final: float = 0.2,
        norm: str = "rms",
        **place: Any,
    ):
        super().__init__(dim, **place)
        self.a_final: float = a_final
        self.bias: bool = check_name("norm", norm, NORMS) == "layer"
        self.before: DyT = self._dyt(a_attention if self.index % self.per_block == 0 else a_mlp)

    def _dyt(self, a: float) -> DyT:
        return DyT(self.dim, a, bias=self.bias)

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        return h + branch(self.before(h))

    def entry(self) -> nn.Module:
        return Gain(math.sqrt(self.dim))

    def exit(self) -> nn.Module:
        return self._dyt(self.a_final)

    def init_scale(self, role: str) -> float:
        return self.depth**-0.5 if role in WRITERS else 1.0


class Keel(Normed):
    """x' = N(a x + F(N(x))) with a = depth, fixed.

    Args:
        a: weight of the skip path; None for the paper's value, the number of sublayers. Public copies disagree
            (one documented 1/sqrt(depth) first).
    """

    summary = "Keel: Post-LN with the skip path weighted by the depth, and a norm in the branch"
    source = "arXiv 2601.19895"

    def __init__(self, dim: int, *, a: float | None = None, **place: Any):
        super().__init__(dim, **place)
        self.a: float = float(self.depth) if a is None else a
        self.before: nn.Module = self.norm()
        self.after: nn.Module = self.norm()

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        return self.after(self.a * h + branch(self.before(h)))


class DeepNorm(Normed):
    """x' = N(a x + F(x)), a = (2 N)^(1/4); value, output, MLP weights start divided by (8 N)^(1/4); N blocks."""

    summary = "DeepNorm: Post-LN with a weighted skip path and a smaller init"
    source = "arXiv 2203.00555, decoder-only form"

    def __init__(self, dim: int, **place: Any):
        super().__init__(dim, **place)
        self.a: float = (2 * self.blocks) ** 0.25
        self.after: nn.Module = self.norm()

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        return self.after(self.a * h + branch(h))

    def init_scale(self, role: str) -> float:
        return (8 * self.blocks) ** -0.25 if role in ("value", "output", "gate", "up", "down") else 1.0


class LayerNormScaling(Normed):
    """x' = x + F(N(x) / sqrt(l)), l the block number; must not be combined with the 1/sqrt(depth) init."""

    summary = "LayerNorm scaling: Pre-LN with the norm's output divided by sqrt(block number)"
    source = "arXiv 2502.05795"

    def __init__(self, dim: int, **place: Any):
        super().__init__(dim, **place)
        self.scale: float = self.count("block") ** -0.5
        self.before: nn.Module = self.norm()

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        return h + branch(self.before(h) * self.scale)

    def exit(self) -> nn.Module:
        return self.norm()


class Orthogonal(Normed):
    """x' = x + F(N(x)) minus its component along x, for each token by itself.

    The paper's "global" variant takes the component over all tokens of a sample; in a causal model that shows the
    past what comes later, so it is not offered.
    """

    summary = "Orthogonal update: add only the part of the branch orthogonal to the stream"
    source = "arXiv 2505.11881, feature-wise form"

    def __init__(self, dim: int, **place: Any):
        super().__init__(dim, **place)
        self.before: nn.Module = self.norm()

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        return h + sphere.tangent(h, branch(self.before(h)))

    def exit(self) -> nn.Module:
        return self.norm()

    def init_scale(self, role: str) -> float:
        return self.depth**-0.5 if role in WRITERS else 1.0
