"""Checkpoints: a folder that is whole or not there, of safetensors and JSON only.

checkpoints/step-00000300/
    model.safetensors        weights by parameter name
    config.json              the model's settings
    optimizer.safetensors    optimizer state, `<entry>/<parameter name>`
    tracker.safetensors      what the continuity tracker remembers, where the recipe has one
    state.json               step, tokens, seconds, and what of the optimizer is not a tensor
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gnomon.continuity import Tracker
from gnomon.errors import UserError
from gnomon.files import atomic_folder, read_json, remove_partials, write_json
from gnomon.models.config import TransformerConfig
from gnomon.train.recipe import from_dict, to_dict


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    keep: int,
    tracker: Tracker | None = None,
) -> Path:
    """Write `checkpoints/step-…` under the run folder, then remove all but the newest `keep`."""
    path = folder / "checkpoints" / f"step-{progress['step']:08d}"
    if path.exists():
        return path
    tensors, rest = split_state(optimizer.state_dict())
    with atomic_folder(path) as partial:
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, partial / "model.safetensors")
        save_file(tensors, partial / "optimizer.safetensors")
        if tracker is not None:
            remembered = tracker.state_dict()
            flat = {f"{key}/{name}": x.contiguous() for key, part in remembered.items() for name, x in part.items()}
            save_file(flat, partial / "tracker.safetensors")
        write_json(partial / "config.json", {"model_type": "gnomon", **to_dict(model.config)})
        write_json(partial / "state.json", {**progress, "optimizer": rest})
    for old in list_checkpoints(folder)[:-keep] if keep else []:
        shutil.rmtree(old)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    found = [p for p in (folder / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name.split("-")[1]))


def resume(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, tracker: Tracker | None = None
) -> dict[str, Any] | None:
    """Load the newest checkpoint into model, optimizer and tracker; returns its progress, or None when there is none.

    Raises:
        UserError: the checkpoint is damaged or belongs to other parameters.
    """
    if (folder / "checkpoints").exists():
        remove_partials(folder / "checkpoints")
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        return None
    path = checkpoints[-1]
    load_weights(model, path)
    progress = read_json(path / "state.json")
    rest = progress.pop("optimizer")
    ours = [name for group in optimizer.state_dict()["param_groups"] for name in group["param_names"]]
    theirs = [name for group in rest["param_groups"] for name in group["param_names"]]
    if ours != theirs:
        moved = next(i for i, pair in enumerate(zip(ours + [""], theirs + [""])) if pair[0] != pair[1])
        raise UserError(
            f"{path}: the optimizer's parameters are not the model's, or not in its order; the first difference is at "
            f"place {moved}: {(theirs + ['nothing'])[moved]!r} in the checkpoint, {(ours + ['nothing'])[moved]!r} here"
        )
    optimizer.load_state_dict(join_state(read_tensors(path / "optimizer.safetensors"), rest))
    if tracker is not None:
        remembered: dict[str, dict[str, Tensor]] = {"start": {}, "sum": {}, "first": {}}
        for place, tensor in read_tensors(path / "tracker.safetensors").items():
            key, name = place.split("/", 1)
            remembered[key][name] = tensor
        tracker.load_state_dict(remembered)
    return progress


def load_weights(model: nn.Module, path: Path) -> None:
    """Load `model.safetensors` of a checkpoint folder; every tensor must be there with its shape.

    Raises:
        UserError: the file is damaged, or its names or shapes differ from the model's.
    """
    file = path / "model.safetensors"
    tensors = read_tensors(file)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    given = {name: tuple(t.shape) for name, t in tensors.items()}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise UserError(
                f"{file}: {name!r} has shape {given.get(name)}, the model expects {expected.get(name)}. "
                "The checkpoint was made with other model settings."
            )
    model.load_state_dict(tensors)


def load_config(path: Path) -> TransformerConfig:
    """The model settings of a checkpoint folder."""
    values = read_json(path / "config.json")
    if values.pop("model_type", None) != "gnomon":
        raise UserError(f"{path / 'config.json'} is not a gnomon model; its model_type should be 'gnomon'")
    return from_dict(values, TransformerConfig)


def read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(
            f"{file} cannot be read ({error}). The folder was damaged after it was written; remove it to go on from "
            "the checkpoint before."
        ) from error


def split_state(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state_dict as tensors by `<entry>/<parameter name>` and a JSON-able rest."""
    names = {
        index: name for group in state["param_groups"] for index, name in zip(group["params"], group["param_names"])
    }
    tensors, numbers = {}, {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{key}/{names[index]}"] = value.contiguous()
            else:
                numbers[f"{key}/{names[index]}"] = value
    return tensors, {"param_groups": state["param_groups"], "numbers": numbers}


def join_state(tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `split_state`."""
    index = {name: i for group in rest["param_groups"] for i, name in zip(group["params"], group["param_names"])}
    state: dict[int, dict[str, Any]] = {}
    for path, value in {**tensors, **rest["numbers"]}.items():
        key, name = path.split("/", 1)
        state.setdefault(index[name], {})[key] = value
    return {"state": state, "param_groups": rest["param_groups"]}
