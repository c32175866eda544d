"""Runs a study: reuses what is done, continues what was killed, several runs at a time if asked.

Workers are processes that import torch once and take run after run, each with its share of the cores, so that they do not
fight for them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from gnomon.errors import UserError
from gnomon.files import read_json, write_json
from gnomon.progress import Progress
from gnomon.studies import outcomes, planned_run
from gnomon.studies.results import Results
from gnomon.studies.standing import left, settle
from gnomon.studies.study import Outcome, PlannedRun, Study, wanted


def run(
    study: Study, folder: str | Path, jobs: int = 1, processes: int = 1, outcomes_file: str | Path | None = None
) -> Results:
    """Run everything the study wants and has not, in `folder`.

    Args:
        jobs: runs at a time; each gets an equal share of the cores, or the threads that OMP_NUM_THREADS says.
        processes: of each language model's run, one a device, by torchrun.
        outcomes_file: read first and added to, in place of the folder's own: what it knows is not run again.

    Raises:
        UserError: a run cannot be done as asked, or the folder holds runs of other settings.
        KeyboardInterrupt: a signal came; running runs were saved, and the same call continues.
    """
    folder = Path(folder)
    file = _file(folder, outcomes_file)
    started = time.monotonic()
    measured: dict[PlannedRun, Outcome] = {}
    fresh: list[Outcome] = []
    _todo(study, folder, measured, file, set())
    steps = {name: one.steps for name, one in left(study, measured).items()}
    total = sum(steps[variant.name] * variant.recipe.tokens_per_step for variant in study.variants)
    try:
        with Progress(study.name, total, "tok") as bar, _workers(jobs, folder) as pool:
            running: dict[Future[Outcome], PlannedRun] = {}
            while True:
                for one in _todo(study, folder, measured, file, set(running.values())):
                    running[pool.submit(planned_run.perform, one, folder, processes)] = one
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    one = running.pop(future)
                    measured[one] = _result(future, one, running)
                    file.remember(one, measured[one], study.kept)
                    fresh.append(measured[one])
                    bar.advance(_tokens(one), f"{one}: {_say(measured[one])}")
    finally:
        # A session that was interrupted has its finished runs and its time as well.
        inside, busy = sum(outcome.seconds for outcome in fresh), min(jobs, max(len(fresh), 1))
        _account(folder, time.monotonic() - started, inside, len(fresh), busy)
    return Results(study, measured)


def known(study: Study, folder: str | Path, outcomes_file: str | Path | None = None) -> dict[PlannedRun, Outcome]:
    """What `run` would find done; writes nothing."""
    folder = Path(folder)
    file = _file(folder, outcomes_file)
    return settle(study, lambda one: planned_run.known(one, folder, file))


def _file(folder: Path, outcomes_file: str | Path | None) -> outcomes.OutcomesFile:
    return outcomes.OutcomesFile(Path(outcomes_file) if outcomes_file is not None else folder / outcomes.FILE)


def _todo(
    study: Study,
    folder: Path,
    measured: dict[PlannedRun, Outcome],
    file: outcomes.OutcomesFile,
    running: set[PlannedRun],
) -> list[PlannedRun]:
    """Runs that may start now; those found done are put into `measured`, which may bring up more."""

    def finished(one: PlannedRun) -> Outcome | None:
        return None if one in running else planned_run.known(one, folder, file)

    found = settle(study, finished, measured)
    measured.update(found)
    for one, outcome in found.items():
        file.remember(one, outcome, study.kept)
    return [j for v in study.variants for j in wanted(study, v, measured) if j not in measured and j not in running]


def _tokens(run: PlannedRun) -> float:
    """Tokens (or images) of a run, for the progress line."""
    return run.recipe.steps * run.recipe.tokens_per_step


def _say(outcome: Outcome) -> str:
    return f"{outcome.value:.4f}" if outcome.fate == "learned" else outcome.fate


def _result(future: Future[Outcome], run: PlannedRun, others: dict[Future[Outcome], PlannedRun]) -> Outcome:
    try:
        return future.result()
    except planned_run.Stopped:
        raise KeyboardInterrupt from None
    except BrokenProcessPool as error:
        for other in others:
            other.cancel()
        raise UserError(
            f"the process of a run ended without a word, likely killed for memory ({run}). "
            "Finished runs are kept; the same command goes on. Fewer --jobs need less memory."
        ) from error


def _account(folder: Path, wall: float, inside: float, runs: int, jobs: int) -> None:
    """Add this session to `study.json`: wall time, time inside the runs, and the share of workers' time spent elsewhere."""
    file = folder / "study.json"
    before = read_json(file)["sessions"] if file.exists() else []
    if runs:
        share = max(1 - inside / (wall * jobs), 0.0)
        session = {"wall_seconds": wall, "run_seconds": inside, "runs": runs, "jobs": jobs, "overhead": share}
        write_json(file, {"sessions": [*before, session]})


@contextmanager
def _workers(jobs: int, folder: Path) -> Iterator[ProcessPoolExecutor]:
    if jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}")
    folder.mkdir(parents=True, exist_ok=True)
    threads = threads_each(jobs)
    # OpenMP reads its count when it is loaded, so a worker must be born with it.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_begin, initargs=(threads, str(folder / "study.log")))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def threads_each(jobs: int) -> int:
    """Threads of each of so many workers: what OMP_NUM_THREADS says, else an equal share of the cores this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked.isdigit() and int(asked):
        return int(asked)
    # Of a container or `taskset`, not all that the machine has; macOS does not tell.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // jobs, 1)


def _begin(threads: int, log: str) -> None:
    sys.stderr = open(log, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - it lives as long as the worker
    import torch

    torch.set_num_threads(threads)
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()


def _follow(parent: int) -> None:
    """End with the study: a worker whose parent was killed would train on, unseen, and hold the cores. Runs survive it."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
