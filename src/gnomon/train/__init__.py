"""One run: recipes, presets, the loop. Recipes and presets load without torch."""

from __future__ import annotations

from typing import Any

from gnomon.train.presets import PRESETS, preset
from gnomon.train.recipe import Recipe, from_dict, replace, to_dict

__all__ = ["PRESETS", "Recipe", "from_dict", "preset", "replace", "to_dict", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":
        from gnomon.train.loop import train

        return train
    raise AttributeError(f"module 'gnomon.train' has no attribute {name!r}")
