"""A run folder for a loop that is not ours: measured by a monitor, written line by line, warned of."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gnomon.diagnosis import RunWarning
from gnomon.errors import UserError
from gnomon.files import write_json
from gnomon.monitor import Monitor
from gnomon.run_folder import RECIPE, SETTINGS
from gnomon.train.run_writer import Metrics, write_environment
from gnomon.train.sinks import Sinks, check_sinks

Tell = Callable[[RunWarning], object]
"""Gets each warning when it begins."""


def tell(warning: RunWarning) -> None:
    """Print a warning on standard error, remarks left out."""
    if warning.level == "warning":
        print(f"\n{warning}", file=sys.stderr)


class Recorder(contextlib.AbstractContextManager["Recorder"]):
    """Measures a run, writes its folder, and tells warnings when they begin.

    >>> with gnomon.integrations.Recorder(model, "runs/mine", every=50) as recorder:
    ...     for step, batch in enumerate(batches, 1):
    ...         loss = model.loss(batch)
    ...         loss.backward()
    ...         recorder.before_step(step)                        # after backward, before clipping and the optimizer
    ...         optimizer.step(); optimizer.zero_grad()
    ...         recorder.after_step(step, loss=loss, lr=rate)     # and whatever else you know: a number, or a tensor of one

    `gnomon compare runs/mine …` draws it. What a step reports is read (which waits for the device) at logged steps only.

    Args:
        model: any that `gnomon.Monitor` takes.
        folder: of the run; one that holds records goes on after `step`, and later records are dropped.
        every: steps between two measurements.
        log_every: steps between two lines of `metrics.jsonl`; measured steps always have one.
        step: how far the run is.
        sinks: where records go besides: names of `gnomon.train.sinks.SINKS`.
        settings: of the run, plain values, for the report and for sinks.
        tell: gets each warning when it begins.
        writes: False in processes other than the first, which only measure.
        options: the monitor's own.

    Raises:
        UserError: the folder is that of a `gnomon train` run, or a sink is unknown or not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        every: int = 50,
        *,
        log_every: int = 10,
        step: int = 0,
        sinks: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        tell: Tell = tell,
        writes: bool = True,
        **options: Any,
    ):
        folder = Path(folder)
        check_sinks(sinks)
        if (folder / RECIPE).exists():
            raise UserError(f"{folder} is a run of `gnomon train`, which writes its own records; give another folder")
        self.monitor: Monitor = Monitor(model, every=every, **options)
        self._log_every, self._tell, self._measured = log_every, tell, dict[str, Any]()
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / SETTINGS, dict(settings or {}))
            write_environment(folder, parameters=sum(p.numel() for p in model.parameters()))
        outlets = Sinks(sinks, folder, settings or {}, step) if writes else None
        self._metrics = Metrics(folder, step, outlets, writes=writes)

    @property
    def warnings(self) -> list[RunWarning]:
        """Those that hold now, remarks after warnings."""
        return self._metrics.diagnosis.holding

    def before_step(self, step: int) -> None:
        """Call between backward and the optimizer, before gradients are clipped."""
        self._measured = self.monitor.before_step(step)

    def after_step(self, step: int, **known: float | Tensor | None) -> list[RunWarning]:
        """Call after the optimizer; writes a record where one is due.

        Args:
            known: what the loop knows of this step: `loss` (nats a token), `lr`, `grad_norm`, `val_loss`, `tokens`, `unigram` (the
                entropy of single tokens, once), or anything else; None for what it does not know.

        Returns: the warnings that begin here.
        """
        self.measure(step)
        return self.write(step, **known)

    def measure(self, step: int) -> None:
        """The first half of `after_step`, for a trainer that knows the loss of a step only later."""
        self._measured |= self.monitor.after_step(step)

    def write(self, step: int, **known: float | Tensor | None) -> list[RunWarning]:
        """The second half."""
        measured, self._measured = self._measured, {}
        if not measured and step % self._log_every and known.get("val_loss") is None:
            return []
        given = {key: value.item() if isinstance(value, Tensor) else float(value) for key, value in known.items() if value is not None}
        begun = self._metrics.write({"step": step, **given, **measured})
        for warning in begun:
            self._tell(warning)
        return begun

    def close(self) -> None:
        """Close the file and the sinks. Leaving the `with` block does it."""
        self._metrics.close()

    def __exit__(self, *_: object) -> None:
        self.close()
