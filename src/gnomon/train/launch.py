"""Several processes of one training on this computer: what torchrun does, without its agent and the traceback it adds to every error.

Nothing is started again when a process dies; for that, and for several computers, there is torchrun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

PATIENCE = 20.0
"""Seconds that the others get when one process has failed: they end by themselves, or wait for it for ever."""


def launch(recipe: Path, folder: Path, processes: int, sinks: Sequence[str] = (), stdout: IO[str] | None = None) -> int:
    """Train the recipe of a file in so many processes, one a device, and return the exit code of the first that failed, else 0.

    What the first prints goes to `stdout`, if that is given. Signals that ask this process to stop are handed to all of them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "gnomon", "train", "--config", str(recipe), "--out", str(folder)]
    command += ["--sink", *sinks] if sinks else []
    shared = os.environ | {
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // processes, 1))),
    }  # fmt: skip
    # In sessions of their own, since the terminal would hand them a Ctrl-C as well.
    started = [
        subprocess.Popen(
            command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=stdout, start_new_session=True
        )
        for rank in range(processes)
    ]
    with _handed_on(started):
        return _wait(started)


def _wait(started: list[subprocess.Popen]) -> int:
    deadline, failed = float("inf"), 0
    try:
        while any(process.poll() is None for process in started):
            failed = failed or next((process.returncode for process in started if process.returncode), 0)
            if failed:
                deadline = min(deadline, time.monotonic() + PATIENCE)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
    return failed or next((process.returncode for process in started if process.returncode), 0)


@contextlib.contextmanager
def _handed_on(started: list[subprocess.Popen]):
    def hand_on(number, _frame):
        for process in started:
            process.send_signal(number)

    old = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
