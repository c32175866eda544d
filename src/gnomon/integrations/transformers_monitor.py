"""A callback for transformers' Trainer. Needs `pip install "gnomon[hf]"`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon.errors import UserError
from gnomon.integrations.recorder import Recorder, Tell, tell

try:
    from transformers import TrainerCallback
except ImportError as _error:
    raise UserError('TransformersMonitor needs transformers: pip install "gnomon[hf]"') from _error

# What Trainer logs, by our names.
_NAMES = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "eval_loss": "val_loss", "num_input_tokens_seen": "tokens"}


class TransformersMonitor(TrainerCallback):
    """Watches the model of a `transformers.Trainer` and writes a run folder beside its checkpoints.

    >>> Trainer(model, args, train_dataset=…, callbacks=[gnomon.integrations.TransformersMonitor(every=50)])

    Trainer clips gradients before it calls anybody, so gradient norms by matrix are after clipping; `grad_norm`, which it logs, is
    before. What it logs is written at the step it logs it for. Trainer's own `report_to` stays as it is.

    Args:
        folder: of the run; OUTPUT_DIR/gnomon for None.
        every: steps between two measurements.
        sinks, tell, options: as of `Recorder`.
    """

    recorder: Recorder  # from the start of training on

    def __init__(self, folder: str | Path | None = None, every: int = 50, *, sinks: Sequence[str] = (), tell: Tell = tell, **options: Any):
        self.folder: str | Path | None = folder
        self.every: int = every
        self.sinks: Sequence[str] = sinks
        self.tell: Tell = tell
        self.options: dict[str, Any] = options
        self._step, self._known = 0, dict[str, float]()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Open the run folder."""
        self.recorder = Recorder(
            model, self.folder or Path(args.output_dir) / "gnomon", self.every, log_every=1, step=state.global_step,
            sinks=self.sinks, settings=args.to_sanitized_dict(), tell=self.tell, writes=state.is_world_process_zero, **self.options,
        )  # fmt: skip

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the step before, which Trainer has logged by now."""
        self._write()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the gradients."""
        self.recorder.before_step(state.global_step + 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the weights."""
        self._step = state.global_step + 1
        self.recorder.measure(self._step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep what Trainer logs for the record of its step."""
        self._known |= {ours: logs[theirs] for theirs, ours in _NAMES.items() if theirs in (logs or {})}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the last step, and close the folder."""
        self._write()
        self.recorder.close()

    def _write(self) -> None:
        """Write the last step: Trainer logs a step after it has ended, so its record waits for the next one to begin."""
        if self._step:
            self.recorder.write(self._step, **self._known)
        self._step, self._known = 0, {}
