"""The settings of a gnomon model as transformers reads and writes them: `config.json`, model type "gnomon"."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from gnomon.files import restored, spelled
from gnomon.models.config import TransformerConfig

# transformers makes a config without arguments to learn the defaults.
_SMALLEST: dict[str, Any] = dict(vocab_size=257, context=128, layers=1, heads=1, width=64)


def _worked_out(name: str, meaning: str) -> property:
    """A setting that may be left open: stored as it was given, read as the number it means."""

    def meant(self: GnomonConfig) -> int:
        return getattr(self.settings(), meaning)

    return property(meant, lambda self, value: vars(self).__setitem__(name, value))


class GnomonConfig(PreTrainedConfig):
    """Every field of `TransformerConfig` under its own name, and the common ones under transformers' names as well.

    Args:
        use_cache: let `generate` keep keys and values.
        values: fields of `TransformerConfig`, and whatever `PreTrainedConfig` takes.

    Raises:
        UserError: a setting is out of range.
    """

    model_type = "gnomon"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    attribute_map = {
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "mlp_width",
        "max_position_embeddings": "context",
        "tie_word_embeddings": "tied",
        "initializer_range": "init_std",
    }
    kv_heads = _worked_out("kv_heads", "n_kv_heads")
    head_dim = _worked_out("head_dim", "d_head")
    mlp_width = _worked_out("mlp_width", "d_mlp")

    def __init__(self, use_cache: bool = True, **values: Any):
        values = {self.attribute_map.get(key, key): value for key, value in values.items()}
        names = [field.name for field in dataclasses.fields(TransformerConfig)]
        given = {name: values.pop(name) for name in names if name in values}
        for name, value in dataclasses.asdict(_settings(_SMALLEST | given)).items():
            setattr(self, name, spelled(value))
        self.use_cache = use_cache
        if self._auto_class is None:
            # The code beside the weights was not asked, and would not be there when this model is saved elsewhere.
            values.pop("auto_map", None)
        super().__init__(**values)

    def settings(self) -> TransformerConfig:
        """The model's own settings."""
        return _settings(self._own())

    def to_diff_dict(self) -> dict[str, Any]:
        # Settings at their default are written too: other readers of config.json do not know our defaults.
        return super().to_diff_dict() | self._own()

    def _own(self) -> dict[str, Any]:
        return {field.name: vars(self)[field.name] for field in dataclasses.fields(TransformerConfig)}


def _settings(values: dict[str, Any]) -> TransformerConfig:
    """From plain JSON values."""
    return TransformerConfig(**values | {"residual_options": restored(values.get("residual_options") or {})})
