"""Continuity across depth: how leading singular directions run from layer to layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.lazy import lazy

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon.continuity.inspector import inspect as inspect
    from gnomon.continuity.report import Report as Report
    from gnomon.continuity.tracker import Tracker as Tracker

# Public name -> the module that defines it; torch is imported when the first of them is used.
_EXPORTS = {
    "inspect": "inspector",
    "Report": "report",
    "Tracker": "tracker",
}

if not TYPE_CHECKING:
    __all__ = list(_EXPORTS)
    __getattr__, __dir__ = lazy(__name__, _EXPORTS)
