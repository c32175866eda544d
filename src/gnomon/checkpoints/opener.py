"""Open a checkpoint of any kind without loading it: which files count, and which reader they need."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gnomon.checkpoints import gguf_files, lora, quantised, safetensors_files, shard_index, torch_files, whole_models
from gnomon.checkpoints.checkpoint import Checkpoint, from_module, from_tensors, shown
from gnomon.checkpoints.hub_download import fetched, is_hub_name
from gnomon.errors import UserError, refused
from gnomon.files import check_readable, read_json
from gnomon.run_folder import is_run, newest_checkpoint

_TORCH = (".bin", ".pt", ".pth", ".ckpt")
_TRAINING = ("optimizer", "training_args", "rng_state", "scheduler")
_FOREIGN = {
    ".h5": "Keras or TensorFlow",
    ".msgpack": "Flax",
    ".onnx": "ONNX",
    ".npz": "numpy",
    ".tflite": "TensorFlow Lite",
    ".mlmodel": "Core ML",
}


def open_checkpoint(source: Any, *, base: Any = None, config: Mapping[str, Any] | None = None) -> Checkpoint:
    """Names, shapes and dtypes of a model, with its tensors readable one at a time.

    Args:
        source: a folder or a file (safetensors, torch, GGUF; sharded or not; a LoRA folder; a run folder of
            ours, of which the last checkpoint is taken), a Hugging Face id `owner/name`, a live module, a
            mapping of tensors, or a `Checkpoint` (returned as it is).
        base: for a LoRA folder, the model its update is added to (any source); without it the update
            stands alone.
        config: used instead of config.json.

    Raises:
        UserError: nothing readable there; the message names the file, what is wrong, and the fix.
    """
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, torch.nn.Module):
        return from_module(source)
    if isinstance(source, Mapping):
        return quantised.dequantised(whole_models.checked(from_tensors(source, config=config)))
    try:
        checkpoint, adapter = _open_path(source, config)
    except OSError as error:
        raise refused(error) or error from None
    lora.check_known(checkpoint, adapter)
    if lora.is_adapter(checkpoint):
        opened = open_checkpoint(base) if base is not None else None
        return lora.update(quantised.dequantised(checkpoint), adapter, opened)
    if base is not None:
        raise UserError(f"{source} holds no LoRA factors: there is nothing to add to a base. Leave it out.")
    return quantised.dequantised(checkpoint)


def _open_path(source: Any, config: Mapping[str, Any] | None) -> tuple[Checkpoint, dict[str, Any]]:
    """The checkpoint as stored, and the contents of adapter_config.json."""
    path = Path(source).expanduser()
    if not os.path.lexists(path):
        path = _from_hub(str(source))
    path = newest_checkpoint(path) if is_run(path) else path
    folder = path if path.is_dir() else path.parent
    checkpoint = _open_folder(path) if path.is_dir() else _open_file(path)
    known = config or checkpoint.config or _config(folder / "config.json")
    known = known or whole_models.meta_config(_config(folder / "params.json"))
    checkpoint = whole_models.checked(dataclasses.replace(checkpoint, name=str(source), config=dict(known)))
    return checkpoint, _config(folder / "adapter_config.json")


def _open_folder(folder: Path) -> Checkpoint:
    # Links to what is gone, pipes and the like are told when they are opened.
    files = {item.name: item for item in sorted(folder.iterdir()) if not item.is_dir()}
    if ".metadata" in files and any(name.endswith(".distcp") for name in files):
        from gnomon.checkpoints import dcp_folders  # torch.distributed.checkpoint takes a while to import

        return dcp_folders.open_folder(folder)
    indices = [name for name in files if name.endswith(".safetensors.index.json")]
    if chosen := _only(indices, "model.safetensors.index.json", folder):
        return _open_file(files[chosen])
    tensors = [name for name in files if name.endswith(".safetensors") and not name.startswith(_TRAINING)]
    numbered = [files[name] for name in tensors if "-of-" in name]
    if len(numbered) > 1 and shard_index.whole_set(numbered):
        found, notes = shard_index.from_numbers(numbered, safetensors_files.read_header)
        return safetensors_files.over(str(folder), found, notes)
    if chosen := _only(tensors, ("model.safetensors", "adapter_model.safetensors"), folder):
        return _passing_over(_open_file(files[chosen]), tensors, chosen)
    indices = [name for name in files if name.endswith(".bin.index.json")]
    if chosen := _only(indices, "pytorch_model.bin.index.json", folder):
        return _open_file(files[chosen])
    torches = [name for name in files if name.endswith(_TORCH) and not name.startswith(_TRAINING)]
    if len(torches) > 1:
        whole_models.check_parts(files[torches[0]])
    if chosen := _only(torches, ("pytorch_model.bin", "adapter_model.bin", "model.bin", "model.pt"), folder):
        return _passing_over(_open_file(files[chosen]), torches, chosen)
    if ggufs := [files[name] for name in files if name.endswith(".gguf")]:
        if len(ggufs) == 1 or all(re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name) for path in ggufs):
            return gguf_files.open_files(ggufs)
        raise UserError(f"{folder} holds several GGUF files ({shown(folder)}). Pass the path of one.")
    hint = next((_convert(files[name]) for name in files if Path(name).suffix in _FOREIGN), "")
    raise UserError(f"{folder} holds no checkpoint (*.safetensors, *.bin, *.pt, *.gguf) but {shown(folder)}. " + hint)


def _open_file(path: Path) -> Checkpoint:
    whole_models.check_parts(check_readable(path))
    notes: list[str] = []
    if path.name.endswith(".safetensors.index.json"):
        return safetensors_files.over(str(path.parent), *shard_index.from_index(path, safetensors_files.read_header))
    if path.name.endswith(".index.json"):
        found, said = shard_index.from_index(path, lambda shard: torch_files.read_file(shard, notes))
        return torch_files.over(str(path.parent), found, (*notes, *said))
    if path.suffix == ".safetensors":
        return safetensors_files.over(str(path), safetensors_files.read_header(path), shard_index.one_of_many(path))
    if path.suffix == ".gguf":
        return gguf_files.open_files([path])
    if path.suffix in _TORCH:
        stored = torch_files.read_file(path, notes)
        return torch_files.over(str(path), stored, (*notes, *shard_index.one_of_many(path)))
    raise UserError(f"{path} is no checkpoint (.safetensors, .bin, .pt, .gguf). {_convert(path)}")


def _convert(path: Path) -> str:
    kind = _FOREIGN.get(path.suffix)
    return f"{path.name} is a {kind} file: convert it to safetensors first." if kind else ""


def _only(names: list[str], preferred: str | tuple[str, ...], folder: Path) -> str | None:
    """The one of `names` to take; a usual name wins over others beside it."""
    for name in (preferred,) if isinstance(preferred, str) else preferred:
        if name in names:
            return name
    if len(names) > 1:
        some = ", ".join(names[:6])
        raise UserError(f"{folder} holds {some}, and none has the usual name. Pass the path of one.")
    return names[0] if names else None


def _passing_over(checkpoint: Checkpoint, names: list[str], chosen: str) -> Checkpoint:
    notes = tuple(f"{name} stands beside {chosen} and was passed over" for name in names if name != chosen)
    return dataclasses.replace(checkpoint, notes=checkpoint.notes + notes)


def _config(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    config = read_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object. Download it again, or remove it.")
    return config


def _from_hub(name: str) -> Path:
    if is_hub_name(name):
        return fetched(name)
    near = Path(name).expanduser().parent
    there = f" {near} holds {shown(near)}." if near.is_dir() else ""
    raise UserError(f"{name} does not exist.{there} Give a folder, a file, or a hub id `owner/name`.")
