"""Ordinary blocks as transformers' own GPT-2 and Llama, and back: settings, names and layouts. Nothing here needs transformers.

GPT-2   pre-norm, LayerNorm, learned positions, GELU; query, key and value fused; matrices stored inputs x outputs
Llama   pre-norm, RMSNorm, rotary positions, SwiGLU; matrices as here
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gnomon.errors import UserError
from gnomon.models.config import TransformerConfig

if TYPE_CHECKING:
    from torch import Tensor

CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}

# Modules: ours -> theirs.
_ENDS = {
    "gpt2": {"embed": "transformer.wte", "positions": "transformer.wpe", "exit": "transformer.ln_f", "head": "lm_head"},
    "llama": {"embed": "model.embed_tokens", "exit": "model.norm", "head": "lm_head"},
}
_BLOCK = {
    "gpt2": {
        "join_attention.before": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "join_mlp.before": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    "llama": {
        "join_attention.before": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "join_mlp.before": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
}
_STACK = {"gpt2": "transformer.h", "llama": "model.layers"}
_TURNED = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")

_NEEDS: dict[str, dict[str, tuple[str, Callable[[TransformerConfig], bool]]]] = {
    "gpt2": {
        "positions": ("learned", lambda c: c.positions == "learned"),
        "norm": ("layer or layer-no-bias", lambda c: c.norm != "rms"),
        "mlp": ("gelu", lambda c: c.mlp == "gelu"),
        "n_kv_heads": ("as many as heads", lambda c: c.n_kv_heads == c.heads),
        "d_head": ("width / heads", lambda c: c.d_head * c.heads == c.width),
    },
    "llama": {
        "positions": ("rope", lambda c: c.positions == "rope"),
        "norm": ("rms", lambda c: c.norm == "rms"),
        "mlp": ("swiglu", lambda c: c.mlp == "swiglu"),
        "width": ("a multiple of heads", lambda c: c.width % c.heads == 0),
    },
}
_BOTH: dict[str, tuple[str, Callable[[TransformerConfig], bool]]] = {
    "residual": ("pre-norm", lambda c: c.residual == "pre-norm"),
    "head_bias": ("no bias on the logits", lambda c: not c.head_bias),
    "activation": ("the MLP's own", lambda c: c.activation is None),
    "qk_norm": ("no norm on queries and keys", lambda c: not c.qk_norm),
    "attention_softcap": ("no soft cap", lambda c: c.attention_softcap is None),
    "head_softcap": ("no soft cap", lambda c: c.head_softcap is None),
}


# Carried over or without effect on the outputs. Any other setting must have its default: one not known here is an obstacle.
_CARRIED = {
    "vocab_size", "context", "layers", "heads", "width", "kv_heads", "head_dim", "mlp_width", "positions", "rope_base", "norm",
    "mlp", "bias", "qkv", "tied", "residual", "residual_options", "stream", "init_std", "zero_init", "norm_eps",
}  # fmt: skip


def family_of(config: TransformerConfig) -> str | None:
    """ "gpt2" or "llama" when that class computes this model; else None."""
    return next((family for family in CLASSES if not obstacles(config, family)), None)


def obstacles(config: TransformerConfig, family: str) -> list[str]:
    """What keeps a model from being of the family, one setting a line."""
    rules = _BOTH | _NEEDS[family]
    found = [
        f"{name} is {getattr(config, name)}, {family} has {needed}"
        for name, (needed, fits) in rules.items()
        if not fits(config)
    ]
    for field in dataclasses.fields(config):
        if field.name not in _CARRIED | rules.keys() and getattr(config, field.name) != field.default:
            found.append(f"{field.name} is {getattr(config, field.name)}, {family} has no such setting")
    return found


def to_hf_config(config: TransformerConfig, family: str) -> dict[str, Any]:
    """Arguments of transformers' `GPT2Config` or `LlamaConfig`."""
    c = config
    if family == "gpt2":
        return dict(
            vocab_size=c.vocab_size, n_positions=c.context, n_embd=c.width, n_layer=c.layers, n_head=c.heads,
            n_inner=c.d_mlp, activation_function="gelu_new", layer_norm_epsilon=c.norm_eps, tie_word_embeddings=c.tied,
            initializer_range=c.init_std, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    return dict(
        vocab_size=c.vocab_size, max_position_embeddings=c.context, hidden_size=c.width, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.n_kv_heads, head_dim=c.d_head, intermediate_size=c.d_mlp,
        hidden_act="silu", rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tied, attention_bias=c.bias, mlp_bias=c.bias,
        initializer_range=c.init_std, rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
    )  # fmt: skip


def to_hf_tensors(tensors: Mapping[str, Tensor], config: TransformerConfig, family: str) -> dict[str, Tensor]:
    """A `Transformer`'s state under the names and in the layout of the family. GPT-2's absent biases become zeros.

    A tied head gets no tensor of its own.
    """
    tensors = _fuse(tensors, config) if family == "gpt2" else _split(tensors, config)
    found = {}
    for ours, theirs in _modules(config.layers, family).items():
        weight = tensors.get(f"{ours}.weight")
        if weight is None:
            continue
        found[f"{theirs}.weight"] = (weight.T if theirs.endswith(_TURNED) else weight).contiguous()
        bias = tensors.get(f"{ours}.bias")
        if bias is None and family == "gpt2" and ours not in ("embed", "positions", "head"):
            bias = weight.new_zeros(weight.shape[0])
        if bias is not None:
            found[f"{theirs}.bias"] = bias.contiguous()
    return found


def from_hf_tensors(tensors: Mapping[str, Tensor], config: TransformerConfig, family: str) -> dict[str, Tensor]:
    """The inverse of `to_hf_tensors`: the tensors that a `Transformer` of these settings with pre-norm blocks would have.

    Raises:
        UserError: one is missing.
    """
    prefix = _STACK[family].partition(".")[0] + "."
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    found = {}
    for ours, theirs in _modules(config.layers, family).items():
        for kind in ("weight", "bias"):
            tensor = bare.get(f"{theirs.removeprefix(prefix)}.{kind}")
            if tensor is not None:
                found[f"{ours}.{kind}"] = tensor.T if kind == "weight" and theirs.endswith(_TURNED) else tensor
            elif kind == "weight" and not (ours == "head" and config.tied):
                raise UserError(
                    f"the checkpoint has no tensor {theirs}.weight; it should hold a whole {CLASSES[family]}"
                )
    if config.tied:
        found.pop("head.weight", None)
    return match_qkv(found, config)


def match_qkv(tensors: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """A `Transformer`'s tensors with query, key and value fused or split as the settings say."""
    return _fuse(tensors, config) if config.qkv == "fused" else _split(tensors, config)


def from_hf_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `TransformerConfig` from the config.json of a GPT-2 or Llama; what decides nothing of the
    outputs (qkv, stream, init_std, zero_init) and the residual are left open.

    Raises:
        UserError: another model type, or a setting that gnomon's blocks do not have.
    """
    family = values.get("model_type")
    if family == "gpt2":
        return _from_gpt2(values)
    if family == "llama":
        return _from_llama(values)
    raise UserError(
        f"model_type is {family!r}; a run can start from a gpt2 or llama checkpoint, or one of gnomon's own. Other models "
        "can be trained as they are: gnomon.assign and gnomon.ManifoldMuon take any module (examples/hf_trainer.py)."
    )


def _from_gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    v = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, **values}
    _refuse(v, "activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    _refuse(v, "scale_attn_weights", (True,), True)
    _refuse(v, "scale_attn_by_inverse_layer_idx", (False,), False)
    _refuse(v, "add_cross_attention", (False,), False)
    return dict(
        vocab_size=v["vocab_size"], context=v["n_positions"], layers=v["n_layer"], heads=v["n_head"], width=v["n_embd"],
        kv_heads=None, head_dim=None, mlp_width=v.get("n_inner"), positions="learned", norm="layer", mlp="gelu", bias=True,
        tied=v.get("tie_word_embeddings", True), norm_eps=v.get("layer_norm_epsilon", 1e-5), **_NONE,
    )  # fmt: skip


def _from_llama(values: Mapping[str, Any]) -> dict[str, Any]:
    v = {
        "vocab_size": 32000, "max_position_embeddings": 2048, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "intermediate_size": 11008, **values,
    }  # fmt: skip
    rope = v.get("rope_parameters") or v.get("rope_scaling") or {}
    _refuse(v, "hidden_act", ("silu",), "silu")
    _refuse(rope, "rope_type", ("default",), rope.get("type", "default"))
    return dict(
        vocab_size=v["vocab_size"], context=v["max_position_embeddings"], layers=v["num_hidden_layers"],
        heads=v["num_attention_heads"], width=v["hidden_size"], kv_heads=v.get("num_key_value_heads"),
        head_dim=v.get("head_dim"), mlp_width=v["intermediate_size"], positions="rope",
        rope_base=float(rope.get("rope_theta", v.get("rope_theta", 10000.0))), norm="rms", mlp="swiglu",
        bias=bool(v.get("attention_bias", False) or v.get("mlp_bias", False)),
        tied=v.get("tie_word_embeddings", False), norm_eps=v.get("rms_norm_eps", 1e-6), **_NONE,
    )  # fmt: skip


# What neither family has.
_NONE: dict[str, Any] = dict(activation=None, head_bias=False, qk_norm=False, attention_softcap=None, head_softcap=None)


def _refuse(values: Mapping[str, Any], name: str, known: tuple[Any, ...], default: Any) -> None:
    given = values.get(name, default)
    if given not in known:
        raise UserError(
            f"{name} is {given!r}; gnomon's blocks have {' or '.join(map(repr, known))}, so its outputs would differ"
        )


def _modules(layers: int, family: str) -> dict[str, str]:
    """Every module with weights: our name -> theirs."""
    inner = {
        f"blocks.{index}.{ours}": f"{_STACK[family]}.{index}.{theirs}"
        for index in range(layers)
        for ours, theirs in _BLOCK[family].items()
    }
    return _ENDS[family] | inner


def _fuse(tensors: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Query, key and value as one tensor, where they are three."""
    import torch

    found = dict(tensors)
    for attention in (f"blocks.{index}.attention" for index in range(config.layers)):
        for kind in ("weight", "bias"):
            if f"{attention}.query.{kind}" in found:
                parts = [found.pop(f"{attention}.{part}.{kind}") for part in ("query", "key", "value")]
                found[f"{attention}.qkv.{kind}"] = torch.cat(parts)
    return found


def _split(tensors: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """The inverse of `_fuse`."""
    found, widths = dict(tensors), [n * config.d_head for n in (config.heads, config.n_kv_heads, config.n_kv_heads)]
    for attention in (f"blocks.{index}.attention" for index in range(config.layers)):
        for kind in ("weight", "bias"):
            if f"{attention}.qkv.{kind}" in found:
                parts = found.pop(f"{attention}.qkv.{kind}").split(widths)
                found |= {f"{attention}.{part}.{kind}": x for part, x in zip(("query", "key", "value"), parts)}
    return found
