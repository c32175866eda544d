"""Tensors that may lie sharded over ranks (DTensor), and one way to handle either kind.

Everything here is the identity for a tensor that is not sharded, so one process and many run the same code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor; asked by attribute, since the import takes half a second."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a tensor, sharing memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def like(share: Tensor, reference: Tensor) -> Tensor:
    """A share in the layout of `reference`."""
    if not is_sharded(reference):
        return share
    from torch.distributed.tensor import DTensor

    mesh, placements = reference.device_mesh, reference.placements
    shape, stride = reference.shape, reference.stride()
    return DTensor.from_local(share, mesh, placements, run_check=False, shape=shape, stride=stride)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank: a copy of a sharded one, the tensor's own storage otherwise."""
    return tensor.full_tensor().clone() if is_sharded(tensor) else tensor.detach()


def shard_like(full: Tensor, reference: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, in the layout of `reference`: each slices its own share, none sends."""
    if not is_sharded(reference):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.to(reference.device), reference.device_mesh, reference.placements, src_data_rank=None)


@torch.no_grad()
def write(target: Tensor, full: Tensor) -> None:
    """Put the whole tensor back into `target`, each rank its share."""
    if is_sharded(target):
        local(target).copy_(local(shard_like(full, target)))
    elif target.data_ptr() != full.data_ptr():
        target.copy_(full)
