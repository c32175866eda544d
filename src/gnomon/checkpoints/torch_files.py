"""Torch files (.bin, .pt, .pth), read with `weights_only=True` and never otherwise: no code in them runs."""

from __future__ import annotations

import ctypes
import mmap
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon.checkpoints.checkpoint import Buffer, Checkpoint, Entry, dtype_name, wrong_format
from gnomon.checkpoints.safetensors_files import read_index
from gnomon.errors import UserError

# What training scripts wrap a state dict in.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "weights", "params", "network")


def open_file(path: Path) -> Checkpoint:
    """One torch file.

    Raises:
        UserError: not a torch file, damaged, or it asks for code to be run.
    """
    tensors, notes = _load(path)
    return _checkpoint(str(path), {name: (tensor, str(path)) for name, tensor in tensors.items()}, notes)


def open_index(index: Path) -> Checkpoint:
    """Shards `pytorch_model-0000i-of-0000n.bin` listed by an index, which is honoured as for safetensors."""
    folder, weight_map = index.parent, read_index(index)
    found: dict[str, tuple[Tensor, str]] = {}
    notes: list[str] = []
    for shard in sorted(set(weight_map.values())):
        tensors, said = _load(folder / shard)
        notes += said
        ours = (name for name in tensors if weight_map.get(name) == shard)
        found |= {name: (tensors[name], str(folder / shard)) for name in ours}
    if missing := [name for name in weight_map if name not in found]:
        raise UserError(
            f"{index.name} places {missing[0]!r} in {weight_map[missing[0]]}, which does not hold it "
            f"({len(missing)} such tensors). Download all files of {folder} again."
        )
    return _checkpoint(str(folder), found, notes)


def _checkpoint(name: str, tensors: Mapping[str, tuple[Tensor, str]], notes: list[str]) -> Checkpoint:
    entries = {
        key: Entry(tuple(at.shape), dtype_name(at.dtype), at.numel() * at.element_size(), file)
        for key, (at, file) in tensors.items()
    }

    maps = {file: _maps(Path(file)) for file in {entry.file for entry in entries.values()}}

    def load(key: str, buffer: Buffer | None, index: int | None) -> Tensor:
        tensor, file = tensors[key]
        tensor = tensor if index is None else tensor[index]
        copy = tensor.clone(memory_format=torch.preserve_format)
        _release(tensor, maps[file])
        return copy

    return Checkpoint(name, entries, load, notes=tuple(notes))


def _load(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    notes = []
    if not (mapped := zipfile.is_zipfile(path)):
        _refuse_others(path)
        notes = [f"{path.name} is in torch's format from before 1.6 and was read whole"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises many classes on a damaged file
        asked = re.search(r"GLOBAL ([\w.]+)|unrecognized function <?([\w. ]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and asked:
            raise UserError(
                f"{path} is not only weights: it asks to run {asked[1] or asked[2]!r} when loaded, and was "
                "not "
                "loaded. If you trust its author, load it yourself and save its tensors as safetensors."
            ) from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise UserError(
            f"{path} is damaged or is not a torch checkpoint ({reason}). If it was downloaded, do so again."
        ) from None
    tensors = _tensors(value)
    if not tensors:
        raise UserError(f"{path} holds no tensors but a {type(value).__name__}. Pass a file of weights.")
    return tensors, notes


def _tensors(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a state dict, wherever a training script has put it."""
    if not isinstance(value, Mapping):
        return {}
    if not any(isinstance(item, Tensor) for item in value.values()):
        for key in _WRAPPERS:
            if isinstance(value.get(key), Mapping):
                return _tensors(value[key])
    found = {}
    for key, item in value.items():
        if isinstance(item, Tensor):
            found[f"{prefix}{key}"] = item
        elif isinstance(item, Mapping):
            found |= _tensors(item, f"{prefix}{key}.")
    return found


def _refuse_others(path: Path) -> None:
    with open(path, "rb") as file:
        head = file.read(64)
    # CTranslate2: a version, then the length and the name of a model specification.
    if re.match(rb"[\x01-\x20]\x00\x00\x00.\x00[A-Za-z0-9]+Spec\x00", head, re.DOTALL):
        raise UserError(f"{path} is a CTranslate2 model, not a torch checkpoint. Pass the model it was converted from.")
    if head[:1] != b"\x80" and (what := wrong_format(path, "a torch file")):
        raise UserError(what)
    if head[8:9] == b"{":
        raise UserError(f"{path} looks like safetensors under another name. Rename it to .safetensors.")
    if head[:1] != b"\x80":
        raise UserError(f"{path} is not a torch checkpoint: neither a zip file nor a pickle.")


def _release(tensor: Tensor, maps: list[range]) -> None:
    """Tell the system that the pages of a mapped tensor may go; they would count as ours otherwise.

    Only pages inside a map of the file are dropped: dropping any other memory would lose its numbers.
    """
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if end > start and tensor.is_contiguous() and any(start in one and end - 1 in one for one in maps):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _maps(path: Path) -> list[range]:
    """Where this file is mapped in our memory; empty where the system does not tell (only Linux does)."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    ours = (line.split(maxsplit=5) for line in lines if line.endswith(str(path.resolve())))
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in ours]
