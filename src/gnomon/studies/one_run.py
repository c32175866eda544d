"""One run of a study, from a job to `outcome.json` in its folder. A folder that has one is never run again."""

from __future__ import annotations

import functools
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gnomon.errors import UserError
from gnomon.files import read_json, restored, write_json
from gnomon.run_folder import CHECKPOINTS, POSTMORTEM, RECIPE, read_metrics
from gnomon.studies.study import Job, Outcome
from gnomon.studies.verdict import entropy, fate


class Stopped(Exception):
    """A signal ended the run after it was saved; the same study continues it."""


def known(job: Job, study_folder: Path) -> Outcome | None:
    """The outcome of a job that was done before; None when it was not, or was not finished.

    Raises:
        UserError: the folder holds a run of another recipe.
    """
    from gnomon.train.recipe import Recipe
    from gnomon.train.run_writer import open_run

    folder = study_folder / job.folder
    file = folder / "outcome.json"
    if not file.exists():
        return None
    if isinstance(job.recipe, Recipe):
        open_run(folder, job.recipe)
    elif read_json(folder / RECIPE) != job.recipe.to_dict():
        raise UserError(f"{folder} holds a run of another recipe than this study's; give another --out")
    found = read_json(file)
    # Studies of older versions wrote null for a value that was not finite.
    value = math.nan if found["value"] is None else restored(found["value"])
    return Outcome(found["fate"], value, found["seconds"], folder)


def perform(job: Job, study_folder: Path, processes: int = 1) -> Outcome:
    """Do the run, or continue it, and write what it came to.

    Args:
        processes: language models are trained by so many processes, one a device, started by torchrun.

    Raises:
        Stopped: a signal ended it early.
        UserError: it cannot be done as asked.
    """
    from gnomon.train.recipe import Recipe

    folder = study_folder / job.folder
    if isinstance(job.recipe, Recipe):
        found = _language_model(job, folder, processes)
    else:
        from gnomon.studies import mlp_run

        found = mlp_run.train(job.recipe, folder)
    write_json(folder / "outcome.json", found)
    if job.tuning:
        # What a tuning run leaves is a number and its curve.
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return Outcome(found["fate"], found["value"], found["seconds"], folder)


def _language_model(job: Job, folder: Path, processes: int) -> dict[str, Any]:
    from gnomon import data
    from gnomon.studies import layer_worth
    from gnomon.train.run_data import open_data

    finite = _train(job, folder) if processes == 1 else _launch(job, folder, processes)
    records = read_metrics(folder)
    losses = [r["val_loss"] for r in records if "val_loss" in r]
    counts = data.frequencies(open_data(job.recipe)[0], job.recipe.model.vocab_size)
    unigram = entropy([int(count) for count in counts])
    found = fate(losses, unigram, finite=finite)
    if finite and not job.tuning:
        write_json(folder / "mechanism.json", layer_worth.measure(folder))
    return {
        "fate": found,
        "value": losses[-1] if losses and finite else math.nan,
        "seconds": records[-1]["seconds"] if records else 0.0,
        "unigram": unigram,
    }


def _train(job: Job, folder: Path) -> bool:
    """Train here; returns whether every number stayed finite."""
    from gnomon.train.loop import train
    from gnomon.train.postmortem import NonFinite

    try:
        if train(job.recipe, folder)["stopped"]:
            raise Stopped
    except NonFinite:
        return False
    return True


def _launch(job: Job, folder: Path, processes: int) -> bool:
    """Train in several processes; returns whether every number stayed finite."""
    from gnomon.train.run_writer import open_run

    open_run(folder, job.recipe)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "gnomon",
               "train", "--config", str(folder / RECIPE), "--out", str(folder)]  # fmt: skip
    done = subprocess.run(command, stdout=sys.stderr, stderr=sys.stderr)
    if done.returncode == 0:
        return True
    if (folder / POSTMORTEM).exists():
        return False
    raise UserError(f"{job.variant}, lr {job.rate:g}, seed {job.seed}: torchrun ended with code {done.returncode}; the study's "
                    "study.log tells why")  # fmt: skip


@functools.cache
def curve(outcome: Outcome) -> list[dict[str, Any]]:
    """The metric records of a finished run; [] where there are none. A page asks for each many times."""
    return read_metrics(outcome.folder)


@functools.cache
def mechanism_of(outcome: Outcome) -> dict[str, Any]:
    """What was measured on the trained model; {} where nothing was."""
    file = outcome.folder / "mechanism.json"
    return read_json(file) if file.exists() else {}
