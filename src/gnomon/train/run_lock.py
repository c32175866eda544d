"""One process at a time in a run folder: two would write one set of metrics and checkpoints in turn."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gnomon.errors import UserError

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold the run folder while open. The system lets go of it when a process dies, however it dies, so no lock is ever stale.

    Raises:
        UserError: another process holds it; the message says which, on which computer, and since when.
    """
    if fcntl is None:
        yield
        return
    path = folder / LOCK
    file = _locked(path, folder)
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    file.flush()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _locked(path: Path, folder: Path) -> IO[str]:
    assert fcntl is not None
    while True:
        file = open(path, "a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise UserError(
                f"{folder} is in use by {holder}. Wait for it to end, stop it, or give another --out."
            ) from error
        except OSError as error:
            warnings.warn(f"{folder} cannot be locked ({error.strerror}): see that no second run uses it", stacklevel=4)
            return file
        # Whoever held it before may have removed the file after we opened it: then ours is no longer the one by that name.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()
