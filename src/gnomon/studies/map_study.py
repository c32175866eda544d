"""`gnomon study map`: which residual and optimizer pay at which length, depth, width, rate and tokens a step.

Every contestant is tuned in full at a common centre, all over one space with one budget (`gnomon.studies.search`): what its
optimizer does not read is left out, what its residual has of its own is added. Then one axis moves at a time, from the settings
that won at the centre; there the rate alone is searched again, over a factor of two to each side and on where that is the edge.

Two groups stand beside the centre. "modern": the block with ReLU squared, output projections that start at zero, QK-norm and an
untied head, tuned by itself, since a win over the plain block alone is one over a block of 2019; along "modern depth" as well.
"anchor" and "anchor depth": an anchor in what won there.

At scale "tiny" the centre is 6 layers of width 96, 512 bytes a step, 1,000 steps. `--variants depth` (or another group) runs one
axis; another text is `--data`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gnomon import report
from gnomon.models import config as models
from gnomon.studies import map_figures
from gnomon.studies.claims import beats
from gnomon.studies.results import Results
from gnomon.studies.scales import sized
from gnomon.studies.search import Budget, Choice, Log, Space
from gnomon.studies.study import Claim, Finding, Study, Variant
from gnomon.train import Recipe, replace
from gnomon.train.recipe import unread

BASELINE = "Pre-LN + Muon"

CLAMP: dict[str, Any] = {"model.residual_options.clamp": math.pi / 4}
BY_BLOCK: dict[str, Any] = {**CLAMP, "model.residual_options.decay": "harmonic", "model.residual_options.count": "block"}

CONTESTANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    BASELINE: ("pre-norm", "muon", {}),
    "Pre-LN + AdamW": ("pre-norm", "adamw", {}),
    "clamped sphere + Muon": ("proj-spheret", "muon", CLAMP),
    "clamped sphere by block + Muon": ("proj-spheret", "muon", BY_BLOCK),
    "GeoNorm + Muon": ("geonorm", "muon", {}),
    "GeoNorm + AdamW": ("geonorm", "adamw", {}),
    "Pre-LN + hetero": ("pre-norm", "hetero", {}),
    "Pre-LN + stiefel": ("pre-norm", "stiefel", {}),
    "Pre-LN + dgram": ("pre-norm", "dgram", {}),
    "Pre-LN + Sphere": ("pre-norm", "sphere", {}),
    "clamped sphere by block + Sphere": ("proj-spheret", "sphere", BY_BLOCK),
    "GeoNorm + Sphere": ("geonorm", "sphere", {}),
}
"""Residual, assignment, and what the contestant changes besides."""

DEEP = "clamped sphere by block + Muon"

MODERN: dict[str, Any] = {f"model.{key}": value for key, value in models.MODERN.items()}
MODERNISED = (BASELINE, "Pre-LN + AdamW", DEEP)

ANCHORED = (BASELINE, DEEP)
"""One residual that adds, where an anchor is added, and one on a sphere, where it turns."""

SMOKE = (BASELINE, "clamped sphere + Muon")

TINY: dict[str, Any] = {
    "steps": 1000, "model.width": 96, "model.heads": 3, "model.context": 64, "model.init_std": 0.1, "schedule.warmup": 50,
    "data.batch": 8, "watch.eval_every": 250, "watch.eval_tokens": 32768, "watch.probe_every": 500, "watch.save_every": 500,
    "optim.adamw_lr": 4e-3, "watch.log_every": 10,
}  # fmt: skip

SMALL: dict[str, Any] = {
    "steps": 3000, "model.layers": 6, "model.width": 384, "model.heads": 6, "model.context": 256, "data.batch": 16,
    "model.init_std": 0.05, "model.head_bias": True, "schedule.warmup": 150, "compute.compile": False, "optim.adamw_lr": 4e-3,
    "watch.eval_every": 250, "watch.eval_tokens": 65536, "watch.probe_every": 1000, "watch.save_every": 500,
}  # fmt: skip

SPACE: dict[str, Log | Choice] = {
    "optim.weight_decay": Choice((0.0, 0.01, 0.03, 0.1, 0.2)),
    "optim.manifold_decay": Choice((0.0, 0.01, 0.03, 0.1, 0.2)),
    "optim.adamw_weight_decay": Choice((0.0, 0.01, 0.03, 0.1, 0.2)),
    "optim.adamw_lr": Log(1e-3, 2e-2),
    "optim.embedding_lr": Log(1e-3, 4e-2),
    "optim.head_lr": Log(1e-3, 4e-2),
    "optim.vector_lr": Log(1e-3, 4e-2),
    "optim.betas": Choice(((0.9, 0.95), (0.9, 0.98), (0.9, 0.99), (0.8, 0.95))),
    "optim.momentum": Choice((0.9, 0.95, 0.98)),
    "schedule.warmup": Choice((0.02, 0.05, 0.1)),
}
"""What is searched besides the rate; warm-up as a share of the steps."""

# On Sphere a rate is the share of its norm by which a matrix moves, and for Muon's on a matrix of unit spectrum about the same.
RATES = {"adamw": Log(1e-3, 1.6e-2), "muon": Log(5e-3, 0.16)}

OWN: dict[str, Space] = {"clamp": {"model.residual_options.clamp": Choice((math.pi / 8, math.pi / 4, math.pi / 2))}}

AXES: dict[str, dict[str, tuple[dict[str, Any], float]]] = {
    "steps": {f"{steps:,} steps": ({}, steps / 1000) for steps in (300, 3000, 10000)},
    "depth": {f"{layers} layers": ({"model.layers": layers}, 1.0) for layers in (12, 24, 48)},
    "width": {
        f"width {width}": ({"model.width": width, "model.heads": width // 32, "model.init_std": 1 / math.sqrt(width)}, 1.0)
        for width in (32, 64, 192, 512)
    },
    "tokens": {f"{64 * batch:,} tokens a step": ({"data.batch": batch}, 1.0) for batch in (16, 32, 128)},
}
"""Axis -> point -> (what is changed, share of the steps)."""

RETUNED = (0.5, 1.0, 2.0)
"""Times the rate that won: where the search along an axis begins."""

RETUNED_LONG = (0.25, 0.5, 1.0)
"""The same from ten times the steps on: at 3,000 steps the best rate of all three measured was an octave below that at 1,000."""

FACTORS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Of the axis "rate": times the rate that won, each compared as it is."""


