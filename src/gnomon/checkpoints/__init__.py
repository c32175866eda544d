"""Reading checkpoints of any kind, one tensor at a time: `gnomon.checkpoints.open_checkpoint(source)`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.lazy import lazy

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon.checkpoints.checkpoint import Checkpoint as Checkpoint
    from gnomon.checkpoints.checkpoint import Entry as Entry
    from gnomon.checkpoints.opener import open_checkpoint as open_checkpoint

# Public name -> the module that defines it; torch is imported when the first of them is used.
_EXPORTS = {"open_checkpoint": "opener", "Checkpoint": "checkpoint", "Entry": "checkpoint"}

if not TYPE_CHECKING:
    __all__ = list(_EXPORTS)
    __getattr__, __dir__ = lazy(__name__, _EXPORTS)
