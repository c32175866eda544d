"""Start from a checkpoint: a Hugging Face GPT-2 or Llama, or one of gnomon's own, into a `Transformer` with any residual."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon.checkpoints import Checkpoint, open_checkpoint
from gnomon.errors import UserError
from gnomon.models.config import TransformerConfig
from gnomon.models.hf import gpt2_llama
from gnomon.models.transformer import Transformer

_READERS = {"attention": ("query", "key", "value", "qkv"), "mlp": ("gate", "up")}
_HEAD = {"lm_head.weight": "head.weight", "lm_head.bias": "head_bias"}
_TOKENS = ("embed.weight", "head.weight", "head_bias")
_SHAPE = ("layers", "width", "heads", "n_kv_heads", "d_head", "mlp", "d_mlp", "activation", "positions")
_LEAVE = "Leave the model's shape to --init; only the context may be shorter and the vocabulary larger."


def read_settings(source: str) -> dict[str, Any]:
    """Fields of `TransformerConfig` that a checkpoint fixes, its residual among them where it is one of gnomon's.

    Args:
        source: a folder, file or hub id, as `gnomon inspect` takes them.

    Raises:
        UserError: nothing readable there, or a model that gnomon's blocks cannot be.
    """
    return _settings(open_checkpoint(source))


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    values = checkpoint.config
    if values.get("model_type") == "gnomon":
        return {f.name: values[f.name] for f in dataclasses.fields(TransformerConfig) if f.name in values}
    return gpt2_llama.from_hf_config(values)


@torch.no_grad()
def load_pretrained(model: Transformer, source: str) -> dict[str, Any]:
    """Copy the weights of a checkpoint into `model`, whose residual may be another.

    A norm that feeds a sublayer and has no place in the model's residual goes into the matrices behind it: W diag(g), and
    W b into their bias. Norms that only the model has stay as they are. A longer context or a smaller vocabulary of the
    checkpoint fits.

    Returns:
        what was done: `source`, `model_type`, and the names of tensors `loaded`, `folded` (norms put into matrices),
        `dropped` (no place for them) and `fresh` (not in the checkpoint).

    Raises:
        UserError: the checkpoint's model has another shape.
    """
    checkpoint = open_checkpoint(source)
    given = TransformerConfig(**_settings(checkpoint))
    for name in _SHAPE:
        # Some, as the number of heads, would not show in any tensor.
        if getattr(given, name) != getattr(model.config, name):
            theirs, ours = getattr(given, name), getattr(model.config, name)
            raise UserError(f"{source}: {name} is {theirs}, the model's is {ours}. {_LEAVE}")
    tensors = _ours(checkpoint, model.config)
    own = dict(model.named_parameters())
    folded = _fold(tensors, own)
    for name in own.keys() & tensors.keys():
        target, tensor = own[name], tensors[name]
        if name == "positions.weight":
            tensor = tensor[: len(target)]
        rows = len(tensor) if name in _TOKENS else len(target)
        if tensor.shape[1:] != target.shape[1:] or len(tensor) != rows or rows > len(target):
            raise UserError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, the model's is {tuple(target.shape)}. {_LEAVE}"
            )
        target[:rows].copy_(tensor)
    return {
        "source": source,
        "model_type": checkpoint.config.get("model_type"),
        "loaded": sorted(own.keys() & tensors.keys()),
        "folded": folded,
        "dropped": sorted(tensors.keys() - own.keys()),
        "fresh": sorted(own.keys() - tensors.keys()),
    }


def _ours(checkpoint: Checkpoint, config: TransformerConfig) -> dict[str, Tensor]:
    """The checkpoint's tensors under our names, query, key and value fused or split as in `config`."""
    tensors = {name: checkpoint.read(name).float() for name in checkpoint.entries}
    family = checkpoint.config.get("model_type")
    if family != "gnomon":
        return gpt2_llama.from_hf_tensors(tensors, config, str(family))
    # A folder of `save_pretrained` has the wrapper's prefix and its name of the head, a checkpoint of a run has neither.
    ours = {_HEAD.get(name, name.removeprefix("model.")): tensor for name, tensor in tensors.items()}
    return gpt2_llama.match_qkv(ours, config)


def _fold(tensors: dict[str, Tensor], own: Mapping[str, Any]) -> list[str]:
    """Multiply norms without a place in the model into the matrices that read them; returns their names."""
    folded = []
    for name in [name for name in tensors if name.endswith(".before.weight") and name not in own]:
        stem = name.removesuffix(".before.weight")
        block, _, sublayer = stem.rpartition(".join_")
        gain, shift = tensors.pop(name), tensors.pop(f"{stem}.before.bias", None)
        tensors.pop(f"{stem}.before.a", None)
        readers = [f"{block}.{sublayer}.{role}" for role in _READERS[sublayer]]
        for reader in (reader for reader in readers if f"{reader}.weight" in tensors):
            W = tensors[f"{reader}.weight"]
            if shift is not None and f"{reader}.bias" in own:
                tensors[f"{reader}.bias"] = W @ shift + tensors.get(f"{reader}.bias", 0)
            tensors[f"{reader}.weight"] = W * gain
        folded.append(f"{stem}.before")
    if "exit.weight" in tensors and "exit.weight" not in own and "head.weight" in own and "head.weight" in tensors:
        head, gain, shift = tensors["head.weight"], tensors.pop("exit.weight"), tensors.pop("exit.bias", None)
        tensors["head.weight"] = head * gain
        if shift is not None and "head_bias" in own:
            tensors["head_bias"] = head @ shift + tensors.get("head_bias", 0)
        folded.append("exit")
    return folded
