"""What is remembered of the gradients of matrices, and the update U that comes of it.

    msign    M <- mu M + (1 - mu) G,   U = mu M + (1 - mu) G         momentum, with Nesterov's look one step ahead
    adam     M <- b1 M + (1 - b1) G,   V <- b2 V + (1 - b2) G^2,     U = M / (sqrt V + eps)

Momentum as in torch.optim.Muon: the average differs from the sum by a factor, which the direction does not see. Adam's
corrections for its start are such factors too, which `Sphere` does not see, so they are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from gnomon import sharding

DIRECTIONS = ("msign", "adam")
"""Where a matrix goes: along the steepest descent of its manifold from the momentum, or along Adam's update."""


def updates(group: Mapping[str, Any], parameters: list[Tensor], state: MutableMapping[Tensor, dict[str, Any]]) -> list[Tensor]:
    """Advance what `state` remembers of each parameter; returns the updates, in fp32 or wider, never aliasing state or gradients.

    Args:
        group: the options of a parameter group: direction, momentum and nesterov, or betas and eps.
    """
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    gradients = [sharding.local(g).to(torch.promote_types(p.dtype, torch.float32)) for g, p in zip(gradients, parameters)]
    buffers = _buffers("momentum", parameters, state)
    local = [sharding.local(buffer) for buffer in buffers]
    if group["direction"] == "adam":
        found = _adam(group, local, [sharding.local(v) for v in _buffers("variance", parameters, state)], gradients)
    else:
        mu = group["momentum"]
        torch._foreach_lerp_(local, gradients, 1 - mu)
        found = torch._foreach_lerp(gradients, local, mu) if group["nesterov"] else [b.clone() for b in local]
    return [sharding.like(update, buffer) for update, buffer in zip(found, buffers)]


def _adam(group: Mapping[str, Any], means: list[Tensor], squares: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    b1, b2 = group["betas"]
    torch._foreach_lerp_(means, gradients, 1 - b1)
    torch._foreach_mul_(squares, b2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - b2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, group["eps"])
    return list(torch._foreach_div(means, roots))


def _buffers(name: str, parameters: list[Tensor], state: MutableMapping[Tensor, dict[str, Any]]) -> list[Tensor]:
    for p in parameters:
        if name not in state[p]:
            state[p][name] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
    return [state[p][name] for p in parameters]
