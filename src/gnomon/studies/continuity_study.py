"""`gnomon study continuity`: where the shared leading directions of neighbouring layers come from (arXiv 2605.04971).

Two groups. "MNIST MLP": 16 square layers of width 256 with and without skip path, nonlinearity, LayerNorm, small init, and
with other optimizers; measured are gradients, their sum and the weights, against the level of chance. "Llama": eight blocks
with the MLP's nonlinearity replaced, each projection in its own space.

The learning rates, lengths and batch of the paper's runs are not public. Nothing is tuned here: the question is what the
weights do, not which variant classifies best.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from gnomon import report
from gnomon.geometry.subspace import cosine_null
from gnomon.models.mlp import variant as mlp
from gnomon.studies.judging import NOT, REPRODUCED
from gnomon.studies.mlp_run import MLPRecipe
from gnomon.studies.one_run import curve, mechanism_of
from gnomon.studies.study import Claim, Results, Study, Variant
from gnomon.train import Recipe, preset, replace
from gnomon.train.presets import BASELINE

PLAIN = ("Res+ReLU", "Res+GELU", "Res+SiLU", "Res+None", "Res+Radial", "NoRes+ReLU", "Res+ReLU+LN", "Res+None+LN", "Res+Radial+LN")
SMALL_INIT = ("Res+ReLU", "Res+None", "Res+Radial")
LLAMA = {"Llama, SiLU": None, "Llama, ReLU": "relu", "Llama, no nonlinearity": "none"}

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
    llama = _llama(scale)
    for name, activation in LLAMA.items():
        recipe = replace(llama, {"model.activation": activation, **changes}, shared=True)
        variants.append(Variant(name, recipe, (recipe.optim.lr,), None, "Llama"))
    return Study(
        name="continuity",
        title="Where continuity across depth comes from",
        scale=scale,
        variants=tuple(variants),
        claims=CLAIMS,
        notes=f"Level of chance of |cos| in 256 dimensions: {cosine_null(256).mean:.3f}; in 64: {cosine_null(64).mean:.3f}.",
    )


def _llama(scale: str) -> Recipe:
    if scale == "tiny":
        return replace(preset("llama-34m", *BASELINE), TINY)
    paper = preset("llama-34m", *BASELINE)
    return replace(paper, {"watch.track_every": 500, **({"steps": 2000} if scale == "small" else {})})


def series(results: Results, name: str, key: str, *, step: int = -1, role: str = "") -> float:
    """Mean over seeds and neighbouring layers of a tracked series at the first (`step` 0) or last (-1) measurement."""
    found = []
    for outcome in results.compared(name).values():
        records = [r for r in curve(outcome) if r.get(key)]
        if records:
            found += [v for label, v in records[step][key].items() if not role or label.endswith(f".{role}")]
    return statistics.fmean(found) if found else float("nan")


def _coherent(results: Results) -> tuple[str, str]:
    names = [n for n in PLAIN if n.startswith("Res") and n in results]
    values = {name: series(results, name, "gradient_v1", step=0) for name in names}
    word = REPRODUCED if values and min(values.values()) > 0.8 else NOT
    return f"lowest {min(values.values()):.2f} ({min(values, key=lambda n: values[n])})", word


def _no_skip(results: Results) -> tuple[str, str]:
    v1, u1 = (series(results, "NoRes+ReLU", f"gradient_{side}", step=0) for side in ("v1", "u1"))
    return f"v1 {v1:.2f}, u1 {u1:.2f} (chance {cosine_null(256).mean:.2f})", REPRODUCED if u1 < 0.1 else NOT


def _linear(results: Results) -> tuple[str, str]:
    gradient, weight = series(results, "Res+None", "gradient_v1"), series(results, "Res+None", "weight_v1")
    relu = series(results, "Res+ReLU", "weight_v1")
    said = f"Res+None: gradient {gradient:.2f}, weight {weight:.2f}; Res+ReLU weight {relu:.2f}"
    return said, REPRODUCED if gradient > 0.8 and weight < 0.3 and relu > 2 * weight else NOT


def _radial(results: Results) -> tuple[str, str]:
    radial, relu = series(results, "Res+Radial", "weight_v1"), series(results, "Res+ReLU", "weight_v1")
    return f"Res+Radial {radial:.2f}, Res+ReLU {relu:.2f}", REPRODUCED if radial < 0.5 * relu else NOT


def _weighted(results: Results) -> tuple[str, str]:
    def mean(name: str) -> float:
        return statistics.fmean(mechanism_of(o)["weighted_v1"] for o in results.compared(name).values())

    relu, linear = mean("Res+ReLU"), mean("Res+None+LN")
    return f"{relu:.3f} against {linear:.3f}", REPRODUCED if linear > relu else NOT


def _follows(results: Results) -> tuple[str, str]:
    """Small init makes ||dW|| pass ||W0||; then the weights should follow the summed gradient."""
    name = "Res+ReLU, init x 0.1"
    change, weight = series(results, name, "change"), series(results, name, "weight_v1")
    gathered = series(results, name, "accumulated_v1")
    said = f"{name}: ||dW||/||W0|| {change:.1f}, weight v1 {weight:.2f}, summed gradient v1 {gathered:.2f}"
    return said, REPRODUCED if change > 1 and weight > 0.8 * gathered else NOT


def _own_space(results: Results) -> tuple[str, str]:
    name = "Llama, SiLU"
    readers = {role: series(results, name, "weight_v1", role=role) for role in ("query", "key", "gate", "up", "value")}
    writers = {role: series(results, name, "weight_u1", role=role) for role in ("output", "down")}
    said = "v1 " + ", ".join(f"{r} {v:.2f}" for r, v in readers.items())
    said += "; u1 " + ", ".join(f"{r} {v:.2f}" for r, v in writers.items())
    said += f"; value u1 {series(results, name, 'weight_u1', role='value'):.2f}"
    rest = [v for role, v in readers.items() if role != "value"]
    return said, REPRODUCED if readers["value"] < min(rest) and min(writers.values()) > 2 * readers["value"] else NOT


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
    rows = []
    for variant in results.study.variants:
        if variant.group == "MNIST MLP" and results.compared(variant.name):
            found = mechanism(results, variant.name)
            rows.append({"variant": variant.name, **found})
    page.section("Continuity").table(rows, formats={key: ".3f" for key in rows[0] if key != "variant"} if rows else None)
    shown: dict[str, str] = {
        "gradient_v1": "Gradient v1", "accumulated_v1": "Summed gradient v1", "weight_v1": "Weight v1", "weight_u1": "Weight u1",
        "turn_v1": "Turning of v1 (degrees)", "change": "||dW|| / ||W0||",
    }  # fmt: skip
    for group in ("MNIST MLP", "Llama"):
        names = [v.name for v in results.study.variants if v.group == group]
        page.section(group)
        for key, title in shown.items():
            points = [p for name in names for p in _over(results, name, key)]
            if points:
                cosine = key.endswith("1") and not key.startswith("turn")
                chance = {"chance": cosine_null(256 if group == "MNIST MLP" else 64).mean} if cosine else {}
                chart = report.curves(points, "step", report.Axis(key, reference=chance), report.Series("variant", names), title,
                                      line=report.Line(dots=True))  # fmt: skip
                page.chart(chart, "Mean over neighbouring layers and seeds.", f"{key}-{group}")


def mechanism(results: Results, name: str) -> dict[str, Any]:
    """Gradient v1 and u1 at step 0; at the end weight v1 and u1, the sigma^2-weighted measure, ||dW||/||W0||, accuracy."""
    outcomes = list(results.compared(name).values())
    inside = [m for o in outcomes if (m := mechanism_of(o))]

    def mean(pick: Callable[[dict[str, Any]], float]) -> float:
        return statistics.fmean(map(pick, inside)) if inside else float("nan")

    return {
        "gradient v1 at 0": series(results, name, "gradient_v1", step=0),
        "gradient u1 at 0": series(results, name, "gradient_u1", step=0),
        "weight v1": series(results, name, "weight_v1"),
        "weight u1": series(results, name, "weight_u1"),
        "weighted v1": mean(lambda m: m["weighted_v1"]),
        "effective rank": mean(lambda m: m["effective_rank"]),
        "||dW||/||W0||": series(results, name, "change"),
        "turn of v1": series(results, name, "turn_v1"),
        "accuracy": statistics.fmean([curve(o)[-1]["accuracy"] for o in outcomes if curve(o)] or [float("nan")]),
    }


def _over(results: Results, name: str, key: str) -> list[dict[str, Any]]:
    at: dict[int, list[float]] = {}
    for outcome in results.compared(name).values():
        for record in curve(outcome):
            if record.get(key):
                at.setdefault(record["step"], []).extend(record[key].values())
    return [{"variant": name, "step": step, key: statistics.fmean(values)} for step, values in sorted(at.items())]
