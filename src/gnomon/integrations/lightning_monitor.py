"""A callback for Lightning's Trainer. Needs `pip install lightning`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon.errors import UserError
from gnomon.integrations.recorder import Recorder, tell

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise UserError("LightningMonitor needs lightning: pip install lightning") from error
