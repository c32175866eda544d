"""Saving a run and going on with it. What a checkpoint is: `gnomon.train.checkpoint_layout`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from gnomon.errors import UserError
from gnomon.files import atomic_folder, read_json, remove_partials
from gnomon.models.transformer import Transformer
from gnomon.monitor import Monitor
from gnomon.run_folder import CHECKPOINTS, checkpoint_folder, checkpoint_folders, locate
from gnomon.train import checkpoint_layout
from gnomon.train.checkpoint_layout import damage, read_tensors, save_file
from gnomon.train.distributed import ALONE, Ranks


class Save(Protocol):
    """Write the checkpoint of a step into a run folder, keeping so many of the newest (0: all); returns its path."""

    def __call__(
        self,
        folder: Path,
        model: Transformer,
        optimizer: Optimizer,
        progress: dict[str, Any],
        keep: int,
        monitor: Monitor | None = None,
    ) -> Path: ...


@contextlib.contextmanager
def saver(ranks: Ranks, in_background: bool) -> Iterator[Save]:
    """The way to save for these processes; what is still being written at the end is waited for.

    Two writers, not one: in one process, torch.distributed.checkpoint takes twice the time of `save` and, since it stores the
    weights a second time, half as much space again.
    """
    if ranks.world == 1:
        yield save
        return
    from gnomon.train.sharded_saving import Saver

    with contextlib.closing(Saver(ranks, in_background)) as several:
        yield several.save


def save(
    folder: Path,
    model: Transformer,
    optimizer: Optimizer,
    progress: dict[str, Any],
    keep: int,
    monitor: Monitor | None = None,
) -> Path:
    """`Save` of a single process."""
    path = checkpoint_folder(folder, progress["step"])
    if path.exists():
        return path
    tensors, rest = checkpoint_layout.split_state(optimizer.state_dict())
    with atomic_folder(path) as partial:
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, partial / "model.safetensors")
        save_file(tensors, partial / "optimizer.safetensors")
        if monitor is not None:
            save_file(checkpoint_layout.flat(monitor), partial / "monitor.safetensors")
        checkpoint_layout.seal(partial, model.config, {**progress, "optimizer": rest})
    checkpoint_layout.tidy(folder, keep)
    return path


def resume(
    folder: Path,
    model: Transformer,
    optimizer: Optimizer,
    monitor: Monitor | None = None,
    ranks: Ranks = ALONE,
    branch: str | None = None,
) -> dict[str, Any] | None:
    """Load the newest checkpoint into model, optimizer and monitor; returns its progress, or None when there is none.

    What the optimizer remembers is the checkpoint's; its settings are as they were built.

    Args:
        branch: another run, or a checkpoint of one, to load where this one has none.

    Raises:
        UserError: the checkpoint is damaged or belongs to other parameters.
    """
    path = ranks.on_main(lambda: _newest(folder, branch))
    if path is None:
        return None
    if (wrong := damage(path, ranks)) is not None:
        raise UserError(ranks.on_main(lambda: _way_back(folder, path, wrong))).of("main")
    progress = read_json(path / "state.json")
    rest = progress.pop("optimizer")
    _check_order(path, rest, optimizer)
    weights, state, remembered = _read(path, model, monitor, ranks)
    state_of_monitor = checkpoint_layout.nested(remembered)
    if monitor is not None and "start" in monitor.state_dict() and "start" not in state_of_monitor:
        raise UserError(
            f"{path} was saved without continuity across depth; set watch.track_every=0, or track from the first step of a run"
        ).of("main")
    checkpoint_layout.put_weights(model, weights, path)
    parameters = dict(model.named_parameters())
    state = {
        key: checkpoint_layout.in_layout_of(parameters[key.split("/", 1)[1]], value) for key, value in state.items()
    }
    settings = [{key: group[key] for key in group.keys() - _REMEMBERED} for group in optimizer.param_groups]
    optimizer.load_state_dict(checkpoint_layout.join_state(state, rest))
    for group, own in zip(optimizer.param_groups, settings):
        group |= own
    if monitor is not None:
        monitor.load_state_dict(state_of_monitor)
    return progress


_REMEMBERED = {"params", "param_names", "step", "manifolds"}


def _newest(folder: Path, branch: str | None) -> Path | None:
    if (folder / CHECKPOINTS).exists():
        remove_partials(folder / CHECKPOINTS)
    own = next(reversed(checkpoint_folders(folder)), None)
    return own if own is not None or branch is None else locate(Path(branch))[1]


def _way_back(folder: Path, path: Path, wrong: str) -> str:
    """The error's words: what is damaged, and which checkpoint before it is whole."""
    earlier = [p for p in checkpoint_folders(folder) if p < path]
    sound = next((p for p in reversed(earlier) if damage(p) is None), None)
    if sound is None:
        return f"the checkpoint is damaged: {wrong}. No checkpoint before it is whole; start anew with another --out."
    after = ", ".join(str(p) for p in [*earlier, path] if p > sound)
    return f"the checkpoint is damaged: {wrong}. {sound} is whole: to go on from there, remove what came after it: {after}"


def _check_order(path: Path, rest: dict[str, Any], optimizer: Optimizer) -> None:
    """Without names, two parameters of one shape that come back in another order would swap their moments in silence."""
    ours, theirs = (
        [name for group in groups for name in group["param_names"]]
        for groups in (optimizer.state_dict()["param_groups"], rest["param_groups"])
    )
    if ours == theirs:
        return
    moved = next(i for i, pair in enumerate(zip([*ours, ""], [*theirs, ""])) if pair[0] != pair[1])
    raise UserError(
        f"{path}: the optimizer's parameters are not the model's, or not in its order; the first difference is at "
        f"place {moved}: {[*theirs, 'nothing'][moved]!r} in the checkpoint, {[*ours, 'nothing'][moved]!r} here"
    ).of("main")


def _read(
    path: Path, model: Transformer, monitor: Monitor | None, ranks: Ranks
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Weights, optimizer state and what the monitor remembered."""
    if (path / "shards").is_dir():
        from gnomon.train import sharded_saving

        return sharded_saving.read(path, model, monitor, ranks)
    # Runs made before November 2026 have the tracker's file.
    files = [path / name for name in ("monitor.safetensors", "tracker.safetensors") if (path / name).exists()]
    remembered = read_tensors(files[0]) if monitor is not None and files else {}
    return read_tensors(path / "model.safetensors"), read_tensors(path / "optimizer.safetensors"), remembered
