"""Files that are either whole or not there: write under a temporary name, then rename.

A process may be killed, or the disk may fill, at any moment. What an earlier call wrote must survive that.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from gnomon.errors import UserError, refused

_PARTIAL = ".partial"
T = TypeVar("T")


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary sibling of `path`; on success flush it to disk and rename it over `path`.

    If the block raises (a full disk included, which names `path`) the temporary file is removed and `path` is as it was.
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
    except OSError as error:
        if error.filename in (None, str(partial)):
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
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


def remove_partials(folder: str | os.PathLike[str]) -> None:
    """Remove what a killed process left behind in `folder`."""
    for left in Path(folder).glob(f".*{_PARTIAL}"):
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, atomically. Numbers that are not finite are `spelled`."""
    text = json.dumps(spelled(value), indent=2, allow_nan=False)
    with atomic(path, "w") as file:
        file.write(text + "\n")


def append_record(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Add a line of JSON to a file of lines and flush it to disk; what a killed process left of a last line is dropped first."""
    path, line = Path(path), json.dumps(spelled(record), allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_records(path: str | os.PathLike[str], what: str, read: Callable[[Any], T]) -> list[T]:
    """What `read` makes of each line of a file of JSON lines; nothing where there is no file. A last line cut short by a kill is left out.

    Args:
        what: a line is, for the error.
        read: raises ValueError, KeyError or TypeError for what is none.

    Raises:
        UserError: a line before the last cannot be read.
    """
    path, found = Path(path), []
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            found.append(read(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise UserError(f"{path}, line {number}, is no {what} ({error!r}); remove that line") from error
    return found


def check_readable(path: str | os.PathLike[str]) -> Path:
    """`path`, if it is a file that can be read.

    Raises:
        UserError: nothing is there, it is a folder, a pipe or a device (opening one may wait for ever), or may not be read.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"no file {path}" + (" (a link to what is gone)" if path.is_symlink() else "")) from None
    except OSError as error:
        raise refused(error) or error from None
    if stat.S_ISDIR(mode):
        raise UserError(f"no file {path}: it is a folder")
    if not stat.S_ISREG(mode):
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise UserError(f"{path} is a {kind}, not a file: write what it gives to a file first")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: no permission to read it. See who may: ls -l")
    return path


def check_writable(path: str | os.PathLike[str]) -> Path:
    """`path`, if a file can be written there: asked before the work that is to fill it.

    Raises:
        UserError: it is a folder, a pipe or a device, a folder above it is a file, or it may not be written.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file in it, e.g. {path / 'report'}{path.suffix}")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise UserError(f"{path} cannot be written: {above} is a file, not a folder")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a pipe or a device, and a whole file would take its place; give the name of a file")
    try:
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror} in {above}. See who may: ls -ld") from error
    return path


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file.

    Raises:
        UserError: it is not there or cannot be read, or is not JSON (with the place).
    """
    data = check_readable(path).read_bytes()
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or brackets without end
        raise UserError(f"{path} is not JSON: {error}. Write or download it again.") from error


def spelled(value: Any) -> Any:
    """`value` with numbers that are not finite as the words "nan", "inf" and "-inf": JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {key: spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [spelled(item) for item in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def restored(value: Any) -> Any:
    """The inverse of `spelled`, for values that hold numbers; text that reads "nan" or "inf" would become one."""
    if isinstance(value, Mapping):
        return {key: restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"optim": {"lr": 1}}` -> `{"optim.lr": 1}`; a mapping with nothing in it leaves nothing."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