def _ahead_at_depth(margin: float = 0.03) -> Claim:
    """Our aim at 24 layers: below the tuned baseline by the margin, and by the whole interval."""
    ours, theirs = f"{DEEP}, 24 layers", f"{BASELINE}, 24 layers"

    def judge(results: Results) -> Finding:
        found = results.against(ours, theirs)
        said = f"{results.mean(ours):.4f} against {results.mean(theirs):.4f}: {found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
        return Finding(said, found.mean <= -margin and found.high < 0, [found.mean, found.high])

    return Claim(f"{DEEP} ends {margin} nats below {BASELINE} at 24 layers", "our aim", judge, (ours, theirs), ((ours, theirs),))


CLAIMS = (
    _ahead_at_depth(),
    *(
        beats(f"{name} is ahead of {BASELINE} after 10,000 steps", said, f"{name}, 10,000 steps", f"{BASELINE}, 10,000 steps")
        for name, said in (
            ("clamped sphere + Muon", "a lead of 300 steps should last"),
            ("Pre-LN + hetero", "hetero crosses plain Muon after a sixth of 50,000 steps (arXiv 2606.13276)"),
        )
    ),
)


def study(scale: str, changes: dict[str, Any]) -> Study:
    """All contestants at the centre, and along every axis."""
    variants = []
    for name, (residual, assignment, own) in CONTESTANTS.items():
        recipe = replace(sized(scale, "gpt2-small", (residual, assignment), TINY, SMALL), {**own, **changes}, shared=True)
        variants.append(_contestant(name, recipe, BASELINE, "centre"))
        for axis, points in AXES.items():
            variants += [_moved(name, recipe, BASELINE, axis, point, *there) for point, there in points.items()]
        variants += [_moved(name, recipe, BASELINE, "rate", f"rate x {factor:g}", {}, 1.0, (factor,)) for factor in FACTORS]
        if name in MODERNISED:
            new, base = replace(recipe, MODERN), modern(BASELINE)
            variants.append(_contestant(modern(name), new, base, "modern"))
            for point, there in AXES["depth"].items():
                variants.append(_moved(modern(name), new, base, "modern depth", point, *there))
        if name in ANCHORED:
            variants.append(_anchored(name, recipe, name, "anchor", {}))
            variants.append(_anchored(name, recipe, f"{name}, 24 layers", "anchor depth", {"model.layers": 24}))
    return Study(
        name="map",
        title="The map: what to take at which depth, length, width, rate and batch",
        scale=scale,
        variants=tuple(variants),
        seeds=(0, 1, 2, 3, 4),
        budget=Budget(trials=16, share=0.25, keep=0.25),
        claims=CLAIMS,
        figures=figures,
    )


