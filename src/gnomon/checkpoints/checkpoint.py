"""What every kind of checkpoint looks like from above: names, shapes, dtypes, and one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnomon.errors import UserError, suggest
from gnomon.sharding import whole


class Entry(NamedTuple):
    """One tensor of a checkpoint: its shape, its dtype as stored ("BF16"), and its place in `file`."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str
    offset: int = 0


class Buffer:
    """Memory for one tensor at a time, used again and again: to read matrices of 117 MB into fresh pages takes three times
    as long (1.0 s in place of 0.3 s for five of them)."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        if len(self._bytes) < nbytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # free the old before asking for the new
            self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        return self._bytes[:nbytes]


@dataclass(frozen=True)
class Checkpoint:
    """Names and shapes of a model's tensors, and a way to read each when it is wanted.

    Attributes:
        name: what to call it (the path as given).
        entries: name -> Entry, in the order the bytes lie on disk, so that reading them in this order is one
            pass over the files.
        config: the contents of config.json, or GGUF metadata; empty when there is none.
        load: (name, buffer, index) -> tensor; use `read`.
        notes: what was found and passed over (stray files and the like).
    """

    name: str
    entries: Mapping[str, Entry]
    load: Callable[[str, Buffer | None, int | None], Tensor]
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def read(self, name: str, buffer: Buffer | None = None, index: int | None = None) -> Tensor:
        """The tensor `name`, dequantised if it was quantised, on the CPU.

        Args:
            buffer: memory to read into, which saves most of the time of a large read. The tensor is then
                valid until the buffer is used again; without one it has memory of its own.
            index: read only this entry of the first axis (one expert of many).

        Raises:
            UserError: no such tensor, or its bytes cannot be had; the message names file, tensor and fix.
        """
        if name not in self.entries:
            raise UserError(f"{self.name} has no tensor {name!r}. {suggest(name, self.entries)}")
        return self.load(name, buffer, index)

    def nbytes(self, names: Iterable[str]) -> int:
        return sum(self.entries[name].nbytes for name in names)


def from_tensors(tensors: Mapping[str, Any], name: str = "model", config: Mapping[str, Any] | None = None) -> Checkpoint:
    """A checkpoint over tensors that are in memory already; a sharded (DTensor) one is gathered when read."""
    entries = {
        key: Entry(tuple(value.shape), dtype_name(value.dtype), value.numel() * value.element_size(), name)
        for key, value in tensors.items()
    }

    def load(key: str, buffer: Buffer | None, index: int | None) -> Tensor:
        value = whole(tensors[key])
        value = value if index is None else value[index]
        if value.is_meta:
            raise UserError(f"{key} is on the meta device and holds no numbers. Load the weights first.")
        return value.cpu()

    return Checkpoint(name, entries, load, dict(config or {}))


def from_module(module: torch.nn.Module) -> Checkpoint:
    """A checkpoint over the parameters of a live module, tied ones under each of their names."""
    config: Any = getattr(module, "config", None)
    known: Any = config.to_dict() if hasattr(config, "to_dict") else config
    named = dict(module.named_parameters(remove_duplicate=False))
    return from_tensors(named, type(module).__name__, known if hasattr(known, "keys") else None)


def check_dense(tensor: Tensor, what: str) -> None:
    """Raise a `UserError` when the tensor is of a kind that holds no plain numbers."""
    if tensor.layout != torch.strided:
        raise UserError(f"{what} is stored as {str(tensor.layout).removeprefix('torch.')}. Save it with .to_dense().")
    if tensor.is_meta:
        raise UserError(f"{what} is on the meta device and holds no numbers. Load the weights first.")
    if tensor.is_quantized:
        raise UserError(f"{what} is a quantised torch tensor. Save it with .dequantize().")


def read_tensor(name: str, entry: Entry, buffer: Buffer | None, index: int | None = None) -> Tensor:
    """One tensor by positioned reads: nothing is mapped, so nothing of the file stays resident.

    Raises:
        UserError: a dtype torch does not know, or the file ends too early.
    """
    if entry.dtype not in DTYPES:
        raise UserError(f"{entry.file}: {name!r} is stored as {entry.dtype}, which gnomon cannot read.")
    if index is not None:
        part = entry.nbytes // entry.shape[0]
        entry = entry._replace(shape=entry.shape[1:], nbytes=part, offset=entry.offset + index * part)
    raw = buffer.take(entry.nbytes) if buffer else torch.empty(entry.nbytes, dtype=torch.uint8)
    view, done = raw.numpy().data, 0
    with open(entry.file, "rb", buffering=0) as file:
        file.seek(entry.offset)
        while done < entry.nbytes:
            count = file.readinto(view[done:])
            if not count:
                raise UserError(
                    f"{entry.file} ends inside the tensor {name!r}: {entry.nbytes - done} bytes are missing. "
                    "It is truncated, or was changed while it was read; download it again."
                )
            done += count
    return raw.view(DTYPES[entry.dtype]).reshape(entry.shape)


def size_text(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `BF16`, as safetensors writes it."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def shown(path: str | os.PathLike[str], limit: int = 6) -> str:
    """The names in a folder, for an error message."""
    names = sorted(item.name for item in Path(path).iterdir())
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more or "nothing"
