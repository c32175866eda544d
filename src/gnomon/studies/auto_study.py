"""`gnomon study auto`: does `gnomon.assign(model, "auto")` keep up with whichever assignment is best, without being told which?

Eight assignments on Pre-LN under six loads: short, long, deep, a quarter of the init, and the rate that won on short times 8 and
times 32. Each has its rate, decay and momentum tuned on short by the same search; long and deep search the rate again around what
won. The aim is set before any compared run: on every load but the last within 0.01 nats of the best of the other six, and no run
lost, also where others are.

At scale "tiny": 6 layers of width 64, 512 tokens a step, 300 steps (long: 3,000; deep: 24 layers).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gnomon.studies.results import Results
from gnomon.studies.scales import sized
from gnomon.studies.search import Budget, Choice, Log, Space
from gnomon.studies.study import Claim, Finding, Study, Variant
from gnomon.train import Recipe, replace
from gnomon.train.recipe import unread

AUTO, BASELINE = "auto", "muon"
ASSIGNMENTS = (BASELINE, "none", "hetero", "stiefel", "dgram", "sphere", AUTO)

BESIDE = "qk-ball"
"""Compared with all, and no claim asks for it: the other rule that did well on the tuning seed, with torch Muon's shape factor."""

SMOKE = ("muon, short", "auto, short")

MARGIN = 0.01
"""What auto may end behind the best, in nats."""

TINY: dict[str, Any] = {
    "steps": 300, "model.width": 64, "model.heads": 2, "model.context": 64, "model.init_std": 0.125, "schedule.warmup": 15,
    "data.batch": 8, "watch.eval_every": 100, "watch.eval_tokens": 32768, "watch.probe_every": 150, "watch.save_every": 500,
    "optim.adamw_lr": 4e-3, "watch.log_every": 10,
}  # fmt: skip

SMALL: dict[str, Any] = {
    "steps": 1000, "model.layers": 6, "model.width": 384, "model.heads": 6, "model.context": 256, "data.batch": 16,
    "model.init_std": 0.05, "model.head_bias": True, "schedule.warmup": 50, "compute.compile": False, "optim.adamw_lr": 4e-3,
    "watch.eval_every": 250, "watch.eval_tokens": 65536, "watch.probe_every": 500, "watch.save_every": 500,
}  # fmt: skip

SPACE: Space = {
    "optim.lr": Log(1e-2, 0.16),
    "optim.weight_decay": Choice((0.01, 0.1)),
    "optim.manifold_decay": Choice((0.0, 0.1)),
    "optim.momentum": Choice((0.9, 0.95)),
}

LOADS: dict[str, tuple[Callable[[Recipe], dict[str, Any]], float, tuple[float, ...]]] = {
    "long": (lambda short: {}, 10.0, (0.5, 1.0, 2.0)),
    "deep": (lambda short: {"model.layers": 24}, 1.0, (0.5, 1.0, 2.0)),
    "init / 4": (lambda short: {"model.init_std": short.model.init_std / 4}, 1.0, (1.0,)),
    "rate x 8": (lambda short: {}, 1.0, (8.0,)),
    "rate x 32": (lambda short: {}, 1.0, (32.0,)),
}
"""Load -> what it changes of short, its share of the steps, and the factors on the rate that won there."""

CLOSE = ("short", "long", "deep", "init / 4", "rate x 8")
"""Loads on which auto should be close to the best; on the last it should only not fail."""


def study(scale: str, changes: dict[str, Any]) -> Study:
    """Every assignment under every load."""
    variants = []
    for name in (*ASSIGNMENTS, BESIDE):
        recipe = replace(sized(scale, "gpt2-small", ("pre-norm", name), TINY, SMALL), changes, shared=True)
        if name == BESIDE:
            recipe = replace(recipe, {"optim.scale": "muon"})
        variants.append(_variant(name, "short", recipe, (recipe.optim.lr,), space=space_of(recipe)))
        for load, (change, share, factors) in LOADS.items():
            moved = change(recipe)
            there = replace(recipe, moved).shortened(share)
            variants.append(_variant(name, load, there, factors, like=f"{name}, short", moved=moved, share=share))
    return Study(
        name="auto",
        title="Auto: an assignment that decides by itself against six that are chosen",
        scale=scale,
        variants=tuple(variants),
        tuning=0.25,
        budget=Budget(trials=8, share=0.5, keep=0.25, widen=1),
        claims=CLAIMS,
    )


def space_of(recipe: Recipe) -> Space:
    """The part of the space that this recipe reads."""
    nothing = unread(recipe)
    return {path: knob for path, knob in SPACE.items() if path not in nothing}


def _variant(name: str, load: str, recipe: Recipe, rates: tuple[float, ...], **more: Any) -> Variant:
    baseline = None if name == BASELINE else f"{BASELINE}, {load}"
    return Variant(f"{name}, {load}", recipe, rates, baseline, load, **more)


def _close(load: str) -> Claim:
    ours = f"{AUTO}, {load}"
    others = tuple(f"{name}, {load}" for name in ASSIGNMENTS if name != AUTO)

    def judge(results: Results) -> Finding:
        whole = [name for name in others if math.isfinite(results.mean(name)) and not results.fates(name, "diverged")]
        if not whole:
            return Finding("none of the others finished all its runs", False, [math.nan])
        if lost := results.fates(ours, "diverged"):
            return Finding(f"{lost} runs of auto diverged", False, [lost])
        best = min(whole, key=results.mean)
        found = results.against(ours, best)
        said = f"{results.mean(ours):.4f} against {results.mean(best):.4f} of {best.split(',')[0]}: "
        said += f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
        return Finding(said, found.mean <= MARGIN, [found.mean, found.low, found.high])

    return Claim(f"auto within {MARGIN} nats of the best on {load}", "our aim", judge, (ours, *others), tuple((ours, o) for o in others))


def _finishes(results: Results) -> Finding:
    lost = {name: sum(results.fates(f"{name}, {load}", fate) for load in ("short", *LOADS) for fate in ("diverged", "stalled"))
            for name in ASSIGNMENTS}  # fmt: skip
    said = ", ".join(f"{name} {count}" for name, count in lost.items()) + " runs diverged or stalled"
    return Finding(said, lost[AUTO] == 0, [float(count) for count in lost.values()])


CLAIMS = (
    *(_close(load) for load in CLOSE),
    Claim("auto finishes every run", "our aim", _finishes, tuple(f"{name}, {load}" for name in ASSIGNMENTS for load in ("short", *LOADS))),
)
