"""Ctrl-C and `kill`: a run asked to stop saves first."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """While open, the first SIGINT or SIGTERM only makes the yielded function say True; a second one interrupts at once."""
    seen: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        print("\nstopping after this step; press again to stop now", file=sys.stderr)

    old = {}
    # Only the main thread may install handlers; elsewhere the caller's stay in force.
    with contextlib.suppress(ValueError):
        old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)
