"""Reading checkpoints of any kind, one tensor at a time: `gnomon.checkpoints.open_checkpoint(source)`."""

from __future__ import annotations

import importlib
from typing import Any

# Public name -> the module that defines it; torch is imported when the first of them is used.
_EXPORTS = {"open_checkpoint": "opener", "Checkpoint": "checkpoint", "Entry": "checkpoint"}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'gnomon.checkpoints' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gnomon.checkpoints.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
