"""GGUF files: quantised blocks become fp32 through the package `gguf`, one tensor at a time.

The header is read here: the package's reader makes an array of every word of the vocabulary (seconds, and hundreds of MB), and a
damaged count sends it round for ever. Format: ggml-org/ggml, docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from gnomon.checkpoints.checkpoint import Buffer, Checkpoint, Entry
from gnomon.checkpoints.file_kinds import wrong_format
from gnomon.errors import UserError
from gnomon.files import check_readable

# The converter to GGUF reorders the rows of q and k inside each head for these architectures (its rotary
# embedding pairs neighbours, Hugging Face's pairs halves). Undone here, so that both forms of a model agree.
PERMUTED = {"llama", "granite", "granitemoe"}

# struct codes of the scalar types of metadata, by number; 8 is a string, 9 an array.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def open_files(paths: list[Path]) -> Checkpoint:
    """One .gguf file, or the numbered parts of one. `config` is its metadata, arrays left out.

    Raises:
        UserError: the package is missing, or a file is not GGUF or is damaged.
    """
    gguf = _package()
    entries: dict[str, Entry] = {}
    config: dict[str, Any] = {}
    for path in paths:
        metadata, tensors = _header(gguf, path)
        config = {**metadata, **config}
        entries |= sorted(tensors.items(), key=lambda item: item[1].offset)
    architecture = config.get("general.architecture", "")
    heads = {
        f"attn_{letter}.weight": config.get(f"{architecture}.attention.{key}")
        for letter, key in (("q", "head_count"), ("k", "head_count_kv"))
    }

    def load(name: str, buffer: Buffer | None, index: int | None) -> Tensor:
        entry = entries[name]
        shape, nbytes, offset = entry.shape, entry.nbytes, entry.offset
        if index is not None:
            shape, nbytes = shape[1:], nbytes // shape[0]
            offset += index * nbytes
        kind = gguf.GGMLQuantizationType[entry.dtype]
        raw = np.fromfile(entry.file, np.uint8, nbytes, offset=offset)
        if len(raw) < nbytes:
            raise UserError(f"{entry.file} ends inside the tensor {name!r}. It is truncated; download it again.")
        try:
            values = gguf.quants.dequantize(raw.reshape(*shape[:-1], -1) if raw.size else raw, kind)
        except (NotImplementedError, ValueError, KeyError) as error:
            raise UserError(
                f"{entry.file}: {name!r} is stored as {entry.dtype}, which the package gguf cannot turn back "
                f"({error}). Use a file with another quantisation (Q4_K, Q8_0, F16 …)."
            ) from None
        values = values.astype(np.float32, copy=False).reshape(shape)
        count = heads.get(name.partition(".")[2].partition(".")[2])
        if architecture in PERMUTED and isinstance(count, int) and count and shape[0] % (2 * count) == 0:
            values = unpermute(values, count)
        return torch.from_numpy(values)

    return Checkpoint(str(paths[0]), entries, load, config)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """From neighbouring rotary pairs back to halves: (head, pair, 2, ·) -> (head, 2, pair, ·)."""
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def _header(gguf: Any, path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Metadata (the tokenizer's and arrays left out) and tensors of one file."""
    size = check_readable(path).stat().st_size
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(wrong_format(path, "a GGUF file") or f"{path} is not a GGUF file: it starts otherwise.")
        try:
            reader = _Reader(file, size)
            version = reader.number("I")
            if version not in (2, 3):
                kind = "of the other byte order" if version & 0xFFFF == 0 else f"of version {version}; 2 and 3 are known"
                raise UserError(f"{path} is a GGUF file {kind}. Convert the model again.")
            count, pairs = reader.number("Q"), reader.number("Q")
            metadata = {}
            for _ in range(pairs):
                key, value = reader.text(), reader.value(reader.number("I"))
                if value is not None and not key.startswith("tokenizer."):
                    metadata[key] = value
            found = []
            for _ in range(count):
                name, dims = reader.text(), reader.number("I")
                shape = tuple(reader.number("Q") for _ in range(min(dims, 5)))[::-1]
                found.append((name, shape, gguf.GGMLQuantizationType(reader.number("I")), reader.number("Q")))
            align = metadata.get("general.alignment", 32)
            start = -(-file.tell() // align) * align
        except (ValueError, OverflowError, TypeError, ZeroDivisionError, struct.error) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path} is a damaged GGUF file ({error}). Download it again.") from None
    entries = {}
    for name, shape, kind, offset in found:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        nbytes = math.prod(shape) // block * block_bytes
        if name in entries or not shape or len(shape) > 4 or shape[-1] % block:
            raise UserError(f"{path} is a damaged GGUF file: {name!r} of shape {shape} in blocks of {block}, or listed twice.")
        if start + offset + nbytes > size:
            raise UserError(f"{path} is truncated inside the tensor {name!r}. Download it again.")
        entries[name] = Entry(shape, kind.name, nbytes, str(path), start + offset)
    return metadata, entries


class _Reader:
    """Numbers and text of a header, none of which may reach beyond the file's end."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size = file, size

    def number(self, code: str) -> Any:
        width = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{code}", self.file.read(width))[0]

    def skip(self, nbytes: int) -> int:
        if nbytes > self.size - self.file.tell():
            raise ValueError(f"its header reaches {nbytes} bytes on from byte {self.file.tell()} of {self.size}")
        return nbytes

    def text(self) -> str:
        return self.file.read(self.skip(self.number("Q"))).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """A scalar or a text; None for an array, which is passed over."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ValueError(f"its metadata have a value of the unknown type {kind}")
            return self.number(_SCALARS[kind])
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            self.file.seek(self.skip(count * struct.calcsize(f"<{_SCALARS[inner]}")), 1)
        else:
            for _ in range(self.skip(count)):  # each takes eight bytes at least
                if inner == _STRING:
                    self.file.seek(self.skip(self.number("Q")), 1)
                else:
                    self.value(inner)
        return None


def _package() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise UserError(
            f'reading GGUF needs the package "gguf" ({error}). Install it: pip install "gnomon[gguf]"'
        ) from None
    return gguf
