"""Timing side by side: the contestants run in turn, so that a drifting machine slows them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def side_by_side(
    contestants: dict[str, Callable[[], object]], rounds: int = 7, warmup: int = 2, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, A B C, A B C, … after `warmup` rounds that are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round in range(warmup + rounds):
        for name, run in contestants.items():
            start = clock()
            run()
            if round >= warmup:
                seconds[name].append(clock() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, baseline: str) -> float:
    """Median over rounds of the paired ratio name / baseline."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[baseline]))


def median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)
