"""The papers as grids of runs, at a scale a computer can bear. Nothing here needs torch until something runs."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gnomon.errors import UserError, check_name
from gnomon.studies.study import Results, Study

__all__ = ["NAMES", "SCALES", "Results", "Study", "dry_run", "load", "run"]

NAMES = {
    "residuals": "how sublayers join the stream (arXiv 2608.02668, 2601.22095)",
    "manifolds": "which manifold holds which matrices (arXiv 2606.13276)",
    "continuity": "leading singular directions through depth (arXiv 2605.04971)",
    "recipe": "everything together against tuned baselines",
}
SCALES = ("tiny", "small", "paper")


def load(
    name: str,
    scale: str = "tiny",
    *,
    seeds: int | None = None,
    data: str | None = None,
    variants: Iterable[str] = (),
    changes: Mapping[str, Any] | None = None,
) -> Study:
    """The study of that name.

    Args:
        name: one of `NAMES`.
        scale: "tiny" (embedded data, eight minutes to an hour on two cores), "small" (hours on a laptop or one GPU) or "paper".
        seeds: compared seeds; None for the study's own number, three.
        data: training tokens of the language models, as `gnomon train --data`.
        variants: run only these; baselines they need are kept.
        changes: settings of every language-model recipe by dotted path, as `gnomon train --set`.

    Raises:
        UserError: unknown name, scale or variant.
    """
    check_name("study", name, NAMES)
    check_name("scale", scale, SCALES)
    settings = dict(changes or {}) | ({"data.train": data} if data is not None else {})
    study: Study = importlib.import_module(f"gnomon.studies.{name}_study").study(scale, settings)
    if seeds is not None:
        if seeds < 1:
            raise UserError(f"seeds must be at least 1, got {seeds}")
        study = dataclasses.replace(study, seeds=tuple(range(seeds)))
    wanted = {check_name("variant", variant, [v.name for v in study.variants]) for variant in variants}
    if wanted:
        wanted |= {v.baseline for v in study.variants if v.name in wanted and v.baseline is not None}
        study = dataclasses.replace(study, variants=tuple(v for v in study.variants if v.name in wanted))
    return study


def run(study: Study, folder: str | Path, jobs: int = 1, processes: int = 1) -> tuple[Results, Path]:
    """Run what is missing and write the report; returns the results and the page.

    Raises:
        UserError: as `gnomon.studies.runner.run`.
    """
    from gnomon.studies import runner, study_page

    results = runner.run(study, folder, jobs, processes)
    module = importlib.import_module(f"gnomon.studies.{study.name}_study")
    return results, study_page.write(results, folder, getattr(module, "figures", None))


def dry_run(study: Study, processes: int = 1) -> list[dict[str, Any]]:
    """What each variant will take: runs, parameters, tokens, operations, memory and time, and the sum. Nothing is trained."""
    from gnomon.studies import cost

    return cost.rows(study, processes)
