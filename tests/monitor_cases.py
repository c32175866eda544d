"""Tiny models of Hugging Face, each one thing that makes its states or its attention different."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as tf
from torch import nn

SIZES = dict(
    num_hidden_layers=3, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64, bos_token_id=0, eos_token_id=1,
    pad_token_id=2, max_position_embeddings=64,
)  # fmt: skip
GROUPED = SIZES | dict(num_key_value_heads=2)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(n_layer=3, n_head=4, n_embd=32, n_positions=64, vocab_size=64, bos_token_id=0, eos_token_id=1)
    ),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED, head_dim=16)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**GROUPED, head_dim=16, attn_logit_softcapping=2.0, query_pre_attn_scalar=4, sliding_window=6)
    ),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**GROUPED)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**SIZES)),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SIZES, use_parallel_residual=True)),
}


def make(name: str, attention: str = "eager", seed: int = 0) -> nn.Module:
    """A model whose numbers are large enough for attention not to be uniform, without dropout."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    model.set_attn_implementation(attention)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(6)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for key in ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"):
        if hasattr(model.config, key):
            setattr(model.config, key, 0.0)
    return model.train()


def tokens(B: int = 2, T: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (B, T), generator=torch.Generator().manual_seed(seed))
