"""Progress with rate and ETA: a live line on a terminal, a plain line now and then, ever more rarely, anywhere else."""

from __future__ import annotations

import os
import shutil
import sys
import time

from gnomon.errors import printable


def duration(seconds: float) -> str:
    """`75` -> `1:15`, `4000` -> `1:06:40`."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def quantity(value: float, unit: str = "") -> str:
    """`1234567` -> `1.23M`; with a unit, `1.23 MB`."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {letter}{unit}" if unit else f"{value / factor:.3g}{letter}"
    return f"{value:.3g} {unit}".rstrip()


def tell(text: str) -> None:
    """A line for the user beside the output of a command."""
    print(printable(text), file=sys.stderr, flush=True)


class Progress:
    """Counts work done and tells how long the rest will take.

    >>> with Progress("reading", total=bytes_in_all, unit="B") as progress:
    ...     progress.advance(len(block), note="shard 3 of 8")

    Args:
        what: the verb shown first.
        total: amount of work in `unit`s; None when unknown (then there is no ETA).
        unit: short unit of the amount, e.g. "B" or "tok".
        done: amount already done before this process started (resumed work); the rate leaves it out.
        every: seconds until the first plain line when stderr is not a terminal; from then on a line whenever a tenth
            more time has gone by.
    """

    def __init__(self, what: str, total: float | None, unit: str = "", done: float = 0, every: float = 15.0):
        self.what: str = what
        self.total: float | None = total
        self.unit: str = unit
        self.done: float = done
        self._done_before = done
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._coloured = self._live and not os.environ.get("NO_COLOR")
        self._every = 0.1 if self._live else every
        self._warning = ""
        self._start = self._shown = time.monotonic()
        self._width = 0

    def advance(self, amount: float, note: str = "") -> None:
        self.done += amount
        now = time.monotonic()
        if now - self._shown >= (self._every if self._live else max(self._every, 0.1 * (now - self._start))):
            self._shown = now
            self._show(note)

    def warn(self, text: str) -> None:
        """A line that stays, above the live one; until the next it also stands at the end of that."""
        self.close()
        print(f"\x1b[33m{printable(text)}\x1b[0m" if self._coloured else printable(text), file=sys.stderr, flush=True)
        self._warning = printable(text).partition("\n")[0]

    def line(self, note: str = "") -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = (self.done - self._done_before) / seconds
        parts = [self.what]
        if self.total:
            parts.append(f"{100 * self.done / self.total:3.0f} %")
        parts.append(f"{quantity(self.done, self.unit)}")
        parts.append(f"{quantity(rate, self.unit)}/s")
        if self.total and rate > 0:
            parts.append(f"ETA {duration(max(self.total - self.done, 0) / rate)}")
        return printable("  ".join(parts + ([note] if note else [])))

    def _show(self, note: str) -> None:
        line = self.line(note)
        if self._live:
            # A line wider than the terminal would wrap, and "\r" come back to its last row only.
            room = shutil.get_terminal_size().columns - 1
            line = line[:room]
            warning = f"  ! {self._warning}"[: room - len(line)] if self._warning else ""
            # Pad with blanks so that a shorter line covers the longer one before it.
            blank = " " * max(self._width - len(line) - len(warning), 0)
            self._width = len(line) + len(warning)
            if self._coloured and warning:
                warning = f"\x1b[33m{warning}\x1b[0m"
            print("\r" + line + warning + blank, end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live and self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
