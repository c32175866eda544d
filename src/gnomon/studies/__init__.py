"""The papers as grids of runs, at a scale a computer can bear. Nothing here needs torch until something runs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gnomon.errors import UserError, check_name
from gnomon.studies.results import Results
from gnomon.studies.study import Claim, Finding, Study, Variant
from gnomon.train import Recipe

__all__ = ["NAMES", "SCALES", "Claim", "Finding", "Results", "Study", "Variant", "dry_run", "load", "run"]

NAMES = {
    "residuals": "how sublayers join the stream (arXiv 2608.02668, 2601.22095)",
    "manifolds": "which manifold holds which matrices (arXiv 2606.13276)",
    "continuity": "leading singular directions through depth (arXiv 2605.04971)",
    "drift": "whether continuity lasts over 50,000 steps (arXiv 2605.04971)",
    "instability": "what grows and fails in long runs at a constant rate (arXiv 2606.13276)",
    "recipe": "everything together against tuned baselines",
    "auto": "whether the assignment that decides by itself keeps up with the best of the others",
    "map": "which residual and optimizer at which depth, length, width, rate and batch",
    "warnings": "whether warnings come before the loss shows a failure, and only then",
}
COMPRESSION = "compression"
"""The study that trains nothing: what each way to make a trained model smaller costs (`gnomon.studies.compression_study`)."""

SCALES = ("smoke", "tiny", "small", "paper")


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
        scale: "smoke" (a few variants and steps of "tiny", untuned: whether everything works, in less than two minutes),
            "tiny" (embedded data, eight minutes to an hour on two cores), "small" (hours on a laptop or one GPU) or "paper".
        seeds: compared seeds; None for the study's own number, three.
        data: training tokens of the language models, as `gnomon train --data`.
        variants: run only these; baselines they need are kept.
        changes: settings of every language-model recipe by dotted path, as `gnomon train --set`.

    Raises:
        UserError: unknown name, scale or variant; changes to a study without language models.
    """
    check_name("study", name, [*NAMES, COMPRESSION])
    if name == COMPRESSION:
        raise UserError("study compression trains nothing and has no recipes: run gnomon.studies.compression_study.run")
    check_name("scale", scale, SCALES)
    settings, variants = dict(changes or {}), list(variants)
    command = ["gnomon", "study", name, "--scale", scale]
    command += ["--seeds", str(seeds)] * (seeds is not None) + ["--data", str(data)] * (data is not None)
    command += ["--variants", *variants] * bool(variants)
    command += ["--set", *(f"{key}={_spelled(value)}" for key, value in settings.items())] * bool(settings)
    if data is not None:
        settings["data.train"] = data
    module = importlib.import_module(f"gnomon.studies.{name}_study")
    study: Study = module.study("tiny" if scale == "smoke" else scale, settings)
    trained = [variant for variant in study.variants if hasattr(variant.recipe, "optim")]  # the MLP's recipe has its rate and no more
    if changes and not trained:
        raise UserError(f"study {name} has no language model whose recipe could be changed: {', '.join(changes)}")
    if "optim.lr" in settings and any(variant.rates != (variant.recipe.optim.lr,) for variant in trained):
        raise UserError(f"study {name} has rates of its own, so --set optim.lr would change nothing; leave it out")
    for variant in variants:
        check_name("variant or group", variant, [v.name for v in study.variants] + [v.group for v in study.variants if v.group])
    if scale == "smoke":
        study = _smoke(study.only(variants or module.SMOKE), shorten="steps" not in settings)
    elif variants:
        study = study.only(variants)
    if data is not None:
        study = dataclasses.replace(study, variants=tuple(_fitted(variant, settings) for variant in study.variants))
    if seeds is not None:
        if seeds < 1:
            raise UserError(f"seeds must be at least 1, got {seeds}")
        study = dataclasses.replace(study, seeds=tuple(range(seeds)))
    return dataclasses.replace(study, command=shlex.join(command))


def _fitted(variant: Variant, given: Mapping[str, Any]) -> Variant:
    """A language model's tokenizer and vocabulary are those of the data, as in `gnomon train --data`."""
    if not isinstance(variant.recipe, Recipe):
        return variant
    from gnomon.train.run_data import fit_to_data

    return dataclasses.replace(variant, recipe=fit_to_data(variant.recipe, given))


def _smoke(study: Study, shorten: bool) -> Study:
    """A tenth of the steps and at most a hundred, the middle rate, two seeds."""

    def short(variant: Variant) -> Variant:
        recipe = variant.recipe.shortened(min(0.1, 100 / variant.recipe.steps)) if shorten else variant.recipe
        rate = variant.rates[len(variant.rates) // 2]
        if variant.like is not None:
            # Nothing is tuned, so it builds on no search; its rates were factors.
            rate *= recipe.optim.lr
        return dataclasses.replace(variant, recipe=recipe, rates=(rate,), space=None, like=None)

    notes = "A smoke test: everything is run and judged as in a study, and no figure of so short a run means anything."
    return dataclasses.replace(study, scale="smoke", seeds=(0, 1), variants=tuple(map(short, study.variants)), notes=notes)


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def run(
    study: Study, folder: str | Path, jobs: int = 1, processes: int = 1, outcomes_file: str | Path | None = None
) -> tuple[Results, Path]:
    """Run what is missing and write the report; returns the results and the page.

    Raises:
        UserError: as `gnomon.studies.runner.run`.
    """
    from gnomon.studies import runner, study_page

    results = runner.run(study, folder, jobs, processes, outcomes_file)
    return results, study_page.write(results, folder)


def dry_run(
    study: Study, processes: int = 1, folder: str | Path | None = None, outcomes_file: str | Path | None = None
) -> list[dict[str, Any]]:
    """What is left of each variant, and the sum: runs, parameters, tokens, operations, memory and time. Nothing is trained.

    Args:
        folder, outcomes_file: where finished runs are known from, as `run` takes them.
    """
    from gnomon.studies import runner, study_estimate

    return study_estimate.rows(study, processes, runner.known(study, folder, outcomes_file) if folder is not None else {})
