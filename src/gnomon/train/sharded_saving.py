"""Checkpoints of several processes, through torch.distributed.checkpoint: each writes its pieces, all at once.

checkpoints/step-00000300/   as in `gnomon.train.checkpoint_layout`, but
    shards/*.safetensors     `model/<name>`, `optimizer/<entry>/<name>`, `scalar/<entry>/<name>`, `monitor/<kind>/<name>`; each
                             file says where in the whole tensors its pieces lie
    model.safetensors        the weights put together, for all who only read

Written in the background, a checkpoint costs the training a copy of the state in memory. The first process puts the folder
under its name when all have written, so a kill of any process at any moment leaves the checkpoints before it whole.
"""

from __future__ import annotations

import os
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from gnomon.errors import UserError
from gnomon.files import atomic_folder
from gnomon.models.config import TransformerConfig
from gnomon.models.transformer import Transformer
from gnomon.monitor import Monitor
from gnomon.optim import ownership
from gnomon.run_folder import checkpoint_folder
from gnomon.train import checkpoint_layout
from gnomon.train.distributed import ALONE, Ranks


class Saver:
    """Saves one checkpoint at a time, in the background or not.

    Args:
        ranks: the processes, all of which make the same calls.
        in_background: return as soon as the state is copied.
    """

    def __init__(self, ranks: Ranks, in_background: bool):
        self._ranks, self._in_background = ranks, in_background
        self._pending: Future | None = None
        # A group of its own: what the background thread exchanges must not mix with what training does.
        self._group: Any = dist.new_group(backend="gloo")
        cuda = torch.cuda.is_available()
        self._stager = DefaultStager(StagingOptions(cuda, False, False, cuda))

    def save(
        self,
        folder: Path,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        progress: dict[str, Any],
        keep: int,
        monitor: Monitor | None = None,
    ) -> Path:
        """`gnomon.train.saving.Save`; raises here what went wrong in the one before."""
        self.wait()
        path = checkpoint_folder(folder, progress["step"])
        if self._ranks.on_main(path.exists):
            return path
        tensors, rest = checkpoint_layout.split_state(optimizer.state_dict())
        state = {f"model/{name}": x for name, x in model.state_dict().items()}
        # safetensors gives no slices of tensors without dimensions, so these are stored with one.
        state |= {f"optimizer/{key}" if x.ndim else f"scalar/{key}": x if x.ndim else x[None] for key, x in tensors.items()}
        if monitor is not None:
            state |= {f"monitor/{key}": x for key, x in checkpoint_layout.flat(monitor).items()}
        writer = _Writer(path, keep, model.config, {**progress, "optimizer": rest})
        self._pending = dcp.async_save(  # type: ignore[assignment]
            self._share(state), storage_writer=writer, process_group=self._group, async_stager=self._stager
        )
        if not self._in_background:
            self.wait()
        return path

    def _share(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this process copies and writes: its pieces of what is cut, and a share of what all have alike."""
        alike = [name for name, x in state.items() if not _cut(x)]
        writers = dict(zip(alike, ownership.owners([state[name].numel() for name in alike], self._ranks.world)))
        return {name: x for name, x in state.items() if writers.get(name, self._ranks.rank) == self._ranks.rank}

    def wait(self) -> None:
        """Until the checkpoint under way is whole.

        Raises:
            UserError: a process could not write; the checkpoints before are as they were.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except CheckpointException as error:
            causes = {rank: cause for rank, (cause, _) in error.failures.items()}
            told = "; ".join(f"process {rank}: {cause}" for rank, cause in causes.items())
            if not all(isinstance(cause, OSError) for cause in causes.values()):
                raise RuntimeError(f"the checkpoint could not be written ({told})") from error
            raise UserError(f"the checkpoint could not be written ({told}); those before it are whole").of("main") from error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._stager.close()


class _Writer(HuggingFaceStorageWriter):
    """Every process writes its pieces beside the place of the checkpoint; `finish`, which torch calls on the first process
    when all have, makes a checkpoint of them."""

    def __init__(self, checkpoint: Path, keep: int, config: TransformerConfig, state: dict[str, Any]):
        self.checkpoint, self.keep, self.config, self.state = checkpoint, keep, config, state
        self.pieces = checkpoint.with_name(f".{checkpoint.name}.shards.partial")
        super().__init__(str(self.pieces), save_distributed=True)

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        with atomic_folder(self.checkpoint) as partial:
            os.replace(self.pieces, partial / "shards")
            weights = _load(partial / "shards", "model/", {}, ALONE)
            checkpoint_layout.save_file(weights, partial / "model.safetensors")
            checkpoint_layout.seal(partial, self.config, self.state)
        checkpoint_layout.tidy(self.checkpoint.parent.parent, self.keep)


def read(
    path: Path, model: nn.Module, monitor: Monitor | None, ranks: Ranks
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Weights, optimizer state and what the monitor remembered: each process the shares that its own layout asks for."""
    shards, parameters = path / "shards", dict(model.named_parameters())
    weights = _load(shards, "model/", parameters, ranks)
    state = _load(shards, "optimizer/", parameters, ranks)
    state |= {key: x[0] for key, x in _load(shards, "scalar/", {}, ranks).items()}
    if monitor is None:
        return weights, state, {}
    # Runs made before November 2026 have the tracker's.
    return weights, state, _load(shards, "monitor/", {}, ranks) or _load(shards, "tracker/", {}, ranks)


def _load(shards: Path, prefix: str, parameters: dict[str, nn.Parameter], ranks: Ranks) -> dict[str, Tensor]:
    """Tensors whose names start with `prefix`, without it; in the layout of the parameter they belong to, or whole."""
    reader = HuggingFaceStorageReader(str(shards))
    targets: dict[str, Tensor] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        if name.startswith(prefix):
            owner = parameters.get(name.removeprefix(prefix)) if prefix == "model/" else parameters.get(name.split("/", 2)[-1])
            sharded = owner is not None and _cut(owner) and owner.shape == stored.size  # type: ignore[union-attr]
            dtype = stored.properties.dtype  # type: ignore[union-attr]
            targets[name] = torch.empty_like(owner, dtype=dtype) if sharded else torch.empty(stored.size, dtype=dtype)  # type: ignore
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(targets, storage_reader=reader, no_dist=ranks.world == 1)
    return {name.removeprefix(prefix): x.detach() for name, x in targets.items()}


def _cut(x: Tensor) -> bool:
    """Whether a tensor is sharded."""
    return isinstance(x, DTensor)
