"""Rules stated once: when a run diverged or stalled, and when one variant is better than another. No torch here.

A comparison is paired by seed: both variants saw the same batches and, where shapes agree, the same init. It is Student's t test
of the mean difference, two-sided at `LEVEL`. A study makes many comparisons, so its p-values are corrected by Holm's step-down
rule (Scand. J. Statist. 6, 1979): if nothing differed, at most one study in twenty would call anything.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

SPIKE = 0.3
"""A run that ends this many nats above its own best validation loss has diverged, though every number is finite."""

STALL = 0.05
"""A run that ends less than this many nats below the entropy of single tokens learned nothing but their frequencies."""

NOISE = 0.01
"""Differences whose mean is smaller (nats) are not called, whatever their p: rerunning Pre-LN with other seeds moves
its loss by this much even at 125M weights (arXiv 2601.22095: standard deviation 0.0076)."""

LEVEL = 0.05
"""How often a study in which nothing differs may call a difference."""

FALSE_CALLS = 0.046
"""How often it did, simulated: 20 variants and one baseline that do not differ, three seeds, normal with standard deviation 0.03."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Verdict:
    """A variant against a baseline; negative is better. `low` and `high` are the 95 % t interval of the mean difference for this
    comparison alone; `p` is corrected for all comparisons it was made with, and decides the word."""

    word: str
    mean: float
    low: float
    high: float
    p: float
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


def compare(pairs: Mapping[Key, Sequence[float]], *, noise: float = NOISE) -> dict[Key, Verdict]:
    """Every comparison of a study at once.

    Args:
        pairs: comparison -> differences, one a seed, finite; smaller is better.

    Returns:
        Verdicts whose word is "better", "worse", "no difference seen", or "not comparable" with fewer than two pairs (those are
        not counted among the comparisons).
    """
    counted = {key: found for key, found in pairs.items() if len(found) > 1}
    corrected = dict(zip(counted, holm([paired_p(found) for found in counted.values()])))
    return {key: _verdict(found, corrected.get(key, math.nan), noise) for key, found in pairs.items()}


def _verdict(differences: Sequence[float], p: float, noise: float) -> Verdict:
    if len(differences) < 2:
        return Verdict("not comparable", differences[0] if differences else math.nan, math.nan, math.nan, p, len(differences))
    mean = statistics.fmean(differences)
    half = t_quantile(0.95, len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    called = p < LEVEL and abs(mean) > noise
    word = ("better" if mean < 0 else "worse") if called else "no difference seen"
    return Verdict(word, mean, mean - half, mean + half, p, len(differences))


def paired_p(differences: Sequence[float]) -> float:
    """Two-sided p of Student's t test that the mean difference is zero, for this comparison alone."""
    mean, spread = statistics.fmean(differences), statistics.stdev(differences)
    if spread == 0:
        # Equal on every seed: the same model, or a shift that no seed disturbs.
        return 0.0 if mean else 1.0
    return max(0.0, 1 - t_inside(abs(mean) / spread * math.sqrt(len(differences)), len(differences) - 1))


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected for their number: the smallest times n, the next times n - 1, …, never falling, at most 1."""
    corrected, floor = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        floor = corrected[place] = max(floor, min(1.0, ps[place] * (len(ps) - rank)))
    return corrected


def t_inside(t: float, df: int) -> float:
    """Probability that Student's t with `df` degrees of freedom lies between -t and t: the finite sums of Abramowitz and
    Stegun 26.7.3 and 26.7.4, exact for whole numbers."""
    angle = math.atan(t / math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = df % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, df, 2):
        total += term
        term *= k / (k + 1) * cosine**2
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@functools.cache
def t_quantile(share: float, df: int) -> float:
    """The t between whose negative and itself lies this share: 4.303 for 0.95 and two degrees of freedom."""
    low, high = 0.0, 1.0
    while t_inside(high, df) < share:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_inside(middle, df) < share else (low, middle)
    return high


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation; NaN for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else math.nan
