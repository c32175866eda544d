"""Named recipes. A preset is a function that returns a complete recipe; nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gnomon.errors import check_name
from gnomon.models import config as models
from gnomon.train import evidence, recommend
from gnomon.train.recipe import ComputeConfig, DataConfig, OptimConfig, Recipe, ScheduleConfig, WatchConfig, replace

BASELINE = ("pre-norm", "adamw")
"""Residual and assignment of most published models."""

RECOMMENDED = ("proj-spheret", "muon")
"""The pair that won `gnomon study recipe` (docs/results/recipe.md)."""


def optim(assignment: str, lr: float, adamw_lr: float) -> OptimConfig:
    """AdamW, torch's Muon, or ManifoldMuon with one of its assignments, by one name."""
    check_name("assignment", assignment, ASSIGNMENTS)
    if assignment == "adamw":
        return OptimConfig(name="adamw", lr=lr)
    if assignment == "muon":
        return OptimConfig(name="muon", lr=lr, adamw_lr=adamw_lr)
    return OptimConfig(name="manifold-muon", assignment=assignment, lr=lr, adamw_lr=adamw_lr)


def tiny(residual: str = "pre-norm", assignment: str = "adamw") -> Recipe:
    """Byte-level, 1.9M weights, the embedded corpus: about a minute and a half on two CPU cores.

    Learning rates are tuned on seeds that comparisons do not use (docs/log.md, docs/results); pairs of residual and optimizer
    that were not tuned get 4e-3 under AdamW and 0.02 otherwise.
    """
    return Recipe(
        name="tiny",
        steps=300,
        model=models.tiny(residual=residual),
        data=DataConfig(batch=16),
        optim=optim(
            assignment, TINY_LR.get((residual, assignment), 4e-3 if assignment == "adamw" else 0.02), adamw_lr=4e-3
        ),
        schedule=ScheduleConfig(warmup=30),
        watch=WatchConfig(eval_every=50, probe_every=50, save_every=100, keep=3),
    )


ASSIGNMENTS = (
    "adamw", "muon", "none", "stiefel", "dgram", "hetero", "hetero-inv", "sphere", "spectral-ball", "spectral-sphere", "auto",
    "qk-ball",
)  # fmt: skip

TINY_LR = {
    ("pre-norm", "adamw"): 4e-3,
    ("proj-spheret", "adamw"): 4e-3,
    # With half the batch: `gnomon study manifolds`.
    ("pre-norm", "muon"): 0.08,
    ("pre-norm", "none"): 0.08,
    ("pre-norm", "stiefel"): 0.08,
    ("pre-norm", "dgram"): 0.04,
    ("pre-norm", "hetero"): 0.08,
    ("pre-norm", "hetero-inv"): 0.04,
    # On a narrower model: `gnomon study recipe`.
    ("proj-spheret", "muon"): 0.02,
    ("proj-spheret", "hetero"): 0.04,
}


def _gpt2(size: str, lr: float, residual: str, assignment: str) -> Recipe:
    """The papers' settings where stated (arXiv 2606.13276: 65,536 tokens a step, warm-up 1000, cosine to a tenth,
    bf16); nanoGPT's learning rates."""
    return Recipe(
        name=f"gpt2-{size}",
        steps=50_000,
        model=models.gpt2(size, residual=residual),
        data=DataConfig(train="data/openwebtext", tokenizer="gpt2", batch=64),
        optim=optim(assignment, lr if assignment == "adamw" else 0.02, adamw_lr=lr),
        schedule=ScheduleConfig(warmup=1000),
        compute=ComputeConfig(precision="bf16", compile=True),
        watch=WatchConfig(log_every=10, eval_every=1000, eval_tokens=1 << 20, probe_every=500, save_every=1000),
    )


def gpt2_small(residual: str = "pre-norm", assignment: str = "adamw") -> Recipe:
    """GPT-2 small, 124M weights, 3.28 billion tokens of OpenWebText."""
    return _gpt2("small", 6e-4, residual, assignment)


def gpt2_medium(residual: str = "pre-norm", assignment: str = "adamw") -> Recipe:
    """GPT-2 medium, 355M weights."""
    return _gpt2("medium", 3e-4, residual, assignment)


