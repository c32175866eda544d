"""What a study will take, without taking it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from gnomon.progress import duration, quantity
from gnomon.studies.standing import left
from gnomon.studies.study import Measured, Study
from gnomon.train.recipe import Recipe, to_dict

SUMMED = ("tokens", "flops", "here", "there")

# How the rows are shown: keywords for `report.show`.
SHOWN: dict[str, Any] = {
    "columns": {
        "variant": "variant", "known": "runs known", "runs": "runs left", "parameters": "parameters", "tokens": "tokens",
        "flops": "operations", "memory": "memory of a process", "here": "time on this machine", "there": "time on an H100",
    },
    "formats": {
        "parameters": quantity, "tokens": quantity, "flops": quantity, "here": duration, "there": duration,
        "memory": lambda value: quantity(value, "B"),
    },
}  # fmt: skip


def rows(study: Study, processes: int, measured: Measured | None = None) -> list[dict[str, Any]]:
    """One row a variant and one for all, of what is left to run; columns as in `SHOWN`. Times are one run after the other.

    Args:
        measured: what is known and will not be run again. The time here is then told by what those runs took.
    """
    found: list[dict[str, Any]] = []
    rest, costs = left(study, measured or {}), _Costs(processes)
    pace = _pace(study, measured or {}, costs)
    for variant in study.variants:
        known, runs, steps = (getattr(rest[variant.name], key) for key in ("known", "runs", "steps"))
        row: dict[str, Any] = {"variant": variant.name, "known": known, "runs": runs, "parameters": None, "memory": None}
        one = costs(variant.recipe) if runs else dict.fromkeys(SUMMED, 0.0)
        row |= one | {key: one[key] * steps / variant.recipe.steps for key in SUMMED}
        found.append(row | {"here": row["here"] * pace})
    total: dict[str, Any] = {"variant": "all", "parameters": None, "memory": max((row["memory"] or 0 for row in found), default=0)}
    return [*found, total | {key: sum(row[key] for row in found) for key in ("known", "runs", *SUMMED)}]


class _Costs(dict[str, dict[str, float]]):
    """`expected` by recipe; that of one variant is often that of its neighbours."""

    def __init__(self, processes: int):
        super().__init__()
        self.processes = processes

    def __call__(self, recipe: Any) -> dict[str, float]:
        key = json.dumps(to_dict(recipe))
        if key not in self:
            self[key] = expected(recipe, self.processes)
        return self[key]


def _pace(study: Study, measured: Measured, costs: _Costs) -> float:
    """How many times the seconds expected here a run took, by the median of those known; 1 where none is."""
    recipes = {variant.name: variant.recipe for variant in study.variants}
    ratios = [
        outcome.seconds / (costs(whole := recipes[run.variant])["here"] * run.recipe.steps / whole.steps)
        for run, outcome in measured.items() if outcome.fate != "diverged"
    ]  # fmt: skip
    return statistics.median(ratios) if ratios else 1.0


def line(total: Mapping[str, Any]) -> str:
    """The last of the `rows` in words."""
    time = f"about {duration(total['here'])}"
    if total["known"]:
        return f"{total['runs']} runs left, {total['known']} are known; {time} at the pace of those, one after the other"
    return f"{total['runs']} runs left; {time} on this machine, one after the other"


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
