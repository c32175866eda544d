"""QK-clip: logits fall to the threshold, and nothing else moves."""

from __future__ import annotations

import pytest
import torch

from gnomon import anatomy
from gnomon.errors import UserError
from gnomon.models import Transformer, tiny
from gnomon.optim import assign, clip_logits
from gnomon.train.probes import probe


def model(**changes):
    torch.manual_seed(0)
    return Transformer(tiny(layers=2, width=32, heads=4, context=16, init_std=0.5, **changes))


@pytest.mark.parametrize("changes", [{}, {"qkv": "fused", "bias": True}, {"kv_heads": 2}, {"positions": "learned"}])
def test_first_layer_comes_down_to_the_threshold(changes):
    m = model(**changes)
    if changes.get("bias"):
        torch.nn.init.normal_(m.blocks[0].attention.qkv.bias)
    parts, tokens = anatomy.read(m), torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))
    before = probe(m, tokens)["attention_logit_max"]
    value = parts.select("value", 0)[0]
    kept = value.block.take(dict(m.named_parameters())[value.name]).clone()
    factors = clip_logits(m, parts, [before[0], 0.0], threshold=before[0] / 4)
    assert factors == pytest.approx([0.5, 1.0])
    assert probe(m, tokens)["attention_logit_max"][0] == pytest.approx(before[0] / 4, rel=1e-4)
    assert torch.equal(value.block.take(dict(m.named_parameters())[value.name]), kept)


def test_mistakes_are_told():
    m = model()
    parts = anatomy.read(m)
    with pytest.raises(UserError, match="on Stiefel"):
        clip_logits(m, parts, [9.0, 9.0], 1.0, assign(m, "hetero"))
    with pytest.raises(UserError, match="2 layers"):
        clip_logits(m, parts, [9.0], 1.0)
    with pytest.raises(UserError, match="positive"):
        clip_logits(m, parts, [9.0, 9.0], 0.0)
