"""The anchor: after a sublayer the stream goes back towards the state that entered the blocks, by a learnable amount.

Legend: h the stream (..., D), x₀ the state that entered the blocks, g the amount.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gnomon.geometry import sphere
from gnomon.models.config import WITHOUT_NORM


class Anchor(nn.Module):
    """h' = h + g x₀; on a sphere a turn along the great circle from h towards x₀, by atan(g sin φ) where φ is the angle between them.

    g has shape (1,) and starts at 0, so that the model begins as the one without anchors. The additive form is nanochat's
    (`x0_lambdas`); the turn is ours.

    Args:
        residual: name of the residual, which says whether the stream lives on a sphere.
    """

    def __init__(self, residual: str):
        super().__init__()
        self.turns: bool = residual in WITHOUT_NORM
        self.amount: nn.Parameter = nn.Parameter(torch.empty(1))
        nn.init.zeros_(self.amount)

    def forward(self, h: Tensor, start: Tensor) -> Tensor:
        if self.turns:
            return sphere.step(h, start, self.amount)
        return h + start * self.amount.to(h.dtype)

    def extra_repr(self) -> str:
        return "turns" if self.turns else "adds"
