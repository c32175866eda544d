"""Which optimizer moves which parameter. The one place to change when a recipe names a new optimizer."""

from __future__ import annotations

import torch
from torch import nn

from gnomon.train.recipe import OptimConfig


def build(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of a recipe over `model`; every group remembers its peak rate as `initial_lr`.

    Parameters are given with their names, so that a checkpoint can tell when they come back in another order.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [(name, p) for name, p in named if p.ndim >= 2]
    rest = [(name, p) for name, p in named if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, ratio: float) -> None:
    """Set every group's rate to `ratio` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * ratio
