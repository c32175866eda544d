"""What the studies share: how a recipe gets a scale's size, and the grids of learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.studies.study import Variant
from gnomon.train import Recipe, preset, replace

RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "tiny": {"adamw": (2e-3, 4e-3, 8e-3), "muon": (0.02, 0.04, 0.08)},
    "small": {"adamw": (1e-3, 2e-3, 4e-3), "muon": (0.01, 0.02, 0.04)},
    "paper": {"adamw": (6e-4,), "muon": (0.02,)},
}
"""Learning rates by scale: of everything under AdamW, of the matrices under Muon and its kin."""


def rates_for(scale: str, assignment: str) -> tuple[float, ...]:
    return RATES[scale]["adamw" if assignment == "adamw" else "muon"]


def sized(scale: str, paper: str, method: tuple[str, str], tiny: Mapping[str, Any], small: Mapping[str, Any]) -> Recipe:
    """The preset "tiny" changed by `tiny`, the paper's preset changed by `small`, or that as it is.

    Args:
        method: residual and assignment, as `gnomon.train.preset` takes them.
    """
    recipe = preset("tiny" if scale == "tiny" else paper, *method)
    return replace(recipe, {"tiny": tiny, "small": small, "paper": {}}[scale], shared=True)


def contestant(name: str, recipe: Recipe, rates: tuple[float, ...], baseline: str, group: str) -> Variant:
    """A variant; the one that is the baseline has none itself."""
    return Variant(name, recipe, rates, None if name == baseline else baseline, group)
