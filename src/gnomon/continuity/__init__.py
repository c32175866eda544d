"""Continuity across depth: how leading singular directions run from layer to layer."""

from __future__ import annotations

import importlib
from typing import Any

# Public name -> the module that defines it; torch is imported when the first of them is used.
_EXPORTS = {
    "inspect": "inspector",
    "Report": "report",
    "Tracker": "tracker",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'gnomon.continuity' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gnomon.continuity.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
