"""What a residual is: the way one sublayer joins the stream; and a stack of them, which is a model's.

    h = residual(h, branch)        branch: callable (..., D) -> (..., D), an attention or an MLP

A stack asks its first residual for the `entry` (what happens to the embeddings) and its last for the `exit` (what
happens before the head); every residual tells the `init_scale` its method prescribes. Block code is then the same for
every method.

Legend: D channels of the stream (`dim`), l counts sublayers or blocks from 1, `depth` sublayers in all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from gnomon.errors import UserError, check_name
from gnomon.geometry import sphere

Branch = Callable[[Tensor], Tensor]

NORMS = ("rms", "layer", "layer-no-bias")

WRITERS = ("output", "down")
"""Roles of the projections that write to the stream."""


class Residual(nn.Module, ABC):
    """One sublayer's place in the stream. Subclasses are final.

    Args:
        dim: channels of the stream, D.
        index: which sublayer this is, from 0 at the input.
        depth: number of sublayers in the whole model (two a block in a transformer).
        per_block: sublayers in a block; the first of a block is its attention.

    Raises:
        UserError: index outside 0 … depth - 1.
    """

    summary: ClassVar[str]
    source: ClassVar[str]
    learns_from_zero: bool = True
    """Whether a branch that says nothing gets a gradient of sensible size, so that its last matrix may start at zero."""

    def __init__(self, dim: int, *, index: int, depth: int, per_block: int = 2):
        super().__init__()
        if not 0 <= index < depth:
            raise UserError(f"sublayer index {index} is outside 0 … {depth - 1} (depth counts sublayers, not blocks)")
        if per_block < 1:
            raise UserError(f"per_block must be at least 1, got {per_block}")
        self.dim: int = dim
        self.index: int = index
        self.depth: int = depth
        self.per_block: int = per_block

    @abstractmethod
    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        """Apply the branch and join its output to the stream `h`, (..., D)."""

    def entry(self) -> nn.Module:
        """A module for the embeddings of a stack whose first sublayer this is."""
        return nn.Identity()

    def exit(self) -> nn.Module:
        """A module between a stack whose last sublayer this is and the head."""
        return nn.Identity()

    def init_scale(self, role: str) -> float:
        """Factor on the init of the branch's weights of this role ("query", "value", "output", "up", "down" …)."""
        return 1.0

    def count(self, what: str = "sublayer") -> int:
        """l, from 1: this sublayer's number, or that of its block."""
        check_name("count", what, ("sublayer", "block"))
        return 1 + (self.index if what == "sublayer" else self.index // self.per_block)

    @property
    def blocks(self) -> int:
        return -(-self.depth // self.per_block)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, index={self.index}, depth={self.depth}"


class Normed(Residual):
    """A residual that has norms.

    Args:
        norm: "rms", "layer" or "layer-no-bias".
        eps: added to the variance.
    """

    def __init__(self, dim: int, *, norm: str = "rms", eps: float = 1e-6, **place: Any):
        super().__init__(dim, **place)
        self._norm = norm, eps

    def norm(self) -> nn.Module:
        """A new norm of the chosen kind."""
        return make_norm(self._norm[0], self.dim, self._norm[1])


class Stack(nn.Module):
    """The residuals of a model, one for each sublayer, with what their method does at both ends.

    >>> h = stack(embedding(tokens), branches)      # attention, mlp, attention, mlp …

    A loop of one's own starts from `stack.entry(x)`, calls `stack[i](h, branch)` and ends in `stack.exit(h)`.
    """

    def __init__(self, joins: Sequence[Residual]):
        super().__init__()
        self.entry: nn.Module = joins[0].entry()
        self.joins: nn.ModuleList = nn.ModuleList(joins)
        self.exit: nn.Module = joins[-1].exit()

    def __len__(self) -> int:
        return len(self.joins)

    def __getitem__(self, index: int) -> Residual:
        return cast(Residual, self.joins[index])

    def __iter__(self) -> Iterator[Residual]:
        return cast(Iterator[Residual], iter(self.joins))

    def forward(self, x: Tensor, branches: Iterable[Branch]) -> Tensor:
        """From the embeddings (..., D) to what the head reads, through a branch for every sublayer.

        Raises:
            UserError: more or fewer branches than sublayers.
        """
        branches = list(branches)
        if len(branches) != len(self):
            raise UserError(
                f"{len(branches)} branches for a stack of {len(self)} sublayers; a block has {self[0].per_block} "
                "(attention and mlp), each a branch of its own. Mind `blocks` and `per_block`."
            )
        h = self.entry(x)
        for join, branch in zip(self.joins, branches):
            h = join(h, branch)
        return self.exit(h)


def make_norm(kind: str, dim: int, eps: float = 1e-6) -> nn.Module:
    """RMSNorm or LayerNorm (with or without bias) by name."""
    check_name("norm", kind, NORMS)
    if kind == "rms":
        return nn.RMSNorm(dim, eps=eps)
    return nn.LayerNorm(dim, eps=eps, bias=kind == "layer")


class ScaleNorm(nn.Module):
    """Put every row on the sphere of the given radius: radius * x / |x|. A zero row stays zero."""

    def __init__(self, radius: float):
        super().__init__()
        self.radius = radius

    def forward(self, x: Tensor) -> Tensor:
        return sphere.project(x, self.radius)

    def extra_repr(self) -> str:
        return f"radius={self.radius:g}"


class Gain(nn.Module):
    """Multiply by one learnable number, stored with shape (1,)."""

    def __init__(self, start: float = 1.0):
        super().__init__()
        self.start = start
        self.gain: nn.Parameter = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.to(x.dtype)


class DyT(nn.Module):
    """Dynamic tanh in place of a norm: w * tanh(a x) + b, with `a` of shape (1,) (arXiv 2503.10622)."""

    def __init__(self, dim: int, a: float = 0.5, bias: bool = True):
        super().__init__()
        self.start = a
        self.a: nn.Parameter = nn.Parameter(torch.empty(1))
        self.weight: nn.Parameter = nn.Parameter(torch.empty(dim))
        self.bias: nn.Parameter | None = nn.Parameter(torch.empty(dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.a, self.start)
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.a.to(x.dtype)) * self.weight.to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)
