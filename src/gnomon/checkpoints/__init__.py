"""Reading checkpoints of any kind, one tensor at a time: `gnomon.checkpoints.open_checkpoint(source)`."""

from __future__ import annotations

from gnomon.lazy import lazy

# Public name -> the module that defines it; torch is imported when the first of them is used.
_EXPORTS = {"open_checkpoint": "opener", "Checkpoint": "checkpoint", "Entry": "checkpoint"}

__all__ = list(_EXPORTS)
__getattr__, __dir__ = lazy(__name__, _EXPORTS)
