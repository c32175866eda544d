"""A callback for Lightning's Trainer. Needs `pip install lightning`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gnomon.errors import UserError
from gnomon.integrations.recorder import Recorder, Tell, tell

try:
    from lightning.pytorch import Callback
except ImportError as _error:
    raise UserError("LightningMonitor needs lightning: pip install lightning") from _error


class LightningMonitor(Callback):
    """Watches a LightningModule with one optimizer and writes a run folder.

    >>> lightning.Trainer(callbacks=[gnomon.integrations.LightningMonitor(every=50)])

    Gradients are seen before Lightning clips them. Records hold the loss of the last micro-batch, what the module logs
    (`self.log("val_loss", …)`), and the rate.

    Args:
        folder: of the run; DEFAULT_ROOT_DIR/gnomon for None.
        every: steps between two measurements.
        log_every, sinks, tell, options: as of `Recorder`.
    """

    recorder: Recorder  # from the start of training on

    def __init__(
        self, folder: str | Path | None = None, every: int = 50, *, log_every: int = 10, sinks: Sequence[str] = (), tell: Tell = tell,
        **options: Any,
    ):  # fmt: skip
        super().__init__()
        self.folder: str | Path | None = folder
        self.every: int = every
        self.log_every: int = log_every
        self.sinks: Sequence[str] = sinks
        self.tell: Tell = tell
        self.options: dict[str, Any] = options

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Open the run folder."""
        self._step = trainer.global_step
        self.recorder = Recorder(
            module, self.folder or Path(trainer.default_root_dir) / "gnomon", self.every, log_every=self.log_every, step=self._step,
            sinks=self.sinks, settings=_plain(module.hparams), tell=self.tell, writes=trainer.is_global_zero, **self.options,
        )  # fmt: skip

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Look at the gradients."""
        self.recorder.before_step(trainer.global_step + 1)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After an update: look at the weights, and write the step."""
        # Micro-batches that are only accumulated end here too.
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        logged = {name: value for name, value in trainer.callback_metrics.items() if name != "loss" and value.numel() == 1}
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.recorder.after_step(self._step, **logged, loss=loss, lr=rate)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Close the run folder."""
        self.recorder.close()


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that JSON has a word for."""
    return {name: value if isinstance(value, (bool, int, float, str, type(None))) else str(value) for name, value in settings.items()}
