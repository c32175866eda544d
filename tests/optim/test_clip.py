"""QK-clip: logits fall to the threshold, and nothing else moves."""

from __future__ import annotations

import pytest
import torch

from gnomon import anatomy
from gnomon.errors import UserError
from gnomon.models import Transformer, tiny
from gnomon.monitor import Monitor
from gnomon.optim import ManifoldMuon, assign, clip_logits
from gnomon.series import over_depth


def model(**changes):
    torch.manual_seed(0)
    return Transformer(tiny(layers=2, width=32, heads=4, context=16, init_std=0.5, **changes))


def logits(m, tokens):
    found = Monitor(m, every=0, rows=None, since_start=False).look(tokens)
    return over_depth("attention_logit_max", found["attention_logit_max"])


@pytest.mark.parametrize("changes", [{}, {"qkv": "fused", "bias": True}, {"kv_heads": 2}, {"positions": "learned"}])
def test_first_layer_comes_down_to_the_threshold(changes):
    m = model(**changes)
    if changes.get("bias"):
        torch.nn.init.normal_(m.blocks[0].attention.qkv.bias)
    parts, tokens = anatomy.read(m), torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))
    before = logits(m, tokens)
    value = parts.select("value", 0)[0]
    kept = value.block.take(dict(m.named_parameters())[value.name]).clone()
    factors = clip_logits(m, parts, [before[0], 0.0], threshold=before[0] / 4)
    assert factors == pytest.approx([0.5, 1.0])
    assert logits(m, tokens)[0] == pytest.approx(before[0] / 4, rel=1e-4)
    assert torch.equal(value.block.take(dict(m.named_parameters())[value.name]), kept)


@pytest.mark.parametrize("changes", [{}, {"qkv": "fused"}])
def test_what_is_clipped_stays_clipped_in_bf16(changes):
    """The fp32 master of a bf16 weight follows: a step of no length must not bring the old weight back."""
    m = model(**changes).bfloat16()
    parts = anatomy.read(m)
    optimizer = ManifoldMuon(assign(m, "none"), lr=0.0, adamw_lr=0.0, adamw_weight_decay=0.0)

    def step():
        for p in m.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()

    step()
    query, value = parts.select("query", 0)[0], parts.select("value", 0)[0]
    weight = dict(m.named_parameters())[query.name]
    before = weight.detach().clone()
    clip_logits(m, parts, [16.0, 0.0], 4.0)
    step()
    assert torch.equal(query.block.take(weight), query.block.take(before) / 2)
    assert torch.equal(query.block.take(optimizer.state[weight]["master"]), query.block.take(before).float() / 2)
    kept = dict(m.named_parameters())[value.name]
    assert torch.equal(value.block.take(optimizer.state[kept]["master"]), value.block.take(kept).float())


def test_mistakes_are_told():
    m = model()
    parts = anatomy.read(m)
    with pytest.raises(UserError, match="on Stiefel"):
        clip_logits(m, parts, [9.0, 9.0], 1.0, assign(m, "hetero"))
    with pytest.raises(UserError, match="on Oblique"):
        clip_logits(m, parts, [9.0, 9.0], 1.0, assign(m, attention="oblique"))
    with pytest.raises(UserError, match="2 layers"):
        clip_logits(m, parts, [9.0], 1.0)
    with pytest.raises(UserError, match="positive"):
        clip_logits(m, parts, [9.0, 9.0], 0.0)
