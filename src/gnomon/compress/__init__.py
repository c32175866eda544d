"""Smaller models out of larger ones. Torch and transformers are imported when the first name is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.lazy import lazy

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon.compress.best_mixture import Mixture as Mixture
    from gnomon.compress.best_mixture import auto as auto
    from gnomon.compress.block_choice import BY as BY
    from gnomon.compress.compressing import Compressed as Compressed
    from gnomon.compress.compressing import compress as compress
    from gnomon.compress.group_choice import GROUPS as GROUPS
    from gnomon.compress.healing import Healed as Healed
    from gnomon.compress.healing import heal as heal
    from gnomon.compress.merging import MERGED_BY as MERGED_BY
    from gnomon.compress.methods import METHODS as METHODS
    from gnomon.compress.shared_basis import SIDES as SIDES
    from gnomon.compress.shortening import Shortened as Shortened
    from gnomon.compress.shortening import shorten as shorten

_EXPORTS = {
    "shorten": "shortening", "Shortened": "shortening",
    "BY": "block_choice", "MERGED_BY": "merging",
    "auto": "best_mixture", "Mixture": "best_mixture",
    "heal": "healing", "Healed": "healing",
    "compress": "compressing", "Compressed": "compressing",
    "METHODS": "methods", "GROUPS": "group_choice", "SIDES": "shared_basis",
}  # fmt: skip

if not TYPE_CHECKING:
    __all__ = list(_EXPORTS)
    __getattr__, __dir__ = lazy(__name__, _EXPORTS)