def gpt2_large(residual: str = "pre-norm", assignment: str = "adamw") -> Recipe:
    """GPT-2 large, 774M weights."""
    return _gpt2("large", 2.5e-4, residual, assignment)


def llama_34m(residual: str = "pre-norm", assignment: str = "adamw") -> Recipe:
    """The 8-layer Llama of arXiv 2605.04971: 10,000 steps of 128 x 128 tokens of WikiText-103."""
    return Recipe(
        name="llama-34m",
        steps=10_000,
        model=models.llama_34m(residual=residual),
        data=DataConfig(train="data/wikitext-103", tokenizer="gpt2", batch=128),
        optim=optim(assignment, 1e-3 if assignment == "adamw" else 0.02, adamw_lr=1e-3),
        schedule=ScheduleConfig(warmup=500),
        watch=WatchConfig(log_every=10, eval_every=500, eval_tokens=1 << 17, probe_every=500, save_every=1000),
    )


PRESETS: dict[str, Callable[..., Recipe]] = {
    "tiny": tiny,
    "gpt2-small": gpt2_small,
    "gpt2-medium": gpt2_medium,
    "gpt2-large": gpt2_large,
    "llama-34m": llama_34m,
}


def preset(name: str, residual: str | None = None, assignment: str | None = None, *, measured: bool = False) -> Recipe:
    """The recipe of a preset.

    Args:
        name: a key of `PRESETS`.
        residual: one of `gnomon.residual.names()`.
        assignment: "adamw", "muon", or an assignment of ManifoldMuon.
        measured: with the rates, decays and moments that the map found best for this residual and optimizer, where the preset lies
            within its reach (`gnomon.train.recommend.REACH`). Studies start from the preset as it is, whatever was measured since.

    Where neither residual nor assignment is given it is what we recommend, see `recommended`; where one is, the other is that of
    `BASELINE`, so that one thing is changed.
    """
    make = PRESETS[check_name("preset", name, PRESETS)]
    if residual is None and assignment is None:
        return recommended(make)
    made = make(residual or BASELINE[0], assignment or BASELINE[1])
    pair = made.model.residual, dict(made.model.residual_options), assignment or BASELINE[1]
    found = _advice(made, pair) if measured else None
    return made if found is None else _taking(made, found)


def _advice(recipe: Recipe, pair: tuple[str, dict[str, Any], str] | None = None) -> recommend.Advice | None:
    """What the evidence says to a run of this size, of all pairs or of one; None where it says nothing, or is out of reach."""
    planned = recommend.Plan(recipe.model.layers, recipe.model.width, recipe.steps, recipe.tokens_per_step)
    try:
        found = recommend.advise(planned, evidence.load(), pair=pair)
    except recommend.NothingMeasured:
        return None
    return found if found.reaches else None


def _taking(recipe: Recipe, found: recommend.Advice) -> Recipe:
    """With the settings found, but for the spread of the init, which is the preset's own."""
    own = {path: value for path, value in found.settings.items() if path != "model.init_std"}
    return replace(recipe, {**own, "model.residual_options": dict(found.residual_options)}, shared=True)


def recommended(make: Callable[..., Recipe]) -> Recipe:
    """What we recommend for a preset, with a bias on the head, which a sphere wants.

    Within reach of the map that is what it found (`gnomon.train.recommend`). Elsewhere it is the pair `RECOMMENDED` with the bound on
    turning that won at its depth: GeoNorm's clamp up to twelve layers (docs/results/recipe.md), GeoNorm itself beyond
    (docs/results/residuals.md).
    """
    found = _advice(make(*BASELINE))
    if found is not None:
        return _taking(replace(make(found.residual, found.assignment), {"model.head_bias": True}), found)
    recipe = replace(make(*RECOMMENDED), {"model.head_bias": True})
    if recipe.model.layers > 12:
        return replace(recipe, {"model.residual": "geonorm"})
    # Bounded turns bear twice the rate: on `tiny`, seed 1000, 0.04 ends at 1.736 and 0.02 at 1.776.
    rate = {"optim.lr": 0.04} if recipe.name == "tiny" else {}
    return replace(recipe, {"model.residual_options.clamp": math.pi / 4, **rate})
