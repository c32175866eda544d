"""Names, shapes and dtypes from safetensors headers, without reading a single weight.

Format: eight bytes (little-endian length of the header), the header as JSON, then the data
(huggingface/safetensors, README "Format").
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from gnomon.errors import UserError

_INDEX = "model.safetensors.index.json"
_SINGLE = ("model.safetensors", "adapter_model.safetensors")
_LFS = b"version https://git-lfs"
_MAX_HEADER = 100_000_000


class Header(NamedTuple):
    """One tensor of a file."""

    shape: tuple[int, ...]
    dtype: str


def read(path: str | os.PathLike) -> tuple[dict[str, Header], dict[str, Any]]:
    """name -> `Header` and the config of a local folder or `.safetensors` file.

    A folder's index decides which files belong to it; files beside them are ignored.

    Raises:
        UserError: nothing is there, it is not safetensors, a shard is missing or damaged.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"{path} does not exist. Anatomy reads local folders and .safetensors files; "
            "download a model from a hub first."
        )
    folder = path if path.is_dir() else path.parent
    config = _json(folder / "config.json") if (folder / "config.json").exists() else {}
    if path.is_dir() and (path / _INDEX).exists():
        return _sharded(path / _INDEX), config
    if path.is_dir():
        path = _only_file(path)
    if path.name.endswith(".index.json"):
        return _sharded(path), config
    if path.suffix != ".safetensors":
        raise UserError(f"{path} is not a .safetensors file; anatomy reads headers of that format only")
    return read_file(path), config


def read_file(path: str | os.PathLike) -> dict[str, Header]:
    """The header of one `.safetensors` file.

    Raises:
        UserError: the file is damaged or of another format; the message says which.
    """
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if size < 8 or length > size - 8 or length > _MAX_HEADER:
            raise UserError(_why_not(path, size, start + file.read(64)))
        text = file.read(length)
    try:
        entries = json.loads(text)
        found = {
            name: Header(_shape(entry["shape"]), str(entry["dtype"]))
            for name, entry in entries.items()
            if name != "__metadata__"
        }
        end = max((entry["data_offsets"][1] for n, entry in entries.items() if n != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UserError(f"{path}: the safetensors header is damaged ({error}); fetch the file again") from None
    if not isinstance(end, int) or size != 8 + length + end:
        expected = f"{8 + length + end} bytes" if isinstance(end, int) else f"an end at {end!r}"
        raise UserError(
            f"{path} is {size} bytes, but its header speaks of {expected}: the file is cut short or has "
            "trailing bytes; fetch it again"
        )
    return found


def _shape(numbers: Any) -> tuple[int, ...]:
    shape = tuple(int(n) for n in numbers)
    if any(n < 0 for n in shape):
        raise ValueError(f"a shape of {list(shape)}")
    return shape


def _sharded(index: Path) -> dict[str, Header]:
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} has no weight_map; it does not say which file holds which tensor")
    by_file: dict[str, dict[str, Header]] = {}
    found = {}
    for name, file in weight_map.items():
        if file not in by_file:
            shard = index.parent / file
            if Path(file).name != file or not shard.is_file():
                raise UserError(f"{index} names {file!r}, which is not beside it; fetch the missing shard")
            by_file[file] = read_file(shard)
        if name not in by_file[file]:
            raise UserError(
                f"{index} says {name!r} is in {file}, but it is not; index and shards do not belong together"
            )
        found[name] = by_file[file][name]
    return found


def _only_file(folder: Path) -> Path:
    for name in _SINGLE:
        if (folder / name).exists():
            return folder / name
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise UserError(f"{folder} has {len(files)} .safetensors files and no {_INDEX}; name one of them")
    raise UserError(f"{folder} has no .safetensors file")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object")
    return value


def _why_not(path: Path, size: int, start: bytes) -> str:
    if start.startswith(_LFS):
        return f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull`"
    if start[:2] == b"PK":
        return f"{path} is a zip archive (a torch checkpoint?) under the name of a safetensors file"
    if start[:4] == b"GGUF":
        return f"{path} is a GGUF file under the name of a safetensors file"
    return f"{path} ({size} bytes) is cut short, or not a safetensors file; fetch it again"
