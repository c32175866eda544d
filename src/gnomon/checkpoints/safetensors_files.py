"""Safetensors: headers, checked in full before anything is read.

Format: eight bytes (little-endian length of the header), the header as JSON, then the data (huggingface/safetensors,
README "Format").

The header is parsed here and not by the package's `safe_open`: its errors name no tensor, one dtype it does not know spoils
the file, and it maps the file, so that a file cut short while it is read ends the process (SIGBUS) and all that was read
counts as ours. Measured on safetensors 0.8.0: 200,000 headers take 1.0 s of CPU in both; 300 MB of weights read one by one
leave 20 MB resident here, 230-370 MB there.
"""

from __future__ import annotations

import gc
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from gnomon.checkpoints.checkpoint import DTYPES, Buffer, Checkpoint, Entry, read_tensor
from gnomon.checkpoints.file_kinds import wrong_format
from gnomon.errors import UserError
from gnomon.files import check_readable

_MAX_HEADER = 1 << 28  # 200,000 tensors take about 30 MB


def over(name: str, entries: dict[str, Entry], notes: tuple[str, ...] = ()) -> Checkpoint:
    """A checkpoint over tensors that lie at known places of files."""

    def load(key: str, buffer: Buffer | None, index: int | None) -> Tensor:
        return read_tensor(key, entries[key], buffer, index)

    return Checkpoint(name, entries, load, notes=notes)


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> Entry of one file, in the order of its bytes.

    Raises:
        UserError: the file is not safetensors, or is damaged.
    """
    # The collector would look through these small objects again and again, and find nothing: more than half the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _read_header(path)
    finally:
        if collecting:
            gc.enable()


def _read_header(path: Path) -> dict[str, Entry]:
    size = check_readable(path).stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise UserError(
                wrong_format(path, "a safetensors file")
                or f"{path} is not a safetensors file, or is cut off: it announces a header of {length} "
                f"bytes and has {size} in all. Download it again."
            )
        text = file.read(length)
    header = _parse(path, text)
    header.pop("__metadata__", None)
    start = 8 + length
    try:
        entries = sorted((_entry(path, name, item, start) for name, item in header.items()), key=_place)
        end, before = start, "the header"
        for name, entry in entries:
            if entry.offset + entry.nbytes > size:
                raise UserError(
                    f"{path} is truncated: {name!r} ends at byte {entry.offset + entry.nbytes - start} of the data, and there "
                    f"are only {size - start}. Download it again."
                )
            if entry.offset != end:
                raise _Damaged(f"{before!r} and {name!r} {'overlap' if entry.offset < end else 'leave a hole'}")
            end, before = entry.offset + entry.nbytes, name
        if end != size:
            raise _Damaged(f"its tensors end at byte {end} and the file at {size}")
    except _Damaged as damage:
        raise UserError(f"{path} is damaged: {damage}. Download it again.") from None
    return dict(entries)


class _Damaged(Exception):
    pass


def _place(item: tuple[str, Entry]) -> tuple[int, int]:
    return item[1].offset, item[1].nbytes


def _entry(path: Path, name: str, item: Any, start: int) -> tuple[str, Entry]:
    where = f"the header entry of {name!r}"
    if not isinstance(item, dict):
        raise _Damaged(f"{where} is not an object")
    dtype, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if not isinstance(dtype, str):
        raise _Damaged(f"{where} has no dtype")
    if not (isinstance(shape, list) and len(shape) < 65 and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)):
        raise _Damaged(f"{where} has no valid shape")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets)):
        raise _Damaged(f"{where} has no valid data_offsets")
    first, last = offsets
    if not 0 <= first <= last:
        raise _Damaged(f"{where} runs from byte {first} to {last}")
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != last - first:
        raise _Damaged(f"{where} says {dtype} {shape} and takes {last - first} bytes")
    return name, Entry(tuple(shape), dtype, last - first, str(path), start + first)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        items = dict(pairs)
        if len(items) != len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise UserError(f"{path} lists {twice!r} twice in its header. It is damaged; download it again.")
        return items

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(
            wrong_format(path, "a safetensors file")
            or f"{path} is not a safetensors file, or is damaged: its header is not JSON "
            f"({type(error).__name__}). Download it again."
        ) from None
    if not isinstance(header, dict):
        raise UserError(f"{path} is damaged: its header is not a JSON object. Download it again.")
    return header
