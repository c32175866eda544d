"""GGUF files, through the package `gguf`: quantised blocks become fp32, one tensor at a time."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnomon.checkpoints.checkpoint import Buffer, Checkpoint, Entry, wrong_format
from gnomon.errors import UserError

# The converter to GGUF reorders the rows of q and k inside each head for these architectures (its rotary
# embedding pairs neighbours, Hugging Face's pairs halves). Undone here, so that both forms of a model agree.
_PERMUTED = {"llama"}


def open_files(paths: list[Path]) -> Checkpoint:
    """One .gguf file, or the numbered parts of one. `config` is its metadata, arrays left out.

    Raises:
        UserError: the package is missing, or a file is not GGUF or is damaged.
    """
    gguf = _package()
    entries: dict[str, Entry] = {}
    tensors: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for path in paths:
        reader = _reader(gguf, path)
        config = {**_metadata(gguf, reader), **config}
        for tensor in sorted(reader.tensors, key=lambda tensor: int(tensor.data_offset)):
            shape = tuple(int(n) for n in reversed(tensor.shape))
            kind, nbytes = tensor.tensor_type.name, int(tensor.n_bytes)
            entries[tensor.name] = Entry(shape, kind, nbytes, str(path), int(tensor.data_offset))
            tensors[tensor.name] = tensor
    architecture = config.get("general.architecture", "")
    heads = {
        f"attn_{letter}.weight": config.get(f"{architecture}.attention.{key}")
        for letter, key in (("q", "head_count"), ("k", "head_count_kv"))
    }

    def load(name: str, buffer: Buffer | None, index: int | None) -> Tensor:
        tensor, entry = tensors[name], entries[name]
        data, shape = (tensor.data, entry.shape) if index is None else (tensor.data[index], entry.shape[1:])
        try:
            values = gguf.quants.dequantize(data, tensor.tensor_type)
        except (NotImplementedError, ValueError, KeyError) as error:
            raise UserError(
                f"{entry.file}: {name!r} is stored as {entry.dtype}, which the package gguf cannot turn back "
                f"({error}). Use a file with another quantisation (Q4_K, Q8_0, F16 …)."
            ) from None
        values = np.array(values, dtype=np.float32).reshape(shape)
        _release(tensor.data)
        count = heads.get(name.partition(".")[2].partition(".")[2])
        if architecture in _PERMUTED and isinstance(count, int):
            values = unpermute(values, count)
        return torch.from_numpy(values)

    return Checkpoint(str(paths[0]), entries, load, config)


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """From neighbouring rotary pairs back to halves: (head, pair, 2, ·) -> (head, 2, pair, ·)."""
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def _reader(gguf: Any, path: Path) -> Any:
    if path.stat().st_size == 0 or path.open("rb").read(4) != b"GGUF":
        raise UserError(wrong_format(path, "GGUF") or f"{path} is not a GGUF file: it starts otherwise.")
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # the package raises whatever numpy raises on a damaged file
        raise UserError(f"{path} is a damaged GGUF file ({error}). Download it again.") from None
    size = path.stat().st_size
    for tensor in reader.tensors:
        if int(tensor.data_offset) + int(tensor.n_bytes) > size:
            raise UserError(f"{path} is truncated inside the tensor {tensor.name!r}. Download it again.")
    return reader


def _metadata(gguf: Any, reader: Any) -> dict[str, Any]:
    array = gguf.GGUFValueType.ARRAY
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    return {name: field.contents() for name, field in fields.items() if field.types[:1] != [array]}


def _release(data: np.ndarray) -> None:
    base: Any = data
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None) if not isinstance(base, np.memmap) else base._mmap
    if base is not None and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)


def _package() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise UserError(
            f'reading GGUF needs the package "gguf" ({error}). Install it: pip install "gnomon[gguf]"'
        ) from None
    return gguf
