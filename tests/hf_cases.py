"""Small models for the tests of everything Hugging Face: ordinary ones, and one for every residual in both dialects."""

from __future__ import annotations

import itertools

import torch

from gnomon import residual
from gnomon.models import Transformer, TransformerConfig
from gnomon.models.config import MODERN

SMALL = dict(vocab_size=257, context=32, layers=2, heads=4, width=32, init_std=0.2)

# Epsilon and base are nobody's default, so that one not handed on would show.
GPT2 = dict(positions="learned", norm="layer", mlp="gelu", bias=True, tied=True, norm_eps=3e-3)
LLAMA = dict(
    positions="rope", norm="rms", mlp="swiglu", bias=False, tied=False, kv_heads=2, norm_eps=3e-3, rope_base=300.0
)

PLAIN = {
    "gpt2": GPT2,
    "gpt2-no-bias-fused-untied": GPT2 | dict(norm="layer-no-bias", bias=False, qkv="fused", tied=False),
    "llama": LLAMA,
    "llama-bias-wide-heads-fused-tied": LLAMA | dict(bias=True, head_dim=12, qkv="fused", tied=True),
}

OPTIONS = {"sphere": {"p": float("inf"), "gain": 2.0}, "geonorm": {"listing": True, "decay": "sqrt"}}

OWN = {
    f"{dialect}-{name}": values | dict(residual=name, residual_options=OPTIONS.get(name, {}))
    for (dialect, values), name in itertools.product({"gpt2": GPT2, "llama": LLAMA}.items(), residual.names())
} | {
    "biased": LLAMA | dict(head_bias=True, tied=True, qk_norm=True, head_softcap=9.0, attention_softcap=5.0),
    "anchored-sphere": GPT2 | dict(residual="sphere", anchor=True),
    "modern": LLAMA | dict(mlp="gelu", anchor=True) | MODERN,
}
"""Every residual in both dialects, and what else the families lack."""


def config(name: str) -> TransformerConfig:
    return TransformerConfig(**SMALL | (PLAIN | OWN)[name])


def build(name: str, seed: int = 0) -> Transformer:
    """A model whose gains, biases and scalars are off their starting values, so that one reset would show."""
    torch.manual_seed(seed)
    model = Transformer(config(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) * 0.5 + 0.1)
    return model


def tokens(seed: int = 0, batch: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))
