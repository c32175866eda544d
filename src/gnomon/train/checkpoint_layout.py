"""Checkpoints: a folder that is whole or not there, of safetensors and JSON only.

checkpoints/step-00000300/
    model.safetensors        weights by parameter name
    config.json              the model's settings
    optimizer.safetensors    optimizer state, `<entry>/<parameter name>`
    monitor.safetensors      what the monitor remembers, `<kind>/<name>`
    state.json               step, tokens, seconds, and what of the optimizer is not a tensor
    fingerprints.json        size and SHA-256 of every file, checked before anything is loaded
checkpoints/latest           a link to the newest, for people; nothing here reads it

Several processes write `shards/` in place of the optimizer's and monitor's files (`gnomon.train.sharded_saving`). Either kind is
resumed by any number of processes and any strategy.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save_file as safetensors_save
from torch import Tensor, nn

from gnomon import sharding
from gnomon.errors import UserError
from gnomon.files import read_json, write_json
from gnomon.models.config import TransformerConfig
from gnomon.monitor import Monitor
from gnomon.run_folder import CHECKPOINTS, checkpoint_folders
from gnomon.train.distributed import ALONE, Ranks
from gnomon.train.recipe import from_dict, to_dict


def seal(partial: Path, config: TransformerConfig, state: dict[str, Any]) -> None:
    """Add what is not a tensor, and then the fingerprints of all that is there."""
    write_json(partial / "config.json", {"model_type": "gnomon", **to_dict(config)})
    write_json(partial / "state.json", state)
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    write_json(partial / "fingerprints.json", {p.relative_to(partial).as_posix(): fingerprint(p) for p in files})


def tidy(folder: Path, keep: int) -> None:
    """Point `latest` to the newest checkpoint and remove all but the newest `keep` (0 keeps all)."""
    whole = checkpoint_folders(folder)
    link = folder / CHECKPOINTS / ".latest.new"
    link.unlink(missing_ok=True)
    link.symlink_to(whole[-1].name)
    os.replace(link, folder / CHECKPOINTS / "latest")
    for old in whole[:-keep] if keep else []:
        # Renamed first: a kill in the middle must not leave half a checkpoint under a whole one's name.
        doomed = old.with_name(f".{old.name}.partial")
        os.replace(old, doomed)
        shutil.rmtree(doomed)


def fingerprint(file: Path) -> dict[str, Any]:
    with open(file, "rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def damage(path: Path, ranks: Ranks = ALONE) -> str | None:
    """What is wrong with the files of a checkpoint, or None; each process reads its share of them.

    Checkpoints made before there were fingerprints pass.
    """
    if not (path / "fingerprints.json").exists():
        return None
    wrong = None
    for name, expected in list(read_json(path / "fingerprints.json").items())[ranks.rank :: ranks.world]:
        file = path / name
        if not file.exists():
            wrong = f"{file} is missing"
        elif file.stat().st_size != expected["bytes"]:
            wrong = f"{file} has {file.stat().st_size:,} bytes, {expected['bytes']:,} were written"
        elif fingerprint(file) != expected:
            wrong = f"{file} holds other bytes than were written"
    return next((found for found in ranks.all(wrong) if found is not None), None)


def load_config(path: Path) -> TransformerConfig:
    """The model settings of a checkpoint folder."""
    values = read_json(path / "config.json")
    if values.pop("model_type", None) != "gnomon":
        raise UserError(f"{path / 'config.json'} is not a gnomon model; its model_type should be 'gnomon'")
    return from_dict(values, TransformerConfig)


def load_weights(model: nn.Module, path: Path) -> None:
    """Load `model.safetensors` of a checkpoint folder; every tensor must be there with its shape.

    Raises:
        UserError: the file is damaged, or its names or shapes differ from the model's.
    """
    put_weights(model, read_tensors(path / "model.safetensors"), path)


@torch.no_grad()
def put_weights(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Copy weights, whole or in the layout of the model's, into the model."""
    ours = model.state_dict()
    expected = {name: tuple(t.shape) for name, t in ours.items()}
    given = {name: tuple(t.shape) for name, t in tensors.items()}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise UserError(
                f"{path}: {name!r} has shape {given.get(name)}, the model expects {expected.get(name)}. "
                "The checkpoint was made with other model settings."
            ).of("main")
    for name, tensor in ours.items():
        sharding.local(tensor).copy_(sharding.local(in_layout_of(tensor, tensors[name])))


def in_layout_of(reference: Tensor, value: Tensor) -> Tensor:
    """A whole tensor in the layout of `reference`, where that is sharded and of the same shape; any other as it is."""
    alike = value.shape == reference.shape and not sharding.is_sharded(value)
    return sharding.shard_like(value, reference) if alike else value


def read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(
            f"{file} cannot be read ({error}). The folder was damaged after it was written; remove it to go on from "
            "the checkpoint before."
        ).of("main") from error


def save_file(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file. What the system refuses is an OSError, as of any file; the library has an exception of its own."""
    try:
        safetensors_save(tensors, file)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error


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


def flat(monitor: Monitor) -> dict[str, Tensor]:
    """What a monitor remembers, by `<kind>/<name>`."""
    return {f"{kind}/{name}": x.contiguous() for kind, part in monitor.state_dict().items() for name, x in part.items()}


def nested(remembered: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inverse of `flat`, as `Monitor.load_state_dict` takes it."""
    parts: dict[str, dict[str, Tensor]] = {}
    for path, tensor in remembered.items():
        kind, name = path.split("/", 1)
        parts.setdefault(kind, {})[name] = tensor
    return parts