def space_of(recipe: Recipe) -> Space:
    """The part of the common space that this recipe reads, its rate, and what its residual has of its own."""
    nothing = unread(recipe)
    found: dict[str, Log | Choice] = {"optim.lr": RATES["adamw" if recipe.optim.name == "adamw" else "muon"]}
    for path, knob in SPACE.items():
        if path == "schedule.warmup":
            found[path] = Choice(tuple(round(share * recipe.steps) for share in knob.values))
        elif path not in nothing and not (path == "optim.head_lr" and recipe.model.tied):
            found[path] = knob
    for option, knobs in OWN.items():
        if option in recipe.model.residual_options:
            found |= knobs
    return found


def modern(name: str) -> str:
    """The contestant with the modern block."""
    return f"{name}, modern"


def _contestant(name: str, recipe: Recipe, baseline: str, group: str) -> Variant:
    """One that is tuned in full."""
    return Variant(name, recipe, (recipe.optim.lr,), None if name == baseline else baseline, group, space=space_of(recipe))


def _moved(
    name: str, recipe: Recipe, baseline: str, axis: str, point: str, moved: Mapping[str, Any], share: float,
    rates: tuple[float, ...] = (),
) -> Variant:  # fmt: skip
    """The settings that won at the centre, at a point of an axis."""
    against = None if name == baseline else f"{baseline}, {point}"
    there = replace(recipe, moved).shortened(share)
    rates = rates or (RETUNED_LONG if share >= 10 else RETUNED)
    return Variant(f"{name}, {point}", there, rates, against, axis, like=name, moved=moved, share=share)


def _anchored(name: str, recipe: Recipe, plain: str, group: str, moved: Mapping[str, Any]) -> Variant:
    """The settings that won at the centre with an anchor, against those without."""
    moved = {"model.anchor": True, **moved}
    return Variant(f"{plain}, anchored", replace(recipe, moved), RETUNED, plain, group, like=name, moved=moved)


def figures(page: report.Page, results: Results) -> None:
    """What to take where, and what the search found at the centre, with its budget."""
    map_figures.draw(page, results)
    rows = []
    for name in CONTESTANTS:
        if name in results and results.compared(name):
            rows.append({"contestant": name, "rate": results.rate(name), **results.tuned_settings(name)})
    if rows:
        budget = results.study.budget
        page.section("Settings that won at the centre").text(
            f"Of {budget.trials} trials a contestant, each at {budget.share:.0%} of the steps on seed 1000, {budget.finalists} went "
            f"on to all steps on seed 1001, and there the rate of the best was halved and doubled until it was not at the edge (at most "
            f"{budget.widen} times more): {budget.runs:g} whole runs each at most. A dash: as the recipe stands."
        )
        page.table(rows)
