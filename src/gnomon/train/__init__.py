"""One run: recipes, presets, the loop. Recipes and presets load without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.lazy import lazy
from gnomon.train.presets import PRESETS, preset
from gnomon.train.recipe import Recipe, from_dict, replace, to_dict

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon.train.loop import train as train

__all__ = ["PRESETS", "Recipe", "from_dict", "preset", "replace", "to_dict", "train"]
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, {"train": "loop"})
