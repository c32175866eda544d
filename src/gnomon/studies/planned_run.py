"""One planned run of a study carried out, down to `outcome.json` in its folder. A folder that has one is never run again, nor
a run that the study's outcomes file knows."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any

from gnomon.errors import UserError
from gnomon.files import read_json, restored, write_json
from gnomon.run_folder import CHECKPOINTS, POSTMORTEM, RECIPE, read_metrics
from gnomon.studies.outcomes import OutcomesFile, thinned
from gnomon.studies.study import Outcome, PlannedRun
from gnomon.studies.verdict import fate


class Stopped(Exception):
    """A signal ended the run after it was saved; the same study continues it."""


def known(run: PlannedRun, study_folder: Path, file: OutcomesFile) -> Outcome | None:
    """The outcome of a run that was done before; None when it was not, or was not finished.

    Args:
        file: what is known of runs made elsewhere.

    Raises:
        UserError: the folder holds a run of another recipe.
    """
    from gnomon.train.recipe import Recipe
    from gnomon.train.run_writer import open_run

    folder = study_folder / run.folder
    own = folder / "outcome.json"
    if not own.exists():
        return file.outcome(run, folder)
    if isinstance(run.recipe, Recipe):
        open_run(folder, run.recipe)
    elif read_json(folder / RECIPE) != run.recipe.to_dict():
        raise UserError(f"{folder} holds a run of another recipe than this study's; give another --out")
    found = read_json(own)
    # Studies of older versions wrote null for a value that was not finite.
    value = math.nan if found["value"] is None else restored(found["value"])
    return Outcome(found["fate"], value, found["seconds"], folder, _points(folder))


def _points(folder: Path) -> tuple[tuple[int, int, float], ...]:
    records = [record for record in read_metrics(folder) if "val_loss" in record]
    return tuple(thinned([(r["step"], r.get("tokens", 0), r["val_loss"]) for r in records]))


def perform(run: PlannedRun, study_folder: Path, processes: int = 1) -> Outcome:
    """Do the run, or continue it, and write what it came to.

    Args:
        processes: language models are trained by so many processes, one a device.

    Raises:
        Stopped: a signal ended it early.
        UserError: it cannot be done as asked.
    """
    from gnomon.train.recipe import Recipe

    folder = study_folder / run.folder
    if isinstance(run.recipe, Recipe):
        found = _language_model(run, folder, processes)
    else:
        found = run.recipe.train(folder)
    write_json(folder / "outcome.json", found)
    if run.tuning:
        # What a tuning run leaves is a number and its curve.
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return Outcome(found["fate"], found["value"], found["seconds"], folder, _points(folder))


def _language_model(run: PlannedRun, folder: Path, processes: int) -> dict[str, Any]:
    from gnomon import data
    from gnomon.studies import layer_worth
    from gnomon.train.run_data import open_data

    finite = _train(run, folder) if processes == 1 else _launch(run, folder, processes)
    records = read_metrics(folder)
    losses = [r["val_loss"] for r in records if "val_loss" in r]
    counts = data.frequencies(open_data(run.recipe, folder)[0], run.recipe.model.vocab_size)
    unigram = data.entropy(counts)
    found = fate(losses, unigram, finite=finite)
    if finite and not run.tuning:
        write_json(folder / "mechanism.json", layer_worth.measure(folder))
    return {
        "fate": found,
        "value": losses[-1] if losses and finite else math.nan,
        "seconds": records[-1]["seconds"] if records else 0.0,
        "unigram": unigram,
    }


def _train(run: PlannedRun, folder: Path) -> bool:
    """Train here; returns whether every number stayed finite."""
    from gnomon.train.loop import train
    from gnomon.train.postmortem import NonFinite

    try:
        if train(run.recipe, folder)["stopped"]:
            raise Stopped
    except NonFinite:
        return False
    return True


def _launch(run: PlannedRun, folder: Path, processes: int) -> bool:
    """Train in several processes; returns whether every number stayed finite."""
    from gnomon.train.launch import launch
    from gnomon.train.run_writer import open_run

    open_run(folder, run.recipe)
    code = launch(folder / RECIPE, folder, processes, stdout=sys.stderr)
    if code == 0:
        return True
    if (folder / POSTMORTEM).exists():
        return False
    raise UserError(f"{run}: its processes ended with code {code}; the study's study.log tells why")
