"""What happens inside: one forward pass over a fixed batch, looked at through hooks.

Legend: B batch, T tokens, D channels, H query heads, S tokens attended to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gnomon.anatomy import Anatomy, Block
from gnomon.models.transformer import Transformer
from gnomon.optim import ManifoldMuon
from gnomon.residual import Residual
from gnomon.sharding import whole
from gnomon.train.distributed import uncompiled


@torch.no_grad()
def probe(model: Transformer, tokens_BT: Tensor) -> dict[str, Any]:
    """Measure the model on a batch.

    Returns:
        Lists over sublayers: `stream_norm` (root mean square over tokens of |h| after it), `angle` (mean angle in
        radians it turns h by), `stream_coherence` (length of the mean over tokens of h / |h| after it: 1 when all states
        point the same way), `step_size` (alpha, where the residual has one). Lists over blocks:
        `attention_logit_max` and `attention_entropy` (nats, mean over heads and tokens).
    """
    found: dict[str, list] = {"stream_norm": [], "stream_coherence": [], "angle": [], "attention_logit_max": [], "attention_entropy": []}

    def after_join(_module, inputs, output):
        h, out = inputs[0].float(), output.float()
        found["stream_norm"].append(out.square().sum(-1).mean().sqrt())
        found["stream_coherence"].append(F.normalize(out, dim=-1).flatten(0, -2).mean(0).norm())
        found["angle"].append(angle(h, out).mean())

    joins = [join for block in model.blocks for join in (block.join_attention, block.join_mlp)]
    handles = [join.register_forward_hook(after_join) for join in joins]
    try:
        with attention_seen(model, lambda logits_BHTS: _attention(logits_BHTS, found)), uncompiled(model):
            model(tokens_BT)
    finally:
        for handle in handles:
            handle.remove()
    result = {key: torch.stack(values).tolist() for key, values in found.items()}
    steps = [whole(m.step_size()).mean() for m in model.modules() if isinstance(m, Residual) and hasattr(m, "step_size")]
    if steps:
        result["step_size"] = torch.stack(steps).tolist()
    return result


@contextlib.contextmanager
def attention_seen(model: Transformer, look: Callable[[Tensor], None]) -> Iterator[None]:
    """While open, a forward pass shows `look` the attention logits (B, H, T, S) of each block, -inf where masked."""
    try:
        for block in model.blocks:
            attention = block.attention
            attention.observer = lambda q, k, attention=attention: look(attention.logits(q, k))
        yield
    finally:
        for block in model.blocks:
            block.attention.observer = None


@torch.no_grad()
def probe_weights(model: nn.Module, parts: Anatomy, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float]]:
    """Largest and smallest singular value of every attention and MLP matrix, and what ManifoldMuon says of them.

    Returns:
        `sigma_max`, `sigma_min`, and under ManifoldMuon `feasibility`, `tangency`, `alignment`: label -> number.
    """
    found: dict[str, dict[str, float]] = {"sigma_max": {}, "sigma_min": {}}
    parameters = dict(model.named_parameters())
    for part in parts:
        if part.is_matrix and part.sublayer in ("attention", "mlp"):
            fused = "" if part.block == Block() else f"[{part.role}]"
            sigma = torch.linalg.svdvals(part.block.take(whole(parameters[part.name])).float())
            label = part.name.removesuffix(".weight") + fused
            found["sigma_max"][label], found["sigma_min"][label] = sigma[0].item(), sigma[-1].item()
    return found | (optimizer.measure() if isinstance(optimizer, ManifoldMuon) else {})


def _attention(logits_BHTS: Tensor, found: dict[str, list]) -> None:
    log_p = logits_BHTS.log_softmax(-1)
    found["attention_logit_max"].append(logits_BHTS.max())
    # exp(-inf) * -inf is NaN, where the limit p log p is 0.
    found["attention_entropy"].append(-(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1).mean())


def angle(x: Tensor, y: Tensor) -> Tensor:
    """Angle between rows in radians: 2 atan2(|u - w|, |u + w|) of unit vectors, accurate near 0 and pi unlike acos."""
    u, w = (F.normalize(v, dim=-1, eps=torch.finfo(v.dtype).tiny) for v in (x, y))
    return 2 * torch.atan2((u - w).norm(dim=-1), (u + w).norm(dim=-1))
