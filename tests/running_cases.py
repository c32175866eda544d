"""Small models of transformers, and token files for them."""

from __future__ import annotations

import pytest
import torch

from gnomon.data.tokenizers import tokenizer
from gnomon.data.tokenwriter import TokenWriter

SIZES = dict(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=96,
    vocab_size=128,
    max_position_embeddings=64,
)
GROUPED = SIZES | dict(num_key_value_heads=2)
FAMILIES = {
    "gpt2": dict(n_embd=64, n_layer=3, n_head=4, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0),
    "llama": GROUPED,
    "qwen3": GROUPED | dict(head_dim=24, tie_word_embeddings=True),
    "gemma2": GROUPED | dict(head_dim=24, sliding_window=8, num_hidden_layers=4),
    "mistral": GROUPED | dict(sliding_window=8),
    "mixtral": GROUPED | dict(num_local_experts=4),  # experts stored one by one, run as one tensor
    "phi": SIZES,
    "gpt_neox": SIZES,
    "bert": SIZES,
    "opt": SIZES | dict(ffn_dim=96, word_embed_proj_dim=64),
}


def make(kind, auto="AutoModelForCausalLM"):
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **FAMILIES[kind])).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # gains and biases away from one and zero
            parameter.add_(torch.rand_like(parameter) * 0.3) if parameter.ndim == 1 else parameter.mul_(4)
    return model


def pass_over(model, prefix, gone):
    """The model in memory, whose blocks `gone` give back what they are given."""

    def passed(module, arguments, options, out):
        h_BTD = arguments[0] if arguments else options["hidden_states"]
        return h_BTD if isinstance(out, torch.Tensor) else (h_BTD, *out[1:])

    for index in gone:
        model.get_submodule(prefix)[index].register_forward_hook(passed, with_kwargs=True)
    return model


def check_folder(folder, expected, tokens_BT, loss):
    """Plain transformers opens the folder as a model of the same logits and loss as `expected`, and `loss` is that loss."""
    import transformers

    made = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found, wanted = (model(tokens_BT, labels=tokens_BT, use_cache=False) for model in (made, expected))
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-5, atol=1e-5)
    assert loss == pytest.approx(wanted.loss.item(), rel=1e-5)


def write_tokens(path, ids):
    with TokenWriter(path, tokenizer("byte")) as writer:
        writer.append(ids)
    return path


def write_word_tokenizer(folder, words=100, before=False):
    """w0, w1, … and, if asked for, 101 before every text."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)} | {"?": words, "[C]": words + 1}, "?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if before:
        inner.post_processor = processors.TemplateProcessing(single="[C] $A", special_tokens=[("[C]", words + 1)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?").save_pretrained(folder)
    return folder
