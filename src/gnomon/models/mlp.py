"""The residual MLP on which arXiv 2605.04971 studies geometric continuity: 16 square layers of width 256 on MNIST.

Legend: B batch, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnomon.errors import UserError, check_name
from gnomon.models.config import ACTIVATIONS


@dataclass(frozen=True)
class MLPConfig:
    """x' = x + activation(W N(x)), W without bias.

    Args:
        layers: square hidden layers.
        width: D.
        inputs, outputs: sizes of the first and last linear maps (784 pixels, 10 classes).
        residual: False drops the skip path: x' = activation(W x).
        activation: "relu", "relu2", "gelu", "silu", "none" (linear), or "radial", x tanh(|x|), which commutes with rotations.
        layer_norm: put a LayerNorm before W.
        init: "torch" (nn.Linear's uniform init, +-1/sqrt(D)) or "he" (normal, variance 2/D).
        init_scale: factor on the hidden matrices after that.
    """

    layers: int = 16
    width: int = 256
    inputs: int = 784
    outputs: int = 10
    residual: bool = True
    activation: str = "relu"
    layer_norm: bool = False
    init: str = "torch"
    init_scale: float = 1.0

    def __post_init__(self) -> None:
        check_name("activation", self.activation, ACTIVATIONS)
        check_name("init", self.init, ("torch", "he"))
        if min(self.layers, self.width, self.inputs, self.outputs) < 1:
            raise UserError("layers, width, inputs and outputs must be at least 1")


def variant(name: str, **changes: Any) -> MLPConfig:
    """The paper's variants by its own labels: `Res+ReLU`, `NoRes+ReLU`, `Res+None+LN`, `Res+Radial` …"""
    residual, activation, norm, *more = [*name.split("+"), "", ""]
    if residual not in ("Res", "NoRes") or norm not in ("", "LN") or any(more):
        raise UserError(
            f"variant {name!r} should read Res or NoRes, + an activation, + LN or nothing: e.g. Res+ReLU+LN"
        )
    settings: dict[str, Any] = dict(residual=residual == "Res", activation=activation.lower(), layer_norm=bool(norm))
    # Without a skip path the default init dies out over 16 layers.
    settings["init"] = "torch" if residual == "Res" else "he"
    return MLPConfig(**settings | changes)


class ResidualMLP(nn.Module):
    """Input map, `layers` square layers, output map."""

    def __init__(self, config: MLPConfig):
        super().__init__()
        self.config = c = config
        self.input: nn.Linear = nn.Linear(c.inputs, c.width)
        self.blocks: nn.ModuleList = nn.ModuleList(MLPBlock(c) for _ in range(c.layers))
        self.output: nn.Linear = nn.Linear(c.width, c.outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.input.reset_parameters()
        self.output.reset_parameters()
        for block in cast("list[MLPBlock]", self.blocks):
            block.linear.reset_parameters()
            if self.config.init == "he":
                nn.init.kaiming_normal_(block.linear.weight, nonlinearity="relu")
            with torch.no_grad():
                block.linear.weight.mul_(self.config.init_scale)

    def forward(self, x_BP: Tensor) -> Tensor:
        """Class scores (B, outputs) of inputs (B, inputs)."""
        h_BD = self.input(x_BP.flatten(1))
        for block in self.blocks:
            h_BD = block(h_BD)
        return self.output(h_BD)

    def loss(self, x_BP: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(self(x_BP), labels_B)


class MLPBlock(nn.Module):
    def __init__(self, c: MLPConfig):
        super().__init__()
        self.residual: bool = c.residual
        self.activation: str = c.activation
        self.norm: nn.Module = nn.LayerNorm(c.width) if c.layer_norm else nn.Identity()
        self.linear: nn.Linear = nn.Linear(c.width, c.width, bias=False)

    def forward(self, h_BD: Tensor) -> Tensor:
        f_BD = activate(self.activation, self.linear(self.norm(h_BD)))
        return h_BD + f_BD if self.residual else f_BD


def activate(name: str, x: Tensor) -> Tensor:
    """One of `ACTIVATIONS` by name."""
    if name == "none":
        return x
    if name == "relu2":
        return F.relu(x).square()
    if name == "radial":
        return x * torch.tanh(x.norm(dim=-1, keepdim=True))
    return getattr(F, name)(x)
