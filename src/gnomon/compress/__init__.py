"""Smaller models out of larger ones. Torch and transformers are imported when the first name is used."""

from __future__ import annotations

from gnomon.lazy import lazy

_EXPORTS = {
    "shorten": "shortening", "Shortened": "shortening",
    "BY": "block_choice",
    "heal": "healing", "Healed": "healing",
}  # fmt: skip

__all__ = list(_EXPORTS)
__getattr__, __dir__ = lazy(__name__, _EXPORTS)
