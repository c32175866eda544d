"""The geometry of any model while it runs: `gnomon.Monitor`."""

from __future__ import annotations

from gnomon.lazy import lazy

_EXPORTS = {
    "Monitor": "monitoring",
    "Places": "places",
    "BlockPlace": "places",
    "AttentionPlace": "places",
}

__all__ = [*_EXPORTS]
__getattr__, __dir__ = lazy(__name__, _EXPORTS)
