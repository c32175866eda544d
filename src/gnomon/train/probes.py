"""What happens inside: one forward pass over a fixed batch, looked at through hooks.

Legend: B batch, T tokens, D channels, H query heads, S tokens attended to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnomon.models.transformer import Block, Transformer
from gnomon.residual import Residual


@torch.no_grad()
def probe(model: Transformer, tokens_BT: Tensor) -> dict[str, Any]:
    """Measure the model on a batch.

    Returns:
        Lists over sublayers: `stream_norm` (root mean square over tokens of |h| after it), `angle` (mean angle in
        radians it turns h by), `step_size` (alpha, where the residual has one). Lists over blocks:
        `attention_logit_max` and `attention_entropy` (nats, mean over heads and tokens).
    """
    found: dict[str, list] = {"stream_norm": [], "angle": [], "attention_logit_max": [], "attention_entropy": []}

    def after_join(_module, inputs, output):
        h, out = inputs[0].float(), output.float()
        found["stream_norm"].append(out.square().sum(-1).mean().sqrt())
        found["angle"].append(angle(h, out).mean())

    handles = []
    try:
        for block in model.blocks:
            assert isinstance(block, Block)
            attention = block.attention
            attention.observer = lambda q, k, attention=attention: _attention(attention.logits(q, k), found)
            handles += [join.register_forward_hook(after_join) for join in (block.join_attention, block.join_mlp)]
        model(tokens_BT)
    finally:
        for handle in handles:
            handle.remove()
        for block in model.blocks:
            block.attention.observer = None
    result = {key: torch.stack(values).tolist() for key, values in found.items()}
    steps = [m.step_size().mean() for m in model.modules() if isinstance(m, Residual) and hasattr(m, "step_size")]
    if steps:
        result["step_size"] = torch.stack(steps).tolist()
    return result


def _attention(logits_BHTS: Tensor, found: dict[str, list]) -> None:
    log_p = logits_BHTS.log_softmax(-1)
    found["attention_logit_max"].append(logits_BHTS.max())
    # exp(-inf) * -inf is NaN, where the limit p log p is 0.
    found["attention_entropy"].append(-(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1).mean())


def angle(x: Tensor, y: Tensor) -> Tensor:
    """Angle between rows in radians: 2 atan2(|u - w|, |u + w|) of unit vectors, accurate near 0 and pi unlike acos."""
    u, w = (v / v.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny) for v in (x, y))
    return 2 * torch.atan2((u - w).norm(dim=-1), (u + w).norm(dim=-1))
