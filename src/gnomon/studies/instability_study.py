"""`gnomon study instability`: does a manifold fail late, at a rate that never falls? (arXiv 2606.13276)

The paper sees DGram attention blow up after 16,000 and 20,000 of 50,000 steps, and names the mechanism: nothing bounds the singular
values of query and key, logits grow, the softmax saturates, and no gradient comes through. Here the rate stays at its peak, so
that what can grow has the time to. Its assignments run with our solver; those with DGram attention also with the paper's
(`optim.paper`), since the paper's retraction and solver may be the cause.
"""

from __future__ import annotations

import math
from typing import Any

from gnomon import report
from gnomon.series import over_depth
from gnomon.studies.claims import diverges
from gnomon.studies.results import Results, curve
from gnomon.studies.study import Claim, Finding, Study, Variant
from gnomon.train import preset, replace

ASSIGNMENTS = ("none", "stiefel", "hetero", "dgram", "hetero-inv")
PAPERS = ("dgram", "hetero-inv")
SMOKE = ("none", "dgram")

TINY: dict[str, Any] = {
    "steps": 10_000, "model.layers": 4, "model.width": 64, "model.heads": 2, "model.context": 64, "model.init_std": 0.125,
    "data.batch": 8, "schedule.name": "constant", "schedule.warmup": 50, "watch.log_every": 10, "watch.eval_every": 500,
    "watch.eval_tokens": 32768, "watch.probe_every": 250, "watch.save_every": 2500, "watch.keep": 1, "optim.adamw_lr": 4e-3,
}  # fmt: skip
SMALL: dict[str, Any] = {"steps": 30_000, "schedule.name": "constant", "schedule.warmup": 500}
RATES = {"tiny": 0.04, "small": 0.02, "paper": 0.02}


def study(scale: str, changes: dict[str, Any]) -> Study:
    """10,000 steps of a net of width 64; one rate for all, since a tuned one would be the one that does not fail."""

    def variant(name: str, assignment: str, settings: dict[str, Any], group: str) -> Variant:
        base = preset("tiny" if scale == "tiny" else "gpt2-small", "pre-norm", assignment)
        recipe = replace(base, {**(TINY if scale == "tiny" else SMALL), "optim.lr": RATES[scale], **settings})
        recipe = replace(recipe, changes, shared=True)
        return Variant(name, recipe, (recipe.optim.lr,), None, group)

    variants = [variant(name, name, {}, "our solver") for name in ASSIGNMENTS]
    variants += [variant(papers(name), name, {"optim.paper": True}, "the paper's solver") for name in PAPERS]
    return Study(
        name="instability",
        title="Long runs at a constant rate: what grows, and what fails",
        scale=scale,
        variants=tuple(variants),
        claims=(
            *(diverges(f"{name} becomes unstable", said, name) for name, said in (("dgram", "step 16k"), ("hetero-inv", "step 20k"))),
            *(diverges(f"{papers(name)}, becomes unstable", "as above", papers(name)) for name in PAPERS),
            Claim("with DGram attention singular values of query and key grow, and logits with them", "mechanism, no number", _grow,
                  ("dgram", "stiefel")),
        ),
        figures=figures,
        kept=("sigma_max", "attention_logit_max", "attention_entropy", "grad_norm"),
    )  # fmt: skip


def papers(name: str) -> str:
    """The variant with the paper's solver and retraction."""
    return f"{name}, paper's solver"


def course(results: Results, name: str) -> list[dict[str, float]]:
    """Over training, a row for each probe and seed: the largest singular value of any query or key, the largest attention logit,
    the lowest mean entropy of a block's attention (nats), the validation loss, and the norm of the gradient."""
    rows, val = [], math.nan
    for seed, outcome in results.compared(name).items():
        for record in curve(outcome):
            val = record.get("val_loss", val)
            if sigma := record.get("sigma_max"):
                queries = [value for label, value in sigma.items() if label.rpartition(".")[2] in ("query", "key")]
                rows.append({
                    "variant": name, "seed": seed, "step": record["step"], "sigma of query and key": max(queries, default=math.nan),
                    "largest logit": max(over_depth("attention_logit_max", record["attention_logit_max"])),
                    "lowest entropy": min(over_depth("attention_entropy", record["attention_entropy"])),
                    "validation loss": val, "gradient norm": record.get("grad_norm", math.nan),
                })  # fmt: skip
    return rows


def _grow(results: Results) -> Finding:
    keys = ("sigma of query and key", "largest logit")
    nothing = [dict.fromkeys(keys, math.nan)]
    ends = {name: (course(results, name) or nothing)[-1] for name in ("dgram", "stiefel")}
    said = "; ".join(f"{n}: σ {e[keys[0]]:.1f}, logit {e[keys[1]]:.0f}" for n, e in ends.items())
    held = all(ends["dgram"][key] > 2 * ends["stiefel"][key] for key in keys)
    return Finding(said, held, [e[key] for e in ends.values() for key in keys])


def figures(page: report.Page, results: Results) -> None:
    """Each quantity of `course` over steps."""
    names = [variant.name for variant in results.study.variants if results.compared(variant.name)]
    points = [row for name in names for row in course(results, name)]
    if not points:
        return
    ends = [[row for row in points if row["variant"] == name][-1] for name in names if any(r["variant"] == name for r in points)]
    page.section("At the last probe").table([{k: v for k, v in row.items() if k != "seed"} for row in ends])
    page.section("Over training")
    for key in (key for key in points[0] if key not in ("variant", "seed", "step")):
        axis = report.Axis(key, log=key != "validation loss")
        chart = report.curves(points, "step", axis, report.Series("variant", names), key.capitalize())
        page.chart(chart, "One line a seed.", key.replace(" ", "-"))
