"""Where metrics go besides `metrics.jsonl`: tensorboard, wandb, trackio.

A sink is anything with `write(record)` and `close()`. Sinks watch a run and are no part of it: they are not in the
recipe, a resumed run may have others, and none of them can stop it. The first exception of a sink is told, the sink is
dropped, and `metrics.jsonl` goes on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gnomon.errors import UserError, check_name


class Sink(Protocol):
    """One place that metrics go to."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record of `metrics.jsonl`: `step` and any of numbers, lists and tables of numbers."""

    def close(self) -> None:
        """Send what is still held back."""


class Sinks:
    """Several sinks as one; the exceptions of each are caught, told once, and end that sink alone.

    Args:
        names: of `SINKS`.
        folder: of the run; its name is the run's name.
        settings: of the run, plain values; they go to sinks that keep settings.
        step: of the last record there is, -1 where there is none. What a killed process logged after its last checkpoint comes
            once more: tensorboard replaces it, wandb and trackio keep what they have (on CPU the same numbers).

    Raises:
        UserError: a name is unknown, or its package is missing; both before any sink is opened.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any], step: int = 0):
        check_sinks(names)
        self._open: dict[str, Sink] = {}
        for name in dict.fromkeys(names):
            with self._guarded(name):
                self._open[name] = SINKS[name](folder, settings, step)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, sink in list(self._open.items()):
            with self._guarded(name):
                sink.write(record)

    def close(self) -> None:
        for name, sink in list(self._open.items()):
            with self._guarded(name):
                sink.close()
        self._open.clear()

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        # SystemExit too: a client that cannot log in may exit. Ctrl-C stays the user's.
        except (Exception, SystemExit) as error:
            self._open.pop(name, None)
            print(
                f"\nthe sink {name!r} failed and gets no more metrics ({type(error).__name__}: {error}); "
                "the run goes on, and metrics.jsonl has everything",
                file=sys.stderr,
            )


def check_sinks(names: Sequence[str]) -> None:
    """UserError where a name is unknown or its package is not installed."""
    for name in names:
        package = getattr(SINKS[check_name("sink", name, SINKS)], "package", None)
        if package is not None and not importlib.util.find_spec(package):
            raise UserError(f'the sink {name!r} needs a package that is not installed: pip install {package}, or "gnomon[track]"')


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a record by path, `step` left out: {"angle": [a, b]} gives angle/0 and angle/1."""
    for key, value in record.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from scalars(value, f"{path}/")
        elif isinstance(value, (list, tuple)):
            yield from scalars({str(i): item for i, item in enumerate(value)}, f"{path}/")
        elif (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and path != "step"
        ):
            yield path, float(value)


class TensorBoard:
    """Event files in `FOLDER/tensorboard`; look with `tensorboard --logdir runs`."""

    package = "tensorboard"

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of the project "gnomon"; its own environment variables (WANDB_PROJECT, WANDB_MODE=offline …) hold."""

    package = "wandb"

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int):
        import wandb  # pyright: ignore[reportMissingImports]

        # The id is kept beside the run: a resumed run continues its curves, and a namesake elsewhere has its own.
        id_file = folder / "wandb-id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8), encoding="utf-8")
        self._run = wandb.init(
            project=_project("WANDB_PROJECT"),
            name=folder.name,
            id=id_file.read_text(encoding="utf-8").strip(),
            dir=str(folder),
            config=dict(settings),
            resume="allow",
        )

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(record)), step=record["step"])

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of the project "gnomon" (or TRACKIO_PROJECT); look with `trackio show`."""

    package = "trackio"

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int):
        import trackio  # pyright: ignore[reportMissingImports]

        self._module = trackio
        trackio.init(project=_project("TRACKIO_PROJECT"), name=folder.name, config=dict(settings), resume="allow")

    def write(self, record: Mapping[str, Any]) -> None:
        self._module.log(dict(scalars(record)), step=record["step"])

    def close(self) -> None:
        self._module.finish()


def _project(variable: str) -> str:
    return os.environ.get(variable, "gnomon")


# A sink of your own is a line here: made with (run folder, settings, step of the last record), after which the run goes on.
SINKS: dict[str, Callable[[Path, Mapping[str, Any], int], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
