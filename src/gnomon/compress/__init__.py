"""Smaller models out of larger ones. Torch and transformers are imported when the first name is used."""

from __future__ import annotations

from gnomon.lazy import lazy

_EXPORTS = {
    "shorten": "shortening", "Shortened": "shortening",
    "BY": "block_choice",
    "heal": "healing", "Healed": "healing",
    "compress": "compressing", "Compressed": "compressing",
    "METHODS": "methods", "GROUPS": "group_choice", "SIDES": "shared_basis",
}  # fmt: skip

__all__ = list(_EXPORTS)
__getattr__, __dir__ = lazy(__name__, _EXPORTS)
