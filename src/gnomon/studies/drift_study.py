"""`gnomon study drift`: does continuity across depth form at the default init, and does it last? (arXiv 2605.04971)

The paper says that weights of neighbouring layers come to share leading directions once they have moved further than their start,
and that a linear residual net then loses them again by drift, a radial one as well, where ReLU keeps them. In `gnomon study
continuity` (1,000 steps) the weights moved by less than half of their start. Here the same nets train fifty times as long.

x tanh(|x|) is the identity for all but short x. At width 256 no branch is short, so the radial net is the linear one; at width 16
they are (|W x| about 0.4 at the start), and the two differ.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from gnomon import report
from gnomon.models.mlp import variant as mlp
from gnomon.studies import continuity_study
from gnomon.studies.continuity_study import chance
from gnomon.studies.mlp_run import MLPRecipe
from gnomon.studies.results import Results, curve
from gnomon.studies.study import Claim, Finding, Study, Variant

NETS = ("Res+ReLU", "Res+None", "Res+Radial")
WIDTHS = {256: "MNIST MLP", 16: "MNIST MLP of width 16"}
SMOKE = ("Res+ReLU, width 16", "Res+None, width 16")
KEPT = 0.1
"""What a mean |cos| may fall below its peak and still count as kept."""


def study(scale: str, changes: dict[str, Any]) -> Study:
    """50,000 steps of 128 images at every scale; `--data` is a folder of MNIST's files, 4,500 embedded images without."""
    base = MLPRecipe(mlp("Res+ReLU"), steps=50_000, data=changes.get("data.train", "embedded"), track_every=2500)

    def on(net: str, width: int) -> Variant:
        recipe = dataclasses.replace(base, model=mlp(net, width=width))
        return Variant(f"{net}, width {width}", recipe, (recipe.lr,), None, WIDTHS[width])

    variants = tuple(on(net, width) for width in WIDTHS for net in NETS)
    return Study(
        name="drift",
        title="Whether continuity across depth lasts",
        scale=scale,
        variants=variants,
        claims=tuple(claim for width in WIDTHS for claim in _claims(width)),
        figures=figures,
        kept=("weight_v1", "change", "accuracy"),
        notes="; ".join(f"chance at width {width}: {chance(on(NETS[0], width).recipe):.3f}" for width in WIDTHS),
    )


def course(results: Results, name: str) -> dict[str, float]:
    """Mean weight v1 over pairs and seeds: at the start, at its peak, at the end; and |dW| / |W_0| at the end. NaN: never measured."""
    points: dict[int, list[float]] = {}
    for outcome in results.compared(name).values():
        for record in curve(outcome):
            if record.get("weight_v1"):
                points.setdefault(record["step"], []).extend(record["weight_v1"].values())
    means = {step: sum(values) / len(values) for step, values in sorted(points.items())}
    if not means:
        return dict.fromkeys(("at the start", "peak", "step of the peak", "at the end", "|dW|/|W0|"), math.nan)
    peak = max(means, key=lambda step: means[step])
    change = continuity_study.series(results, name, "change")
    return {"at the start": means[min(means)], "peak": means[peak], "step of the peak": peak, "at the end": means[max(means)],
            "|dW|/|W0|": change}  # fmt: skip


def _claims(width: int) -> tuple[Claim, ...]:
    names = tuple(f"{net}, width {width}" for net in NETS)

    def forms(results: Results) -> Finding:
        found = {name: course(results, name) for name in names}
        said = "; ".join(f"{n}: {c['at the start']:.2f} to {c['peak']:.2f}, |dW|/|W0| {c['|dW|/|W0|']:.1f}" for n, c in found.items())
        held = all(c["peak"] > 0.5 and c["|dW|/|W0|"] > 1 for c in found.values())
        return Finding(said, held, [c["peak"] for c in found.values()])

    def last(name: str, kept: bool) -> Claim:
        def judge(results: Results) -> Finding:
            c = course(results, name)
            said = f"peak {c['peak']:.2f} at step {c['step of the peak']:,.0f}, {c['at the end']:.2f} at the end"
            return Finding(said, (c["at the end"] > c["peak"] - KEPT) == kept, [c["peak"], c["at the end"]])

        return Claim(f"{name}: continuity is {'kept' if kept else 'lost by drift'}", "order only", judge, (name,))

    return (
        Claim(f"width {width}: continuity forms where |dW| passes |W0|", "no number", forms, names),
        last(names[0], True), last(names[1], False), last(names[2], False),
    )  # fmt: skip


def figures(page: report.Page, results: Results) -> None:
    """The course of each net, and the pictures of `gnomon study continuity`."""
    rows = [{"variant": v.name, **course(results, v.name)} for v in results.study.variants if results.compared(v.name)]
    if rows:
        shown = {key: ".3f" for key in ("at the start", "peak", "at the end", "|dW|/|W0|")}
        page.section("Weight v1 over training").table(rows, formats=shown)
    continuity_study.figures(page, results)
