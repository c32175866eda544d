"""Continuity across depth: how leading singular directions run from layer to layer."""

from __future__ import annotations

from gnomon.lazy import lazy

# Public name -> the module that defines it; torch is imported when the first of them is used.
_EXPORTS = {
    "inspect": "inspector",
    "Report": "report",
    "Tracker": "tracker",
}

__all__ = list(_EXPORTS)
__getattr__, __dir__ = lazy(__name__, _EXPORTS)
