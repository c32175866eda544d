"""What a study will take, without taking it."""

from __future__ import annotations

from typing import Any

from gnomon.progress import duration, quantity
from gnomon.studies.study import Study, plan
from gnomon.train.recipe import Recipe

# How the rows are shown: keywords for `report.show`.
SHOWN: dict[str, Any] = {
    "columns": {
        "variant": "variant", "runs": "runs", "parameters": "parameters", "tokens": "tokens", "flops": "operations",
        "memory": "memory of a process", "here": "time on this machine", "there": "time on an H100",
    },
    "formats": {
        "parameters": quantity, "tokens": quantity, "flops": quantity, "here": duration, "there": duration,
        "memory": lambda value: quantity(value, "B"),
    },
}  # fmt: skip


def rows(study: Study, processes: int) -> list[dict[str, Any]]:
    """One row a variant and one for all; columns as in `SHOWN`. Times are one run after the other."""
    found, planned = [], list(plan(study))
    for variant in study.variants:
        steps = [job.recipe.steps for job in planned if job.variant == variant.name]
        one = expected(variant.recipe, processes)
        share = sum(steps) / variant.recipe.steps
        found.append({
            "variant": variant.name, "runs": len(steps), "parameters": one["parameters"], "memory": one["memory"],
            "tokens": one["tokens"] * share, "flops": one["flops"] * share, "here": one["here"] * share,
            "there": one["there"] * share,
        })  # fmt: skip
    total: dict[str, Any] = {"variant": "all", "memory": max(row["memory"] for row in found), "parameters": None}
    total |= {key: sum(row[key] for row in found) for key in ("runs", "tokens", "flops", "here", "there")}
    return [*found, total]


def expected(recipe: Any, processes: int = 1) -> dict[str, float]:
    """parameters, tokens, flops, memory (bytes of a process) and seconds here and on an H100, of one whole run: its evaluations and
    probes, and the look into the trained model, included."""
    if not isinstance(recipe, Recipe):
        return recipe.expected()
    from gnomon.studies import layer_worth
    from gnomon.train.estimate import estimate

    found = estimate(recipe, processes, here=True)
    seconds = {machine["machine"]: machine["run_seconds"] for machine in found["machines"]}
    *_, here = seconds.values()
    run = found["flops"] + found["optimizer_flops"] * recipe.steps * processes + found["watch_flops"]
    whole = run + layer_worth.flops(recipe)
    return {
        "parameters": found["parameters"], "tokens": found["tokens"], "memory": found["memory"]["total"], "flops": whole,
        "here": here * whole / run,
        "there": next(s for name, s in seconds.items() if name.startswith("H100")) * whole / run,
    }  # fmt: skip
