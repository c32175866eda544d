"""Open a checkpoint of any kind without loading it: which files count, and which reader they need."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gnomon.checkpoints import gguf_files, lora, quantised, safetensors_files, torch_files
from gnomon.checkpoints.checkpoint import Buffer, Checkpoint, Entry, from_module, from_tensors, shown
from gnomon.errors import UserError
from gnomon.run_folder import is_run, newest_checkpoint

__all__ = ["Buffer", "Checkpoint", "Entry", "open_checkpoint"]

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
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


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
        return quantised.dequantised(from_tensors(source, config=config))
    path = Path(source).expanduser()
    if not path.exists():
        path = _from_hub(str(source))
    path = newest_checkpoint(path) if is_run(path) else path
    folder = path if path.is_dir() else path.parent
    adapter = folder / "adapter_config.json"
    checkpoint = _open_folder(path) if path.is_dir() else _open_file(path)
    known = config or checkpoint.config or _config(folder / "config.json")
    checkpoint = dataclasses.replace(checkpoint, name=str(source), config=dict(known))
    if any(".lora_" in name for name in checkpoint.entries):
        opened = open_checkpoint(base) if base is not None else None
        return lora.update(checkpoint, _config(adapter), opened)
    if base is not None:
        raise UserError(f"{source} holds no LoRA factors: there is nothing to add to a base. Leave it out.")
    return quantised.dequantised(checkpoint)


def _open_folder(folder: Path) -> Checkpoint:
    files = {item.name: item for item in sorted(folder.iterdir()) if item.is_file()}
    indices = [name for name in files if name.endswith(".safetensors.index.json")]
    if chosen := _only(indices, "model.safetensors.index.json", folder):
        return safetensors_files.open_index(files[chosen])
    tensors = [name for name in files if name.endswith(".safetensors")]
    numbered = [files[name] for name in tensors if "-of-" in name]
    if len(numbered) > 1 and safetensors_files.whole_set(numbered):
        return safetensors_files.open_numbered(numbered)
    if chosen := _only(tensors, ("model.safetensors", "adapter_model.safetensors"), folder):
        return _passing_over(safetensors_files.open_file(files[chosen]), tensors, chosen)
    indices = [name for name in files if name.endswith(".bin.index.json")]
    if chosen := _only(indices, "pytorch_model.bin.index.json", folder):
        return torch_files.open_index(files[chosen])
    torches = [name for name in files if name.endswith(_TORCH) and not name.startswith(_TRAINING)]
    if chosen := _only(torches, ("pytorch_model.bin", "adapter_model.bin", "model.bin", "model.pt"), folder):
        return _passing_over(torch_files.open_file(files[chosen]), torches, chosen)
    if ggufs := [files[name] for name in files if name.endswith(".gguf")]:
        if len(ggufs) == 1 or all(re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name) for path in ggufs):
            return gguf_files.open_files(ggufs)
        raise UserError(f"{folder} holds several GGUF files ({shown(folder)}). Pass the path of one.")
    hint = next((_convert(files[name]) for name in files if Path(name).suffix in _FOREIGN), "")
    raise UserError(f"{folder} holds no checkpoint (*.safetensors, *.bin, *.pt, *.gguf) but {shown(folder)}. " + hint)


def _open_file(path: Path) -> Checkpoint:
    if path.name.endswith(".index.json"):
        return (safetensors_files if ".safetensors." in path.name else torch_files).open_index(path)
    if path.suffix == ".safetensors":
        return safetensors_files.open_file(path)
    if path.suffix == ".gguf":
        return gguf_files.open_files([path])
    if path.suffix in _TORCH:
        return torch_files.open_file(path)
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
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}). Download it again, or remove it.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object. Download it again, or remove it.")
    return config


def _from_hub(name: str) -> Path:
    if not _HUB_ID.match(name):
        near = Path(name).expanduser().parent
        there = f" {near} holds {shown(near)}." if near.is_dir() else ""
        raise UserError(f"{name} does not exist.{there} Give a folder, a file, or a hub id `owner/name`.")
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f"{name} is no local path, and to fetch it the package huggingface-hub is needed ({error}). "
            'Install it: pip install "gnomon[hf]"'
        ) from None
    try:
        for weights in ("*.safetensors", "*.bin"):
            patterns = [weights, "*.index.json", "config.json", "adapter_config.json"]
            folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
            if any(folder.glob(weights)):
                break
    except Exception as error:  # offline, unknown, gated: each has its own class, all the user's to mend
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{name} is no local path and could not be fetched{offline}: {reason} "
            "Check the name and the connection, or download the model and give its folder."
        ) from None
    return folder
