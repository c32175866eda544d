"""Several devices: ManifoldMuon in a loop of one's own, under DDP, or FSDP2 with every matrix in shards.

    torchrun --nproc-per-node 2 examples/several_devices.py ddp
    torchrun --nproc-per-node 2 examples/several_devices.py fsdp2

`gnomon train --processes 2` does all of this by itself.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gnomon
from gnomon.models import Transformer, tiny


def main(way: str = "ddp", steps: int = 20) -> float:
    """Train on every process; returns the last loss, averaged over them."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = Transformer(tiny(residual="proj-spheret", layers=3, width=64, heads=4, context=64)).to(device)
    if way == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    # After the shards, before DDP's wrapper: the assignment names the parameters that are there.
    optimizer = gnomon.ManifoldMuon(gnomon.assign(model, "hetero"), lr=0.02, adamw_lr=3e-3)
    forward = DistributedDataParallel(model) if way == "ddp" else model

    tokens = gnomon.data.open_tokens("jargon", tokenizer="byte")
    for step in range(steps):
        x_BT, y_BT = (torch.from_numpy(part).to(device) for part in gnomon.data.batch(
            tokens, seed=0, step=step, batch=8 * world, context=64, rank=rank, world=world))  # fmt: skip
        loss = torch.nn.functional.cross_entropy(forward(x_BT).flatten(0, 1).float(), y_BT.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"{way} on {world} processes: loss {total.item() / world:.4f}")
    dist.destroy_process_group()
    return total.item() / world


if __name__ == "__main__":
    main(*sys.argv[1:2])
