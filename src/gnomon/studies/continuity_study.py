"""`gnomon study continuity`: where the shared leading directions of neighbouring layers come from (arXiv 2605.04971).

Two groups. "MNIST MLP": 16 square layers of width 256 with and without skip path, nonlinearity, LayerNorm, small init, and
with other optimizers; measured are gradients, their sum and the weights, against the level of chance. "Llama": eight blocks
with the MLP's nonlinearity replaced, each projection in its own space.

The learning rates, lengths and batch of the paper's runs are not public. Nothing is tuned here: the question is what the
weights do, not which variant classifies best.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from gnomon import report
from gnomon.geometry.subspace import cosine_null
from gnomon.models.mlp import variant as mlp
from gnomon.studies.mlp_run import MLPRecipe
from gnomon.studies.results import Results, after_training, curve
from gnomon.studies.study import Claim, Finding, Study, Variant
from gnomon.train import Recipe, preset, replace
from gnomon.train.presets import BASELINE

PLAIN = ("Res+ReLU", "Res+GELU", "Res+SiLU", "Res+None", "Res+Radial", "NoRes+ReLU", "Res+ReLU+LN", "Res+None+LN", "Res+Radial+LN")
SMALL_INIT = ("Res+ReLU", "Res+None", "Res+Radial")
SMOKE = ("Res+ReLU", "Res+None", "Res+None+LN", "NoRes+ReLU", "Llama, SiLU")
LLAMA: dict[str, str | None] = {"Llama, SiLU": None, "Llama, ReLU": "relu", "Llama, no nonlinearity": "none"}

TINY: dict[str, Any] = {
    "steps": 300, "model.vocab_size": 257, "model.width": 64, "model.mlp_width": 192, "model.heads": 2, "model.context": 64,
    "model.init_std": 0.125, "model.head_bias": True, "data.train": "jargon", "data.tokenizer": "byte", "data.batch": 8,
    "schedule.warmup": 30, "optim.lr": 4e-3, "watch.log_every": 10, "watch.eval_every": 100, "watch.eval_tokens": 16384,
    "watch.probe_every": 0, "watch.track_every": 50, "watch.save_every": 0,
}  # fmt: skip


def study(scale: str, changes: dict[str, Any]) -> Study:
    """MNIST with 1,000 steps ("tiny") or 6,000 on all images, and a Llama of width 64 or the paper's 34M one."""
    steps, source = (1000, "embedded") if scale == "tiny" else (6000, "hub")
    # Images are not tokens: a --data that names a folder of MNIST files is not a language model's.
    base = MLPRecipe(mlp("Res+ReLU"), steps=steps, data=source, track_every=steps // 10)

    def on(name: str, label: str = "", optimizer: str = "adam", lr: float = 1e-3, **model: Any) -> Variant:
        recipe = dataclasses.replace(base, model=mlp(name, **model), optimizer=optimizer)
        return Variant(label or name, recipe, (lr,), None, "MNIST MLP")

    variants = [on(name) for name in PLAIN]
    variants += [on(name, f"{name}, init x 0.1", init_scale=0.1) for name in SMALL_INIT]
    variants += [
        on("Res+ReLU", "Res+ReLU, sign descent", "sign", 1e-4),
        on("Res+ReLU", "Res+ReLU, SGD", "sgd", 1e-3),
    ]
    llama = replace(_llama(scale), changes, shared=True)
    for name, activation in LLAMA.items():
        recipe = replace(llama, {"model.activation": activation})
        variants.append(Variant(name, recipe, (recipe.optim.lr,), None, "Llama"))
    return Study(
        name="continuity",
        title="Where continuity across depth comes from",
        scale=scale,
        variants=tuple(variants),
        claims=CLAIMS,
        figures=figures,
        notes=f"Level of chance of |cos|, MLP: {chance(base):.3f}; Llama: {chance(llama):.3f}.",
    )


def chance(recipe: Any) -> float:
    """|cos| of unrelated directions of the stream."""
    return cosine_null(recipe.model.width).mean


def _llama(scale: str) -> Recipe:
    changes = {"tiny": TINY, "small": {"watch.track_every": 500, "steps": 2000}, "paper": {"watch.track_every": 500}}
    return replace(preset("llama-34m", *BASELINE), changes[scale])


def series(results: Results, name: str, key: str, *, step: int = -1, role: str = "") -> float:
    """Mean over seeds and neighbouring layers of a tracked series at the first (`step` 0) or last (-1) measurement."""
    found = []
    for outcome in results.compared(name).values():
        records = [r for r in curve(outcome) if r.get(key)]
        if records:
            found += [v for label, v in records[step][key].items() if not role or label.endswith(f".{role}")]
    return _mean(found)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def final(results: Results, name: str, key: str) -> float:
    """Mean over seeds of what `mlp_run.spectra` found in the trained model."""
    return _mean([found[key] for out in results.compared(name).values() if (found := after_training(out))])


def _coherent(results: Results) -> Finding:
    values = {n: series(results, n, "gradient_v1", step=0) for n in PLAIN if n.startswith("Res") and n in results}
    lowest = min(values, key=lambda n: values[n])
    return Finding(f"lowest {values[lowest]:.2f} ({lowest})", values[lowest] > 0.8, list(values.values()))


def _no_skip(results: Results) -> Finding:
    v1, u1 = (series(results, "NoRes+ReLU", f"gradient_{side}", step=0) for side in ("v1", "u1"))
    return Finding(f"v1 {v1:.2f}, u1 {u1:.2f} (chance {chance(results.recipe('NoRes+ReLU')):.2f})", u1 < 0.1, [v1, u1])


def _linear(results: Results) -> Finding:
    gradient, weight = series(results, "Res+None", "gradient_v1"), series(results, "Res+None", "weight_v1")
    relu = series(results, "Res+ReLU", "weight_v1")
    said = f"Res+None: gradient {gradient:.2f}, weight {weight:.2f}; Res+ReLU weight {relu:.2f}"
    return Finding(said, gradient > 0.8 and weight < 0.3 and relu > 2 * weight, [gradient, weight, relu])


def _radial(results: Results) -> Finding:
    radial, relu = series(results, "Res+Radial", "weight_v1"), series(results, "Res+ReLU", "weight_v1")
    return Finding(f"Res+Radial {radial:.2f}, Res+ReLU {relu:.2f}", radial < 0.5 * relu, [radial, relu])


def _weighted(results: Results) -> Finding:
    relu, linear = (final(results, name, "weighted_v1") for name in ("Res+ReLU", "Res+None+LN"))
    return Finding(f"{relu:.3f} against {linear:.3f}", linear > relu, [relu, linear])


def _follows(results: Results) -> Finding:
    """Small init makes ||dW|| pass ||W0||; then the weights should follow the summed gradient."""
    name = "Res+ReLU, init x 0.1"
    change, weight, gathered = (series(results, name, key) for key in ("change", "weight_v1", "accumulated_v1"))
    said = f"{name}: ||dW||/||W0|| {change:.1f}, weight v1 {weight:.2f}, summed gradient v1 {gathered:.2f}"
    return Finding(said, change > 1 and weight > 0.8 * gathered, [change, weight, gathered])


def _own_space(results: Results) -> Finding:
    name = "Llama, SiLU"
    readers = {role: series(results, name, "weight_v1", role=role) for role in ("query", "key", "gate", "up", "value")}
    writers = {role: series(results, name, "weight_u1", role=role) for role in ("output", "down")}
    said = "v1 " + ", ".join(f"{r} {v:.2f}" for r, v in readers.items())
    said += "; u1 " + ", ".join(f"{r} {v:.2f}" for r, v in writers.items())
    said += f"; value u1 {series(results, name, 'weight_u1', role='value'):.2f}"
    value, rest = readers["value"], [v for role, v in readers.items() if role != "value"]
    holds = value < min(rest) and min(writers.values()) > 2 * value
    return Finding(said, holds, [*readers.values(), *writers.values()])


CLAIMS = (
    Claim("gradients of neighbouring layers agree right after init, through the skip path", "about 0.9", _coherent, ("Res+None",)),
    Claim("without skip path they do not", "0.05", _no_skip, ("NoRes+ReLU",)),
    Claim("a linear residual net has the gradients and not the weights", "gradient 0.93, weight 0.22", _linear, ("Res+None", "Res+ReLU")),
    Claim("a radial nonlinearity is not enough", "weight 0.22", _radial, ("Res+Radial", "Res+ReLU")),
    Claim("normalisation distributes (sigma^2-weighted, Res+None+LN above Res+ReLU)", "0.303 > 0.249", _weighted,
          ("Res+ReLU", "Res+None+LN")),
    Claim("weights follow the summed gradient once ||dW|| > ||W0||", "no number", _follows, ("Res+ReLU, init x 0.1",)),
    Claim("each projection shows it in its own space, V in none", "order only", _own_space, ("Llama, SiLU",)),
)


def figures(page: report.Page, results: Results) -> None:
    """Tracked series over training, and the table of final values."""
    rows = [{"variant": v.name, **final_values(results, v.name)} for v in results.study.variants if v.group.startswith("MNIST MLP")]
    if rows:
        page.section("Continuity").table(rows, formats={key: ".3f" for key in rows[0] if key != "variant"})
    shown: dict[str, str] = {
        "gradient_v1": "Gradient v1", "accumulated_v1": "Summed gradient v1", "weight_v1": "Weight v1", "weight_u1": "Weight u1",
        "turn_v1": "Turning of v1 (degrees)", "change": "||dW|| / ||W0||",
    }  # fmt: skip
    for group in dict.fromkeys(variant.group for variant in results.study.variants):
        page.section(group)
        names = [v.name for v in results.study.variants if v.group == group]
        for key, title in shown.items():
            points = [p for name in names for p in _over(results, name, key)]
            if points:
                cosine = key.endswith("1") and not key.startswith("turn")
                level = {"chance": chance(results.recipe(names[0]))} if cosine else {}
                chart = report.curves(points, "step", report.Axis(key, reference=level), report.Series("variant", names), title,
                                      line=report.Line(dots=True))  # fmt: skip
                page.chart(chart, "Mean over neighbouring layers and seeds.", f"{key}-{group}")


def final_values(results: Results, name: str) -> dict[str, Any]:
    """Gradient v1 and u1 at step 0; at the end weight v1 and u1, the sigma^2-weighted measure, ||dW||/||W0||, accuracy."""
    curves = [records for out in results.compared(name).values() if (records := curve(out))]
    return {
        "gradient v1 at 0": series(results, name, "gradient_v1", step=0),
        "gradient u1 at 0": series(results, name, "gradient_u1", step=0),
        "weight v1": series(results, name, "weight_v1"),
        "weight u1": series(results, name, "weight_u1"),
        "weighted v1": final(results, name, "weighted_v1"),
        "effective rank": final(results, name, "effective_rank"),
        "||dW||/||W0||": series(results, name, "change"),
        "turn of v1": series(results, name, "turn_v1"),
        "accuracy": _mean([records[-1]["accuracy"] for records in curves if "accuracy" in records[-1]]),
    }


def _over(results: Results, name: str, key: str) -> list[dict[str, Any]]:
    at: dict[int, list[float]] = {}
    for outcome in results.compared(name).values():
        for record in curve(outcome):
            if record.get(key):
                at.setdefault(record["step"], []).extend(record[key].values())
    return [{"variant": name, "step": step, key: statistics.fmean(values)} for step, values in sorted(at.items())]
