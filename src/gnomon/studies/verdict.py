"""Rules stated once: when a run diverged or stalled, and when one variant is better than another. No torch here.

A comparison is paired by seed: both variants saw the same batches and, where shapes agree, the same init. Its interval is the
percentile bootstrap of the mean paired difference. With three seeds that interval is nearly the range of the three
differences, so "better" then means: better on every seed, and by more than `NOISE`.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SPIKE = 0.3
"""A run that ends this many nats above its own best validation loss has diverged, though every number is finite."""

STALL = 0.05
"""A run that ends less than this many nats below the entropy of single tokens learned nothing but their frequencies."""

NOISE = 0.01
"""Differences whose mean is smaller (nats) are not called, whatever their interval: rerunning Pre-LN with other seeds moves
its loss by this much even at 125M weights (arXiv 2601.22095: standard deviation 0.0076)."""


@dataclass(frozen=True)
class Verdict:
    """A variant against a baseline. `low` and `high` bound the mean difference; negative is better."""

    word: str
    mean: float
    low: float
    high: float
    pairs: int


def fate(val_losses: Sequence[float], unigram: float, *, finite: bool = True) -> str:
    """How a finished run fared: "diverged", "stalled" or "learned".

    Args:
        val_losses: in the order of the run, nats.
        unigram: entropy of single tokens in the training data, nats.
        finite: False when the run was stopped by a loss or gradient that is not finite.
    """
    if not finite or not val_losses or not math.isfinite(val_losses[-1]):
        return "diverged"
    if val_losses[-1] > min(v for v in val_losses if math.isfinite(v)) + SPIKE:
        return "diverged"
    return "stalled" if val_losses[-1] > unigram - STALL else "learned"


def entropy(counts: Sequence[int]) -> float:
    """Entropy in nats of drawing by these counts: the loss of a model that knows only how frequent each token is."""
    total = sum(counts)
    return -sum(count / total * math.log(count / total) for count in counts if count)


def compare(ours: dict[int, float], theirs: dict[int, float], *, noise: float = NOISE) -> Verdict:
    """Paired by seed; smaller is better.

    Args:
        ours, theirs: seed -> value, finite, for the runs that learned.

    Returns:
        A verdict whose word is "better", "worse", "no difference seen", or "not comparable" with fewer than two pairs.
    """
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if len(differences) < 2:
        mean = differences[0] if differences else math.nan
        return Verdict("not comparable", mean, math.nan, math.nan, len(differences))
    mean = statistics.fmean(differences)
    low, high = bootstrap(differences)
    word = "better" if high < 0 and mean < -noise else "worse" if low > 0 and mean > noise else "no difference seen"
    return Verdict(word, mean, low, high, len(differences))


def bootstrap(values: Sequence[float], share: float = 0.95, draws: int = 10_000) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean; the same draws every time."""
    generator = random.Random(0)
    means = sorted(statistics.fmean(generator.choices(values, k=len(values))) for _ in range(draws))
    edge = int(draws * (1 - share) / 2)
    return means[edge], means[-1 - edge]


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation; NaN for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else math.nan
