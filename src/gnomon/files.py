"""Files that are either whole or not there: write under a temporary name, then rename.

A process may be killed, or the disk may fill, at any moment. What an earlier call wrote must survive that.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gnomon.errors import UserError

_PARTIAL = ".partial"


@contextlib.contextmanager
def atomic(path: str | os.PathLike, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary sibling of `path`; on success flush it to disk and rename it over `path`.

    If the block raises (a full disk included) the temporary file is removed and `path` is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}{_PARTIAL}")
    encoding = None if "b" in mode else "utf-8"
    try:
        with open(partial, mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends well, and is removed when it does not.

    Raises:
        FileExistsError: something is at `path` already; a whole folder is never written over.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists already; remove it or choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}{_PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for file in partial.iterdir():
            _sync(file)
        os.replace(partial, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_partials(folder: str | os.PathLike) -> None:
    """Remove what a killed process left behind in `folder`."""
    for left in Path(folder).glob(f".*{_PARTIAL}"):
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinities are refused: they are not JSON."""
    text = json.dumps(value, indent=2, allow_nan=False)
    with atomic(path, "w") as file:
        file.write(text + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """Read a JSON file.

    Raises:
        UserError: it is not there, or not JSON (with the place).
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UserError(f"no file {path}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
