"""Folders of torch.distributed.checkpoint (`.metadata` and `*.distcp`), of any number of processes, read by one.

The tensors are read by torch's own reader, which loads them with `weights_only=True`. The metadata it unpickles whatever they
ask for; here they may only name torch's own records of tensors.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.api import CheckpointException

from gnomon.checkpoints.checkpoint import Buffer, Checkpoint, Entry, dtype_name
from gnomon.errors import UserError
from gnomon.files import check_readable

METADATA = ".metadata"
_RECORDS = {
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
    "StorageMeta", "_MEM_FORMAT_ENCODING",
}  # fmt: skip


def open_folder(folder: Path) -> Checkpoint:
    """All tensors of a folder; what else was saved with them is left out.

    Raises:
        UserError: the metadata are damaged, ask for code to be run, or name a file that is not there.
    """
    reader = _Reader(folder)
    entries: dict[str, Entry] = {}
    places: dict[str, tuple[str, int]] = {}
    try:
        for index, info in reader.metadata.storage_data.items():
            if Path(info.relative_path).name != info.relative_path:
                raise UserError(f"{folder / METADATA} points outside its folder: {info.relative_path!r}. Do not trust it.")
            places.setdefault(index.fqn, (str(folder / info.relative_path), int(info.offset)))
        for name, item in reader.metadata.state_dict_metadata.items():
            if isinstance(item, records.TensorStorageMetadata):
                shape, dtype = tuple(int(n) for n in item.size), item.properties.dtype
                file, offset = places[name]
                entries[name] = Entry(shape, dtype_name(dtype), item.size.numel() * dtype.itemsize, file, offset)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder / METADATA} is damaged ({type(error).__name__}: {error}). Copy the folder again.") from None
    for file in sorted({entry.file for entry in entries.values()}):
        check_readable(file)
    if not entries:
        raise UserError(f"{folder} holds no tensors. Give the folder of a model's checkpoint.")

    def load(name: str, buffer: Buffer | None, index: int | None) -> Tensor:
        properties = reader.metadata.state_dict_metadata[name].properties
        target = torch.empty(entries[name].shape, dtype=properties.dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is one process
                dcp.load({name: target}, storage_reader=reader, no_dist=True)
        except (Exception, CheckpointException) as error:  # of many kinds on a damaged file; torch's own is no Exception
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise UserError(f"{entries[name].file}: {name!r} cannot be read ({reason[0][:200]}). Copy the folder again.") from None
        return target if index is None else target[index]

    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].file, item[1].offset)))
    return Checkpoint(str(folder), ordered, load)


class _Reader(filesystem.FileSystemReader):
    def __init__(self, folder: Path):
        super().__init__(folder)
        path = check_readable(folder / METADATA)
        try:
            with open(path, "rb") as file:
                self.metadata: Any = _Records(file).load()
        except UserError:
            raise
        except Exception as error:  # as of any damaged pickle
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}). Copy the folder again.") from None
        if not isinstance(self.metadata, records.Metadata):
            raise UserError(f"{path} is no metadata of torch.distributed.checkpoint but a {type(self.metadata).__name__}.")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self.metadata


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == records.__name__ and name in _RECORDS:
            return getattr(records, name)
        if module == filesystem.__name__ and name in ("_StorageInfo", "_StoragePrefix"):
            return getattr(filesystem, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if module.startswith("pathlib"):
            return PurePosixPath
        raise UserError(f"the metadata ask to run '{module}.{name}' and were not loaded. Do not trust this folder.")
