"""Looking inside a trained model once: what each layer is worth, where gradients and attention go.

Legend: B batch, T tokens, D channels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnomon import data, evaluation
from gnomon.models.transformer import Transformer
from gnomon.monitor import Monitor
from gnomon.series import over_depth
from gnomon.train import Recipe
from gnomon.train.device import to_device
from gnomon.train.run_data import open_data


def measure(folder: Path, device: str = "auto") -> dict[str, Any]:
    """All of them for a run folder, on the first `tokens` of its validation data."""
    model, _, recipe = evaluation.load(folder, device=device)
    T = recipe.model.context
    windows = data.slices(open_data(recipe, folder)[1], context=T, count=max(tokens(recipe) // T, 1))
    x_BT, y_BT = to_device(windows, model.embed.weight.device)
    return {
        "worth": worth(model, x_BT, y_BT),
        "gradient_norm": gradient_norms(model, x_BT, y_BT),
        "sink": sinks(model, x_BT),
        "sink_uniform": uniform_sink(T),
    }


def tokens(recipe: Recipe) -> int:
    """How many to look at. Skipping each of L blocks costs L / 2 forward passes; this keeps it near 2 % of the training."""
    return min(max(recipe.steps * recipe.tokens_per_step // (8 * recipe.model.layers), 512), 4096)


def flops(recipe: Recipe) -> float:
    """Operations of `measure`: half a forward pass a block, one backward, three more forward ones; a forward is a third of a step."""
    return recipe.model.flops_per_token / 3 * tokens(recipe) * (recipe.model.layers / 2 + 5)


@torch.no_grad()
def worth(model: Transformer, x_BT: Tensor, y_BT: Tensor) -> list[float]:
    """Loss without a block minus loss with it, one number a block: the curse of depth is when this falls to 0
    (arXiv 2502.05795)."""
    whole, seen = model.loss(x_BT, y_BT).item(), []
    model.stream(x_BT, seen=seen)
    blocks, found = model.blocks, []
    try:
        for skipped in range(len(blocks)):
            # Everything below the skipped block is as it was.
            model.blocks = nn.ModuleList([_Given(seen[skipped]), *blocks[skipped + 1 :]])
            found.append(model.loss(x_BT, y_BT).item() - whole)
    finally:
        model.blocks = blocks
    return found


class _Given(nn.Module):
    """A block that says what it was given, whatever enters it."""

    def __init__(self, h_BTD: Tensor):
        super().__init__()
        self.h_BTD = h_BTD

    def forward(self, *_: Any) -> Tensor:
        return self.h_BTD


def gradient_norms(model: Transformer, x_BT: Tensor, y_BT: Tensor) -> list[float]:
    """Frobenius norm of the loss's gradient by the matrices of each block."""
    model.zero_grad(set_to_none=True)
    model.loss(x_BT, y_BT).backward()
    found = []
    for block in model.blocks:
        squares = [p.grad.square().sum() for p in block.parameters() if p.ndim >= 2 and p.grad is not None]
        found.append(float(torch.stack(squares).sum().sqrt()))
    model.zero_grad(set_to_none=True)
    return found


def sinks(model: Transformer, x_BT: Tensor) -> list[float]:
    """Share of attention that the second half of the tokens pays to the first token, mean over heads, one number a block.
    `uniform_sink` is what equal attention to all would give."""
    record = Monitor(model, every=0, rows=None, since_start=False).look(x_BT)
    return over_depth("attention_sink", record["attention_sink"])


def uniform_sink(T: int) -> float:
    """1 / (t + 1) averaged over the second half of T positions."""
    return sum(1 / (t + 1) for t in range(T // 2, T)) / (T - T // 2)
