"""Checkpoints: a folder that is whole or not there, of safetensors and JSON only.

checkpoints/step-00000300/
    model.safetensors        weights by parameter name
    config.json              the model's settings
    optimizer.safetensors    optimizer state, `<entry>/<parameter name>`
    tracker.safetensors      what the continuity tracker remembers, where the recipe has one
    state.json               step, tokens, seconds, and what of the optimizer is not a tensor
    fingerprints.json        size and SHA-256 of every file, checked before anything is loaded
checkpoints/latest           a link to the newest, for people; nothing here reads it

Several processes write `shards/` in place of the optimizer's and tracker's files (`gnomon.train.sharded_saving`). Either kind is
resumed by any number of processes and any strategy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
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
from gnomon.models.transformer import Transformer
from gnomon.optim import ownership
from gnomon.train.distributed import ALONE, Ranks
from gnomon.train.recipe import from_dict, to_dict

Save = Callable[[Path, Transformer, torch.optim.Optimizer, dict[str, Any], int, Tracker | None], Path]


def save(
    folder: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    keep: int,
    tracker: Tracker | None = None,
) -> Path:
    """Write `checkpoints/step-…` under the run folder, then remove all but the newest `keep`."""
    path = place(folder, progress["step"])
    if path.exists():
        return path
    tensors, rest = split_state(optimizer.state_dict())
    with atomic_folder(path) as partial:
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, partial / "model.safetensors")
        save_file(tensors, partial / "optimizer.safetensors")
        if tracker is not None:
            save_file(flat_tracker(tracker), partial / "tracker.safetensors")
        seal(partial, model.config, {**progress, "optimizer": rest})
    tidy(folder, keep)
    return path


@contextlib.contextmanager
def saver(ranks: Ranks, in_background: bool) -> Iterator[Save]:
    """The way to save for these processes; what is still being written at the end is waited for."""
    if ranks.world == 1:
        yield save
        return
    from gnomon.train.sharded_saving import Saver

    with contextlib.closing(Saver(ranks, in_background)) as several:
        yield several.save


def place(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def seal(partial: Path, config: TransformerConfig, state: dict[str, Any]) -> None:
    """Add what is not a tensor, and then the fingerprints of all that is there."""
    write_json(partial / "config.json", {"model_type": "gnomon", **to_dict(config)})
    write_json(partial / "state.json", state)
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    write_json(partial / "fingerprints.json", {p.relative_to(partial).as_posix(): fingerprint(p) for p in files})


def fingerprint(file: Path) -> dict[str, Any]:
    with open(file, "rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def tidy(folder: Path, keep: int) -> None:
    """Point `latest` to the newest checkpoint and remove all but the newest `keep` (0 keeps all)."""
    whole = list_checkpoints(folder)
    link = folder / "checkpoints" / ".latest.new"
    link.unlink(missing_ok=True)
    link.symlink_to(whole[-1].name)
    os.replace(link, folder / "checkpoints" / "latest")
    for old in whole[:-keep] if keep else []:
        # Renamed first: a kill in the middle must not leave half a checkpoint under a whole one's name.
        doomed = old.with_name(f".{old.name}.partial")
        os.replace(old, doomed)
        shutil.rmtree(doomed)


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    found = [p for p in (folder / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name.split("-")[1]))


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


def resume(
    folder: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    tracker: Tracker | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any] | None:
    """Load the newest checkpoint into model, optimizer and tracker; returns its progress, or None when there is none.

    Raises:
        UserError: the checkpoint is damaged or belongs to other parameters.
    """
    path = ranks.first(lambda: _newest(folder))
    if path is None:
        return None
    if (wrong := damage(path, ranks)) is not None:
        raise UserError(ranks.first(lambda: _way_back(folder, path, wrong)))
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
    if (path / "shards").is_dir():
        from gnomon.train.sharded_saving import read

        weights, state, remembered = read(path, model, tracker, ranks)
    else:
        weights = read_tensors(path / "model.safetensors")
        state = read_tensors(path / "optimizer.safetensors")
        remembered = read_tensors(path / "tracker.safetensors") if tracker is not None else {}
    put_weights(model, weights, path)
    parameters = dict(model.named_parameters())
    state = {key: _laid_out(value, parameters[key.split("/", 1)[1]]) for key, value in state.items()}
    optimizer.load_state_dict(join_state(state, rest))
    if tracker is not None:
        parts: dict[str, dict[str, Tensor]] = {"start": {}, "sum": {}, "first": {}}
        for where, tensor in remembered.items():
            key, name = where.split("/", 1)
            parts[key][name] = tensor
        tracker.load_state_dict(parts)
    return progress


def _newest(folder: Path) -> Path | None:
    if (folder / "checkpoints").exists():
        remove_partials(folder / "checkpoints")
    return next(reversed(list_checkpoints(folder)), None)


def _way_back(folder: Path, path: Path, wrong: str) -> str:
    """The error's words: what is damaged, and which checkpoint before it is whole."""
    earlier = [p for p in list_checkpoints(folder) if p < path]
    sound = next((p for p in reversed(earlier) if damage(p) is None), None)
    remedy = (
        "No checkpoint before it is whole; start anew with another --out."
        if sound is None
        else f"{sound} is whole: to go on from there, remove what came after it: {', '.join(map(str, _after(sound, earlier, path)))}"
    )
    return f"the checkpoint is damaged: {wrong}. {remedy}"


def _after(sound: Path, earlier: list[Path], path: Path) -> list[Path]:
    return [p for p in earlier if p > sound] + [path]


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
            )
    for name, tensor in ours.items():
        ownership.local(tensor).copy_(ownership.local(_laid_out(tensors[name], tensor)))


def _laid_out(value: Tensor, reference: Tensor) -> Tensor:
    """A whole tensor in the layout of `reference`, where that is sharded and of the same shape; any other as it is."""
    if not hasattr(reference, "placements") or hasattr(value, "placements") or value.shape != reference.shape:
        return value
    return ownership.shard_like(value, reference)


def flat_tracker(tracker: Tracker) -> dict[str, Tensor]:
    """What a tracker remembers, by `<kind>/<name>`."""
    return {f"{key}/{name}": x.contiguous() for key, part in tracker.state_dict().items() for name, x in part.items()}


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
