"""The few numbers of a config that say how fused tensors are cut, whatever the config calls them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAMES = {
    "width": "hidden_size n_embd d_model dim embed_dim width embedding_length",
    "heads": "num_attention_heads n_head num_heads n_heads heads nhead attention_heads attention.head_count",
    "kv_heads": "num_key_value_heads num_kv_heads n_head_kv n_kv_heads kv_heads kv_n_heads "
    "multi_query_group_num attention.head_count_kv",
    "head_dim": "head_dim d_kv kv_channels attention.key_length",
    "latent": "kv_lora_rank attention.kv_lora_rank",
    "value_dim": "v_head_dim",
    "layers": "num_hidden_layers n_layer num_layers n_layers layers block_count",
}
_NESTED = {
    "text": ("text_config", "llm_config", "language_config"),
    "vision": ("vision_config", "visual_config"),
    "audio": ("audio_config",),
    "encoder": ("encoder",),
    "decoder": ("decoder", "text_config"),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Widths and counts of one stack; None where the config is silent."""

    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    latent: int | None = None
    value_dim: int | None = None
    layers: int | None = None


def as_dict(config: Any) -> dict[str, Any]:
    """A plain dict from a dict, a Hugging Face config, a dataclass or an object with attributes."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    if dataclasses.is_dataclass(config):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return dict(getattr(config, "__dict__", {}))


def nested(config: Mapping[str, Any], stack: str) -> dict[str, Any]:
    """The part of a config that speaks of this stack: `text_config`, `vision_config` … or all of it."""
    for key in _NESTED.get(stack.partition("[")[0], ()):
        if config.get(key) is not None:
            return as_dict(config[key])
    return dict(config)


def model_type(config: Mapping[str, Any]) -> str | None:
    """`model_type` of a config.json; "gguf:ARCHITECTURE" of GGUF metadata."""
    architecture = config.get("general.architecture")
    return config.get("model_type") or (f"gguf:{architecture}" if architecture else None)


def read_sizes(config: Mapping[str, Any], stack: str) -> Sizes:
    """The sizes of `stack` (e.g. "text", "decoder") from a config dict or GGUF metadata."""
    forms = [
        f"{stack}_{{}}",
        f"num_{stack}_{{}}",
        "{}",
        "num_{}",
        f"{config.get('general.architecture')}.{{}}",
    ]
    found: dict[str, int | None] = {}
    for field, names in _NAMES.items():
        keys = [form.format(name.removeprefix("num_")) for form in forms for name in names.split()]
        found[field] = next((int(config[key]) for key in keys if _is_count(config.get(key))), None)
    # Falcon and StarCoder say "one key head for all" with a flag, and their count is then to be ignored.
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        found["kv_heads"] = 1
    elif config.get("multi_query") is False and not config.get("new_decoder_architecture"):
        found["kv_heads"] = found.get("heads")
    return Sizes(**found)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
