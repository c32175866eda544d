"""A monitor, its warnings and a run folder in other people's training loops.

    gnomon.integrations.Recorder             a loop of your own: four lines
    gnomon.integrations.TransformersMonitor  transformers.Trainer(callbacks=[…])
    gnomon.integrations.LightningMonitor     lightning.Trainer(callbacks=[…])

All write the folder that `gnomon compare` and the report read: `metrics.jsonl`, `warnings.jsonl`, `settings.json`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.lazy import lazy

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon.integrations.lightning_monitor import LightningMonitor as LightningMonitor
    from gnomon.integrations.recorder import Recorder as Recorder
    from gnomon.integrations.transformers_monitor import TransformersMonitor as TransformersMonitor

_EXPORTS = {
    "Recorder": "recorder",
    "TransformersMonitor": "transformers_monitor",
    "LightningMonitor": "lightning_monitor",
}

if not TYPE_CHECKING:
    __all__ = list(_EXPORTS)
    __getattr__, __dir__ = lazy(__name__, _EXPORTS)
