"""QK-clip: when attention logits grow past a threshold, scale the queries' and keys' weights down (Kimi K2's MuonClip).

A baseline against which manifolds can be measured: it treats the symptom that DGram attention is said to show.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gnomon.anatomy import Anatomy
from gnomon.errors import UserError
from gnomon.optim.rules import Assignment, label
from gnomon.sharding import whole, write


@torch.no_grad()
def clip_logits(
    model: nn.Module,
    parts: Anatomy,
    logit_max: Sequence[float],
    threshold: float,
    assignment: Assignment | None = None,
) -> list[float]:
    """Scale query and key of every layer whose largest logit exceeds `threshold` by sqrt(threshold / largest) each.

    The whole matrix is scaled, so columns stay orthogonal and DGram stays feasible; biases follow their weights.

    Args:
        parts: anatomy of the model.
        logit_max: largest attention logit of each layer, in order.
        threshold: bound on logits, positive.
        assignment: given, weights on Stiefel or Oblique are refused: their norms are not free.

    Returns:
        the factor of each layer (1 where nothing was done).

    Raises:
        UserError: lengths differ, the threshold is not positive, or a query or key is on Stiefel or Oblique.
    """
    layers = parts.layers()
    if len(layers) != len(logit_max):
        raise UserError(f"{len(logit_max)} largest logits for {len(layers)} layers")
    if not threshold > 0:
        raise UserError(f"the threshold on logits must be positive, got {threshold}")
    for entry in assignment or ():
        if entry.manifold is not None and not entry.manifold.decays and entry.part.role in ("query", "key"):
            raise UserError(
                f"{entry.part.name} is on {label(entry.manifold)}, where norms are fixed: logits cannot be clipped by scaling it"
            )
    parameters = dict(model.named_parameters())
    factors: list[float] = []
    for layer, largest in zip(layers, logit_max):
        factor = (threshold / largest) ** 0.5 if largest > threshold else 1.0
        factors.append(factor)
        if factor == 1.0:
            continue
        for role in ("query", "key"):
            for part in parts.select(role, layer):
                weight = whole(parameters[part.name])
                part.block.put(weight, part.block.take(weight) * factor)
                write(parameters[part.name], weight)
                bias, rows = parameters.get(part.name.removesuffix("weight") + "bias"), part.block.rows
                if bias is not None:
                    values = whole(bias)
                    share = values if rows is None else values.view(-1, rows.period)[:, rows.start : rows.stop]
                    share.mul_(factor)
                    write(bias, values)
    return factors
