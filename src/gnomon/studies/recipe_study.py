"""`gnomon study recipe`: everything together against tuned Pre-LN + AdamW and tuned Pre-LN + torch.optim.Muon.

One factor at a time around "sphere + Muon": residual, assignment, step-size rule, init, schedule; then those that helped,
together. Every variant has its own tuned rate, the baselines on the same grid. Figure of merit: tokens until a baseline's final loss is
reached, twice. `reach` reads it off the curve of a whole run, whose rate is still high at that moment; the variants "in 40% of
the tokens" and "in 70%" are whole short runs with a schedule of their own, and are the ones to quote.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from gnomon import report
from gnomon.studies.results import Results, curve
from gnomon.studies.scales import contestant, rates_for, sized
from gnomon.studies.study import Claim, Finding, Study, Variant
from gnomon.train import Recipe, replace

ADAMW, MUON, OURS = "Pre-LN + AdamW", "Pre-LN + Muon", "sphere + Muon"
BEST, ALL, SAME = f"{OURS}, clamp pi/4", f"{OURS}, all three", f"{MUON}, the other two"

TINY: dict[str, Any] = {
    "steps": 300, "model.width": 96, "model.heads": 3, "model.context": 64, "model.init_std": 0.1, "schedule.warmup": 20,
    "data.batch": 8, "watch.eval_every": 20, "watch.eval_tokens": 8192, "watch.probe_every": 150, "watch.save_every": 0,
}  # fmt: skip

SMALL: dict[str, Any] = {
    "steps": 3000, "model.layers": 8, "model.width": 384, "model.heads": 6, "model.context": 256, "data.batch": 16,
    "model.init_std": 0.05, "model.head_bias": True, "schedule.warmup": 100, "compute.compile": False, "optim.adamw_lr": 4e-3,
    "watch.eval_every": 100, "watch.eval_tokens": 65536, "watch.probe_every": 500, "watch.save_every": 250,
}  # fmt: skip

CANDIDATES: dict[str, tuple[str, str]] = {
    ADAMW: ("pre-norm", "adamw"),
    MUON: ("pre-norm", "muon"),
    "Peri-LN + Muon": ("peri-norm", "muon"),
    "GeoNorm + Muon": ("geonorm", "muon"),
    "sphere + AdamW": ("proj-spheret", "adamw"),
    OURS: ("proj-spheret", "muon"),
    "sphere + Muon, Cayley": ("cay-spheret", "muon"),
    "sphere + hetero": ("proj-spheret", "hetero"),
    "sphere + stiefel": ("proj-spheret", "stiefel"),
}
"""Residual and assignment."""

FACTORS: dict[str, Callable[[Recipe], dict[str, Any]]] = {
    "harmonic decay": lambda base: {"model.residual_options.decay": "harmonic"},
    "clamp pi/4": lambda base: {"model.residual_options.clamp": math.pi / 4},
    "QK-norm": lambda base: {"model.qk_norm": True},
    "init / 2": lambda base: {"model.init_std": base.model.init_std / 2},
    "AdamW rate x 3": lambda base: {"optim.adamw_lr": base.optim.adamw_lr * 3},
    "momentum 0.9": lambda base: {"optim.momentum": 0.9},
    "warm-up / 4": lambda base: {"schedule.warmup": base.schedule.warmup // 4},
    "WSD": lambda base: {"schedule.name": "wsd", "schedule.decay": 0.4},
    "linear to 0": lambda base: {"schedule.name": "wsd", "schedule.decay": 1.0, "schedule.floor": 0.0},
}
"""What is changed, one at a time, in "sphere + Muon"."""

THREE = ("clamp pi/4", "init / 2", "momentum 0.9")
"""The factors that helped most, together in `ALL`; and without the sphere's own in `SAME`, so that what helps Pre-LN as well is not
counted for the sphere. Together they are no better than the clamp alone, which is therefore what is recommended."""

SMOKE = ("Peri-LN + Muon", "sphere + AdamW", BEST, f"{BEST} in 40% of the tokens")

SHORT = {f"{name} in {share:.0%} of the tokens": (name, share) for name in (BEST, ALL) for share in (0.4, 0.7)}


def study(scale: str, changes: dict[str, Any]) -> Study:
    """Baselines, candidates, and the favourite in fewer tokens."""
    def variant(name: str, residual: str, assignment: str, change: Callable[[Recipe], dict[str, Any]] | None = None) -> Variant:
        recipe = replace(sized(scale, "gpt2-small", (residual, assignment), TINY, SMALL), changes, shared=True)
        recipe = replace(recipe, change(recipe)) if change else recipe
        return contestant(name, recipe, rates_for(scale, assignment), MUON, "candidates")

    variants = [variant(name, *which) for name, which in CANDIDATES.items()]
    variants += [variant(f"{OURS}, {name}", *CANDIDATES[OURS], change) for name, change in FACTORS.items()]
    variants += [variant(ALL, *CANDIDATES[OURS], _together(THREE)), variant(SAME, *CANDIDATES[MUON], _together(THREE[1:]))]
    for name, (whole, part) in SHORT.items():
        full = next(v for v in variants if v.name == whole)
        shorter = {"steps": full.recipe.steps, "schedule.warmup": full.recipe.schedule.warmup}
        recipe = replace(full.recipe, {key: max(int(value * part), 1) for key, value in shorter.items()})
        variants.append(Variant(name, recipe, full.rates, ADAMW if part < 0.5 else MUON, "fewer tokens"))
    return Study(
        name="recipe",
        title="The recipe: what to combine, and what it saves",
        scale=scale,
        variants=tuple(variants),
        claims=CLAIMS,
        figures=figures,
    )


def _together(names: Iterable[str]) -> Callable[[Recipe], dict[str, Any]]:
    return lambda base: {key: value for name in names for key, value in FACTORS[name](base).items()}


def reach(results: Results, name: str, target: float) -> float:
    """Tokens after which the validation loss first is `target` or lower, between two evaluations by straight line; mean over
    seeds; infinite when a seed never gets there."""
    found = []
    for outcome in results.compared(name).values():
        before = None
        for record in curve(outcome):
            if not math.isfinite(record.get("val_loss", math.nan)):
                continue
            here = record["tokens"], record["val_loss"]
            if here[1] <= target:
                way = 0.0 if before is None else (before[1] - target) / max(before[1] - here[1], 1e-12)
                found.append(here[0] if before is None else before[0] + way * (here[0] - before[0]))
                break
            before = here
        else:
            found.append(float("inf"))
    return statistics.fmean(found) if found else float("inf")


def share(results: Results, name: str, baseline: str) -> float:
    """Tokens to reach the baseline's final loss, over the baseline's own."""
    whole = results.recipe(baseline)
    return reach(results, name, results.mean(baseline)) / (whole.steps * whole.tokens_per_step)


def savings(results: Results) -> list[dict[str, Any]]:
    """Of each candidate: the share of each baseline's tokens after which it has the baseline's final loss."""
    rows = []
    for variant in results.study.variants:
        if variant.group != "candidates" or not results.compared(variant.name):
            continue
        row: dict[str, Any] = {"variant": variant.name, "final loss": results.mean(variant.name)}
        for baseline in (name for name in (ADAMW, MUON) if name in results):
            row[f"share of {baseline}'s tokens"] = share(results, variant.name, baseline)
        rows.append(row)
    return sorted(rows, key=lambda row: row["final loss"])


def figures(page: report.Page, results: Results) -> None:
    """The table of savings."""
    rows = savings(results)
    if not rows:
        return
    formats = {key: ".2f" if "share" in key else ".4f" for key in rows[0] if key != "variant"}
    page.section("Tokens to reach a baseline's final loss").table(rows, formats=formats)


def _short(name: str, baseline: str) -> Callable[[Results], Finding]:

    def judge(results: Results) -> Finding:
        ours, theirs = results.mean(name), results.mean(baseline)
        crossed = share(results, BEST, baseline)
        said = f"{ours:.4f} against {theirs:.4f}; the whole run crosses that at {crossed:.0%} of the tokens"
        return Finding(said, ours <= theirs, [ours, theirs])

    return judge


CLAIMS = tuple(
    Claim(f"final loss of tuned {baseline} in {share:.0%} of its tokens", "our aim", _short(name, baseline), (baseline, whole, name))
    for name, (whole, share) in SHORT.items() if whole == BEST
    for baseline in ((ADAMW,) if share < 0.5 else (MUON,))
)  # fmt: skip
