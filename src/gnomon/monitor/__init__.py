"""The geometry of any model while it runs: `gnomon.Monitor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.lazy import lazy

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon.monitor.monitoring import Monitor as Monitor
    from gnomon.monitor.places import AttentionPlace as AttentionPlace
    from gnomon.monitor.places import BlockPlace as BlockPlace
    from gnomon.monitor.places import Places as Places

_EXPORTS = {
    "Monitor": "monitoring",
    "Places": "places",
    "BlockPlace": "places",
    "AttentionPlace": "places",
}

if not TYPE_CHECKING:
    __all__ = [*_EXPORTS]
    __getattr__, __dir__ = lazy(__name__, _EXPORTS)
