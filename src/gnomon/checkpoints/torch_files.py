"""Torch files (.bin, .pt, .pth), unpickled with `weights_only=True` and never otherwise: no code in them runs.

A torch file is a zip archive of a pickle (names, shapes, and which bytes are whose) and of the bytes themselves, stored as they
are. Only the pickle is loaded; the numbers are then read from their places in the file, as those of safetensors are. Mapping
the file instead leaves 300 MB resident after 300 MB of weights, reading leaves 20 MB, in the same time (0.15 s).
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnomon.checkpoints.checkpoint import Buffer, Checkpoint, Entry, check_dense, dtype_name, read_tensor
from gnomon.checkpoints.file_kinds import wrong_format
from gnomon.errors import UserError
from gnomon.files import check_readable

# What training scripts wrap a state dict in.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "weights", "params", "network")
_DEEPEST = 32


class Stored(NamedTuple):
    """A tensor of a file: without its numbers (on the meta device) where `entry.offset` says their place, else with them."""

    entry: Entry
    tensor: Tensor


def over(name: str, stored: Mapping[str, Stored], notes: tuple[str, ...] = ()) -> Checkpoint:
    """A checkpoint over what `read_file` found."""

    def load(key: str, buffer: Buffer | None, index: int | None) -> Tensor:
        entry, tensor = stored[key]
        tensor = tensor if index is None else tensor[index]
        if not (tensor.is_meta and entry.offset):
            check_dense(tensor, f"{entry.file}: {key!r}")
            return tensor.clone(memory_format=torch.preserve_format)
        # From the first number to the last, which for a transposed matrix or one cut out of a larger one are not side by side.
        reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
        if tensor.numel() * tensor.element_size() > max(1 << 20, Path(entry.file).stat().st_size):
            raise UserError(f"{entry.file}: {key!r} repeats {reach} numbers up to a shape of {tuple(tensor.shape)}.")
        place = entry.offset + (tensor.storage_offset() - stored[key].tensor.storage_offset()) * tensor.element_size()
        span = entry._replace(shape=(reach,), nbytes=reach * tensor.element_size(), offset=place)
        values = read_tensor(key, span, buffer).as_strided(tensor.shape, tensor.stride())
        return values.conj() if tensor.is_conj() else values

    return Checkpoint(name, {key: one.entry for key, one in stored.items()}, load, notes=notes)


def read_file(path: Path, notes: list[str] | None = None) -> dict[str, Stored]:
    """The tensors of one torch file, in the order of their bytes.

    Args:
        notes: what was passed over is added here.

    Raises:
        UserError: not a torch file, damaged, or it asks for code to be run.
    """
    notes = [] if notes is None else notes
    try:
        if zipped := zipfile.is_zipfile(check_readable(path)):
            _check_archive(path)
    except UserError:
        raise
    except Exception as error:  # of any kind on a damaged archive
        raise UserError(f"{path} is a damaged torch file ({type(error).__name__}: {error}). Download it again.") from None
    if not zipped:
        _check_pickle(path)
        notes.append(f"{path.name} is in torch's format from before 1.6 and was read whole")
    value = _unpickled(path, map_location="meta" if zipped else "cpu")
    tensors = _tensors(value, path, notes)
    if zipped and tensors and not any(_offset(tensor) for tensor in tensors.values()):
        # Before torch 2.11 a load without numbers does not tell their places: map the file.
        tensors = _tensors(_unpickled(path, map_location="cpu", mmap=True), path, [])
    if not tensors:
        raise UserError(f"{path} holds no tensors but a {type(value).__name__}. Pass a file of weights.")
    found = {key: Stored(_entry(path, tensor), tensor) for key, tensor in tensors.items()}
    return dict(sorted(found.items(), key=lambda item: item[1].entry.offset))


def _entry(path: Path, tensor: Tensor) -> Entry:
    size = tensor.element_size()
    offset = _offset(tensor)
    place = offset + int(tensor.storage_offset()) * size if offset else 0
    return Entry(tuple(tensor.shape), dtype_name(tensor.dtype), tensor.numel() * size, str(path), place)


def _offset(tensor: Tensor) -> int:
    """Where the bytes of a tensor's storage begin in its file; 0 where that is not known."""
    plain = tensor.layout == torch.strided and tensor.is_meta
    return tensor.untyped_storage()._checkpoint_offset or 0 if plain else 0


def _unpickled(path: Path, **how: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, weights_only=True, **how)
    except Exception as error:  # torch raises many classes on a damaged file
        asked = re.search(r"GLOBAL ([\w.]+)|unrecognized function <?([\w. ]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and asked:
            raise UserError(
                f"{path} is not only weights: it asks to run {asked[1] or asked[2]!r} when loaded, and was not loaded. "
                "If you trust its author, load it yourself and save its tensors as safetensors."
            ) from None
        if "Quantized" in str(error):
            raise UserError(f"{path} holds quantised torch tensors. Save them with .dequantize().") from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise UserError(
            f"{path} is damaged or is not a torch checkpoint ({reason}). If it was downloaded, do so again."
        ) from None


def _tensors(value: Any, path: Path, notes: list[str]) -> dict[str, Tensor]:
    """The tensors of a state dict, wherever a training script has put it."""
    wrapped: set[int] = set()
    while isinstance(value, Mapping) and not any(isinstance(item, Tensor) for item in value.values()):
        wrapper = next((key for key in _WRAPPERS if isinstance(value.get(key), Mapping) and value[key]), None)
        if wrapper is None or id(value) in wrapped:
            break
        wrapped.add(id(value))
        others = [str(key) for key, item in value.items() if key != wrapper and _collect(item)]
        if others:
            notes.append(f"{path.name} holds {', '.join(others)} beside {wrapper!r}, which was passed over")
        value = value[wrapper]
    return _collect(value)


def _collect(value: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    seen: set[int] = set()  # a mapping may hold itself
    waiting: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while waiting:
        path, item = waiting.pop()
        if isinstance(item, Tensor):
            found[".".join(path)] = item
        elif isinstance(item, Mapping) and id(item) not in seen and len(path) < _DEEPEST:
            seen.add(id(item))
            waiting += [((*path, str(key)), inner) for key, inner in reversed(list(item.items()))]
    return found


def _check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        names = {member.filename.partition("/")[2] for member in members}
        if "constants.pkl" in names:
            raise UserError(f"{path} is a TorchScript program, not a state dict. Save model.state_dict() instead.")
        if "data.pkl" not in names:
            raise UserError(f"{path} is a zip file but no torch checkpoint: it has no data.pkl. Unpack it, if it holds one.")
        if packed := next((member for member in members if member.compress_type != zipfile.ZIP_STORED), None):
            raise UserError(
                f"{path}: {packed.filename!r} is compressed, from {packed.file_size} bytes to {packed.compress_size}; torch "
                "stores its files as they are. It was made by another program or to do harm, and was not opened."
            )
        for member in members:
            if member.filename.partition("/")[2] == "byteorder" and archive.read(member) != b"little":
                raise UserError(f"{path} was written on a machine of the other byte order. Load it there and save it again.")


def _check_pickle(path: Path) -> None:
    with open(path, "rb") as file:
        head = file.read(4)
    if head == b"PK\x03\x04":
        raise UserError(f"{path} is cut short: it begins as a torch file, and its end is missing. Download it again.")
    if head[:1] != b"\x80":
        raise UserError(
            wrong_format(path, "a torch file") or f"{path} is not a torch checkpoint: neither a zip file nor a pickle."
        )
