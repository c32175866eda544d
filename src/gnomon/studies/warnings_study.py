"""`gnomon study warnings`: do the rules of `gnomon.diagnosis` speak before the loss does, and only then?

Short runs in three parts. In each some are healthy, and some are made to fail in nine ways. Limits were fixed on "set" and judged on
"judged", which has other residuals, optimizers, rates and depths; there they fell short, so three were moved by what both parts show,
and judged again on "fresh", which is other again. Each part was written down before a warning of it was judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gnomon import report
from gnomon.files import read_json
from gnomon.run_folder import METRICS, read_metrics
from gnomon.studies import warning_verdict
from gnomon.studies.results import Results
from gnomon.studies.study import Claim, Finding, Study, Variant, slug
from gnomon.studies.warning_verdict import Judged, WatchedRun
from gnomon.studies.watched_run import WatchedRecipe
from gnomon.train import preset, replace

BASE: dict[str, Any] = {
    "steps": 240, "model.width": 32, "model.heads": 4, "model.context": 32, "data.batch": 8,
    "schedule.warmup": 20, "watch.eval_tokens": 2048, "watch.probe_tokens": 256, "compute.device": "cpu",
}  # fmt: skip
LAYERS = {"set": 4, "judged": 6, "fresh": 5}
SMALL: dict[str, Any] = {"steps": 800, "model.width": 96, "model.context": 128, "watch.eval_tokens": 16384, "schedule.warmup": 60}
EVERY = 5

CONSTANT: dict[str, Any] = {"schedule.name": "constant"}
RISING: dict[str, Any] = {"schedule.name": "constant", "schedule.warmup": 240}
ABRUPT: dict[str, Any] = {"schedule.warmup": 0}
CLAMP: dict[str, Any] = {"model.residual_options.clamp": math.pi / 4}


class Case(NamedTuple):
    """A run: its half, how it was made to fail ("healthy" where it was not), what it is, and the healthy run that it would be."""

    name: str
    half: str
    kind: str
    residual: str
    assignment: str
    settings: dict[str, Any] = {}
    twin: str = ""
    weights: str = "fp32"


SET = (
    Case("Pre-LN + AdamW", "set", "healthy", "pre-norm", "adamw"),
    Case("Pre-LN + AdamW, a quarter of the rate", "set", "healthy", "pre-norm", "adamw", {"optim.lr": 1e-3}),
    Case("Pre-LN + AdamW, twice the rate", "set", "healthy", "pre-norm", "adamw", {"optim.lr": 8e-3}),
    Case("Pre-LN + AdamW, a fortieth of the rate", "set", "healthy", "pre-norm", "adamw", {"optim.lr": 3e-4, **CONSTANT}),
    Case("Pre-LN + AdamW, large init, tiny rate", "set", "healthy", "pre-norm", "adamw",
         {"optim.lr": 3e-4, "model.init_std": 0.2, **CONSTANT}),
    Case("Pre-LN + Muon", "set", "healthy", "pre-norm", "muon", {"optim.lr": 0.04}),
    Case("Pre-LN + Stiefel", "set", "healthy", "pre-norm", "stiefel", {"optim.lr": 0.04}),
    Case("Pre-LN + DGram", "set", "healthy", "pre-norm", "dgram", {"optim.lr": 0.02}),
    Case("clamped sphere + AdamW", "set", "healthy", "proj-spheret", "adamw", CLAMP),
    Case("clamped sphere + Muon", "set", "healthy", "proj-spheret", "muon", {**CLAMP, "optim.lr": 0.04}),
    Case("Post-LN, 8 layers", "set", "healthy", "post-norm", "adamw", {"model.layers": 8, "optim.lr": 2e-3}),
    Case("Peri-LN + AdamW", "set", "healthy", "peri-norm", "adamw"),
    Case("Pre-LN + AdamW, QK-norm", "set", "healthy", "pre-norm", "adamw", {"model.qk_norm": True}),
    Case("rising rate", "set", "a rate that rises without end", "pre-norm", "adamw", {"optim.lr": 0.3, **RISING}, "Pre-LN + AdamW"),
    Case("sphere at 20 times the rate", "set", "a sphere without clamp at a large rate", "proj-spheret", "adamw",
         {"optim.lr": 0.08, **CONSTANT}, "clamped sphere + AdamW"),
    Case("DGram at ten times the rate", "set", "DGram attention at a large constant rate", "pre-norm", "dgram",
         {"optim.lr": 0.2, **CONSTANT}, "Pre-LN + DGram"),
    Case("Pre-LN at 30 times the rate", "set", "Pre-LN at a diverging rate", "pre-norm", "adamw",
         {"optim.lr": 0.12, **CONSTANT}, "Pre-LN + AdamW"),
    Case("Post-LN, 8 layers, abrupt", "set", "Post-LN that stalls", "post-norm", "adamw",
         {"model.layers": 8, "optim.lr": 0.02, **ABRUPT}, "Post-LN, 8 layers"),
    Case("no warm-up", "set", "no warm-up", "pre-norm", "adamw", {"optim.lr": 0.1, **ABRUPT}, "Pre-LN + AdamW"),
    Case("bf16 weights", "set", "bf16 weights at tiny steps", "pre-norm", "adamw", {"optim.lr": 3e-4, "model.init_std": 0.2, **CONSTANT},
         "Pre-LN + AdamW, large init, tiny rate", "bf16"),
    Case("sphere without head bias", "set", "states that collapse", "proj-spheret", "adamw",
         {"model.head_bias": False, "model.init_std": 0.02}, "clamped sphere + AdamW"),
    Case("init 0.5", "set", "an init that saturates attention", "pre-norm", "adamw", {"model.init_std": 0.5}, "Pre-LN + AdamW"),
)  # fmt: skip

JUDGED = (
    Case("6: Pre-LN + AdamW", "judged", "healthy", "pre-norm", "adamw"),
    Case("6: Pre-LN + AdamW, Llama", "judged", "healthy", "pre-norm", "adamw", {"model.mlp": "swiglu", "model.tied": False}),
    Case("6: Pre-LN + Muon, twice the rate", "judged", "healthy", "pre-norm", "muon", {"optim.lr": 0.08}),
    Case("6: Pre-LN + hetero", "judged", "healthy", "pre-norm", "hetero", {"optim.lr": 0.04}),
    Case("6: Pre-LN + hetero-inv", "judged", "healthy", "pre-norm", "hetero-inv", {"optim.lr": 0.02}),
    Case("6: LayerNorm scaling + AdamW", "judged", "healthy", "layernorm-scaling", "adamw"),
    Case("6: GeoNorm + AdamW", "judged", "healthy", "geonorm", "adamw"),
    Case("6: Cayley + AdamW", "judged", "healthy", "cay-spheret", "adamw"),
    Case("6: sphere by block + Muon", "judged", "healthy", "proj-spheret", "muon",
         {**CLAMP, "model.residual_options.decay": "harmonic", "model.residual_options.count": "block", "optim.lr": 0.04}),
    Case("6: Post-LN, 10 layers", "judged", "healthy", "post-norm", "adamw", {"model.layers": 10, "optim.lr": 2e-3}),
    Case("6: DeepNorm + AdamW", "judged", "healthy", "deepnorm", "adamw"),
    Case("6: Peri-LN + AdamW, tiny rate", "judged", "healthy", "peri-norm", "adamw", {"optim.lr": 5e-4, "model.init_std": 0.2,
                                                                                     **CONSTANT}),
    Case("6: rising rate", "judged", "a rate that rises without end", "pre-norm", "adamw",
         {"model.mlp": "swiglu", "model.tied": False, "optim.lr": 0.2, **RISING}, "6: Pre-LN + AdamW, Llama"),
    Case("6: Cayley at 20 times the rate", "judged", "a sphere without clamp at a large rate", "cay-spheret", "adamw",
         {"optim.lr": 0.08, **CONSTANT}, "6: Cayley + AdamW"),
    Case("6: hetero-inv at ten times the rate", "judged", "DGram attention at a large constant rate", "pre-norm", "hetero-inv",
         {"optim.lr": 0.2, **CONSTANT}, "6: Pre-LN + hetero-inv"),
    Case("6: LayerNorm scaling at 30 times the rate", "judged", "Pre-LN at a diverging rate", "layernorm-scaling", "adamw",
         {"optim.lr": 0.12, **CONSTANT}, "6: LayerNorm scaling + AdamW"),
    Case("6: Post-LN, 10 layers, abrupt", "judged", "Post-LN that stalls", "post-norm", "adamw",
         {"model.layers": 10, "optim.lr": 0.015, **ABRUPT}, "6: Post-LN, 10 layers"),
    Case("6: no warm-up", "judged", "no warm-up", "pre-norm", "muon", {"optim.lr": 0.5, "optim.adamw_lr": 0.05, **ABRUPT},
         "6: Pre-LN + Muon, twice the rate"),
    Case("6: bf16 weights", "judged", "bf16 weights at tiny steps", "peri-norm", "adamw",
         {"optim.lr": 5e-4, "model.init_std": 0.2, **CONSTANT}, "6: Peri-LN + AdamW, tiny rate", "bf16"),
    Case("6: GeoNorm without head bias", "judged", "states that collapse", "geonorm", "adamw",
         {"model.head_bias": False, "model.init_std": 0.02}, "6: GeoNorm + AdamW"),
    Case("6: init 1", "judged", "an init that saturates attention", "pre-norm", "adamw", {"model.init_std": 1.0}, "6: Pre-LN + AdamW"),
)  # fmt: skip

P_1_5: dict[str, Any] = {"model.residual_options.p": 1.5}

FRESH = (
    Case("5: Pre-LN + AdamW, ReLU squared", "fresh", "healthy", "pre-norm", "adamw", {"model.activation": "relu2"}),
    Case("5: Sandwich + AdamW", "fresh", "healthy", "sandwich", "adamw"),
    Case("5: Pre-DyT + AdamW", "fresh", "healthy", "pre-dyt", "adamw"),
    Case("5: nGPT step + AdamW", "fresh", "healthy", "ngpt-step", "adamw"),
    Case("5: bounded sphere + Muon", "fresh", "healthy", "bounded-sphere", "muon", {"optim.lr": 0.04}),
    Case("5: p = 1.5 + AdamW", "fresh", "healthy", "sphere", "adamw", P_1_5),
    Case("5: Pre-LN + sphere", "fresh", "healthy", "pre-norm", "sphere", {"optim.lr": 0.04}),
    Case("5: Pre-LN + DGram, half the rate", "fresh", "healthy", "pre-norm", "dgram", {"optim.lr": 0.01}),
    Case("5: GeoNorm + Muon", "fresh", "healthy", "geonorm", "muon", {"optim.lr": 0.04}),
    Case("5: Post-LN, 12 layers", "fresh", "healthy", "post-norm", "adamw", {"model.layers": 12, "optim.lr": 1e-3}),
    Case("5: Pre-LN + AdamW, soft cap", "fresh", "healthy", "pre-norm", "adamw", {"model.attention_softcap": 20.0}),
    Case("5: Sandwich + AdamW, tiny rate", "fresh", "healthy", "sandwich", "adamw", {"optim.lr": 4e-4, "model.init_std": 0.2, **CONSTANT}),
    Case("5: rising rate", "fresh", "a rate that rises without end", "pre-norm", "adamw",
         {"model.activation": "relu2", "optim.lr": 0.25, **RISING}, "5: Pre-LN + AdamW, ReLU squared"),
    Case("5: p = 1.5 at 15 times the rate", "fresh", "a sphere without clamp at a large rate", "sphere", "adamw",
         {**P_1_5, "optim.lr": 0.06, **CONSTANT}, "5: p = 1.5 + AdamW"),
    Case("5: DGram at ten times the rate", "fresh", "DGram attention at a large constant rate", "pre-norm", "dgram",
         {"optim.lr": 0.1, **CONSTANT}, "5: Pre-LN + DGram, half the rate"),
    Case("5: Pre-DyT at 30 times the rate", "fresh", "Pre-LN at a diverging rate", "pre-dyt", "adamw",
         {"optim.lr": 0.12, **CONSTANT}, "5: Pre-DyT + AdamW"),
    Case("5: Post-LN, 12 layers, abrupt", "fresh", "Post-LN that stalls", "post-norm", "adamw",
         {"model.layers": 12, "optim.lr": 0.01, **ABRUPT}, "5: Post-LN, 12 layers"),
    Case("5: no warm-up", "fresh", "no warm-up", "sandwich", "adamw", {"optim.lr": 0.1, **ABRUPT}, "5: Sandwich + AdamW"),
    Case("5: bf16 weights", "fresh", "bf16 weights at tiny steps", "sandwich", "adamw",
         {"optim.lr": 4e-4, "model.init_std": 0.2, **CONSTANT}, "5: Sandwich + AdamW, tiny rate", "bf16"),
    Case("5: p = 1.5 without head bias", "fresh", "states that collapse", "sphere", "adamw",
         {**P_1_5, "model.head_bias": False, "model.init_std": 0.02}, "5: p = 1.5 + AdamW"),
    Case("5: init 0.7", "fresh", "an init that saturates attention", "pre-norm", "adamw",
         {"model.activation": "relu2", "model.init_std": 0.7}, "5: Pre-LN + AdamW, ReLU squared"),
)  # fmt: skip

CASES = {case.name: case for case in (*SET, *JUDGED, *FRESH)}
PARTS = ("fresh", "judged", "set")
SMOKE = ("Pre-LN + AdamW", "Pre-LN at 30 times the rate")


def study(scale: str, changes: dict[str, Any]) -> Study:
    """Every case with its own rate: what is judged are the warnings, not the runs."""

    def variant(case: Case) -> Variant:
        settings = BASE | {"model.layers": LAYERS[case.half]} | ({} if scale == "tiny" else SMALL) | case.settings
        recipe = replace(replace(preset("tiny", case.residual, case.assignment), settings), changes, shared=True)
        watched = WatchedRecipe(recipe, EVERY if scale == "tiny" else 2 * EVERY, case.weights)
        return Variant(case.name, watched, (recipe.optim.lr,), case.twin or None, f"{case.kind} ({case.half})")

    return Study(
        name="warnings",
        title="Warnings before the crash: how many come in time, and how many for nothing",
        scale=scale,
        variants=tuple(map(variant, CASES.values())),
        seeds=(0, 1),
        claims=(
            Claim("80 % of failures are warned of before the loss shows them", "our aim", _caught),
            Claim("at most 5 % of healthy runs get a warning", "our aim", _false),
        ),
        figures=figures,
        notes="Comparisons are with the twin, the same run with what makes it fail mended.",
    )


def judged(results: Results) -> list[Judged]:
    """The verdict on every run whose twin has run as well."""
    there = list(runs_of(results))
    known = {(run.name, run.seed) for run in there}
    return warning_verdict.judge([run for run in there if not run.twin or (run.twin, run.seed) in known])


def runs_of(results: Results) -> Iterator[WatchedRun]:
    """The runs of a study whose records are here."""
    for variant in results.study.variants:
        for seed, outcome in results.compared(variant.name).items():
            if records := read_metrics(outcome.folder):
                yield _watched(CASES[variant.name], seed, records)


def runs_in(folder: Path) -> Iterator[WatchedRun]:
    """The finished runs in a study's folder."""
    for case in CASES.values():
        for run in sorted((folder / "runs" / slug(case.name)).glob(f"*/{METRICS}")):
            if (run.parent / "outcome.json").exists():
                seed = read_json(run.parent / "recipe.json")["recipe"]["seed"]
                yield _watched(case, seed, read_metrics(run.parent))


def _watched(case: Case, seed: int, records: list[dict[str, Any]]) -> WatchedRun:
    return WatchedRun(case.name, seed, case.half, case.kind, case.twin, tuple(records))


def _caught(results: Results) -> Finding:
    at = warning_verdict.shares(judged(results), "fresh")
    said = f"{at['caught']:.0%} of {at['failed']:.0f} failed runs of the fresh part, median lead {at['lead']:g} steps"
    return Finding(said, at["caught"] >= 0.8, [at["caught"]])


def _false(results: Results) -> Finding:
    at = warning_verdict.shares(judged(results), "fresh")
    return Finding(f"{at['false']:.1%} of {at['healthy']:.0f} healthy runs of the fresh part", at["false"] <= 0.05, [at["false"]])


def figures(page: report.Page, results: Results) -> None:
    """Tables of what was caught, missed and said for nothing."""
    found = judged(results)
    page.section("Warnings")
    for half in PARTS:
        page.table(warning_verdict.by_kind(found, half), title=f"Ways to fail, part {half!r}")
        page.table(warning_verdict.missed(found, half), title=f"Missed, false and unharmed, part {half!r}")
    page.table(warning_verdict.by_rule(found), title="Rules")
