"""The learning rate at a step, as a fraction of its peak: a pure function."""

from __future__ import annotations

import math

from gnomon.train.recipe import ScheduleConfig


def ratio(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """The factor for update number `step` (from 0) of `steps`.

    Linear warm-up to 1 over `warmup` steps; then "cosine" falls to `floor` along half a cosine, "wsd" stays at 1 and
    falls linearly to `floor` over the last `decay` of the run, "constant" stays.
    """
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.name == "constant":
        return 1.0
    start = schedule.warmup if schedule.name == "cosine" else max(schedule.warmup, round(steps * (1 - schedule.decay)))
    done = min(max(step - start, 0) / max(steps - 1 - start, 1), 1.0)
    fall = (1 - math.cos(math.pi * done)) / 2 if schedule.name == "cosine" else done
    return 1 - (1 - schedule.floor) * fall
