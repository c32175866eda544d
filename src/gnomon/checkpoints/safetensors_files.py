"""Safetensors: one file, or shards with an index. Headers are checked in full before anything is read.

The header is parsed here and not by the safetensors package because we want errors that name the tensor, the
place of every tensor on disk (to read in file order), and plain reads instead of a map (to keep memory flat).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gnomon.checkpoints.checkpoint import DTYPES, Buffer, Checkpoint, Entry, read_tensor, wrong_format
from gnomon.errors import UserError

_MAX_HEADER = 1 << 28  # 200,000 tensors take about 30 MB
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[a-z]+)$")


def open_file(path: Path) -> Checkpoint:
    """One .safetensors file."""
    notes = ()
    if numbered := _NUMBERED.match(path.name):
        notes = (f"{path.name} is one of {int(numbered[3])} shards; only its tensors are seen",)
    return _checkpoint(path, read_header(path), notes)


def open_index(index: Path) -> Checkpoint:
    """Shards listed by an index. Each tensor is taken from the file the index names, and from no other.

    Raises:
        UserError: the index is not one, or a shard or a tensor it names is not there.
    """
    folder = index.parent
    weight_map = read_index(index)
    shards = {shard: read_header(folder / shard) for shard in sorted(set(weight_map.values()))}
    entries: dict[str, Entry] = {}
    stray = 0
    for shard, header in shards.items():
        for name, entry in header.items():
            if weight_map.get(name) == shard:
                entries[name] = entry
            else:
                stray += 1
    if missing := [name for name in weight_map if name not in entries]:
        name = missing[0]
        raise UserError(
            f"{index.name} places {name!r} in {weight_map[name]}, which does not hold it "
            f"({len(missing)} such tensors). Index and shards are of different versions; download all files "
            f"of {folder} again."
        )
    notes = [f"{stray} tensors in the shards are not in the index and were passed over"] * bool(stray)
    others = sorted(item.name for item in folder.glob("*.safetensors") if item.name not in shards)
    notes += [f"{name} is not in the index and was passed over" for name in others]
    return _checkpoint(folder, entries, tuple(notes))


def open_numbered(paths: list[Path]) -> Checkpoint:
    """Shards `…-00001-of-0000n.safetensors` whose index is lost.

    Raises:
        UserError: a number is missing, or two shards hold the same tensor.
    """
    entries: dict[str, Entry] = {}
    for path in paths:
        for name, entry in read_header(path).items():
            if name in entries:
                raise UserError(
                    f"{name!r} is in {Path(entries[name].file).name} and again in {path.name}, with no "
                    "index to say which counts. Fetch the file *.safetensors.index.json of this model."
                )
            entries[name] = entry
    note = "no index file; the shards were put together by their numbers"
    return _checkpoint(paths[0].parent, entries, (note,))


def whole_set(paths: list[Path]) -> bool:
    """Whether these files are the shards 1…n of one set.

    Raises:
        UserError: they belong to one set, and some are missing.
    """
    found = [_NUMBERED.match(path.name) for path in paths]
    if not all(found) or len({(one[1], one[3]) for one in found if one}) != 1:
        return False
    numbers = {int(one[2]) for one in found if one}
    total = int(found[0][3]) if found[0] else 0
    if missing := sorted(set(range(1, total + 1)) - numbers):
        which = ", ".join(map(str, missing[:8]))
        raise UserError(
            f"{paths[0].parent} holds {len(numbers)} of {total} shards; missing: number {which}. "
            "Download them, or pass the path of one shard to look at that alone."
        )
    return True


def read_index(index: Path) -> dict[str, str]:
    """`weight_map` of an index file, checked: every shard named is a plain file beside it."""
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        assert isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise UserError(
            f"{index} is not an index ({type(error).__name__}): expected JSON with a `weight_map` from "
            "tensor to file name. Download it again, or remove it if the model is one file."
        ) from None
    for shard in set(weight_map.values()):
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise UserError(f"{index.name} points outside its folder: {shard!r}. Do not trust it.")
    missing = sorted(shard for shard in set(weight_map.values()) if not (index.parent / shard).is_file())
    if missing:
        single = index.parent / index.name.removesuffix(".index.json")
        way_out = f" Or pass {single.name} itself, if it is the whole model." if single.is_file() else ""
        raise UserError(
            f"{index.name} names {len(missing)} file(s) that are not there: {', '.join(missing[:4])}. "
            f"Download them into {index.parent}.{way_out}"
        )
    return weight_map


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> Entry of one file, in the order of its bytes.

    Raises:
        UserError: the file is not safetensors, or is damaged.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise UserError(
                wrong_format(path, "safetensors")
                or f"{path} is not a safetensors file, or is cut off: it announces a header of {length} "
                f"bytes and has {size} in all. Download it again."
            )
        text = file.read(length)
    header = _parse(path, text)
    header.pop("__metadata__", None)
    start, data = 8 + length, size - 8 - length
    entries = {name: _entry(path, name, item, start, data) for name, item in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    end, before = start, ""
    for name, entry in entries.items():
        if entry.offset != end:
            kind = "overlap" if entry.offset < end else "leave a hole"
            both = f"{before or 'the header'!r} and {name!r}"
            raise UserError(f"{path} is damaged: {both} {kind}. Download it again.")
        end, before = entry.offset + entry.nbytes, name
    if end != size:
        raise UserError(f"{path} is damaged: its tensors end at byte {end} and the file at {size}. Download it again.")
    return entries


def _entry(path: Path, name: str, item: Any, start: int, data: int) -> Entry:
    def damaged(why: str) -> UserError:
        return UserError(f"{path} is damaged: the header entry of {name!r} {why}. Download it again.")

    if not isinstance(item, dict):
        raise damaged("is not an object")
    dtype, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if not isinstance(dtype, str):
        raise damaged("has no dtype")
    if not (isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)):
        raise damaged("has no valid shape")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets)):
        raise damaged("has no valid data_offsets")
    first, last = offsets
    if not 0 <= first <= last:
        raise damaged(f"runs from byte {first} to {last}")
    if last > data:
        raise UserError(
            f"{path} is truncated: {name!r} ends at byte {last} of the data, and there are only {data}. "
            "Download it again."
        )
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != last - first:
        raise damaged(f"says {dtype} {shape} and takes {last - first} bytes")
    return Entry(tuple(shape), dtype, last - first, str(path), start + first)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        items = dict(pairs)
        if len(items) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{path} lists {twice!r} twice in its header. It is damaged; download it again.")
        return items

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(
            wrong_format(path, "safetensors")
            or f"{path} is not a safetensors file, or is damaged: its header is not JSON "
            f"({type(error).__name__}). Download it again."
        ) from None
    if not isinstance(header, dict):
        raise UserError(f"{path} is damaged: its header is not a JSON object. Download it again.")
    return header


def _checkpoint(path: Path, entries: Mapping[str, Entry], notes: tuple[str, ...] = ()) -> Checkpoint:
    def load(name: str, buffer: Buffer | None, index: int | None) -> Tensor:
        return read_tensor(name, entries[name], buffer, index)

    return Checkpoint(str(path), entries, load, notes=notes)
