"""The same numbers from a model that is bare, compiled, in DDP, or sharded by FSDP2 over two processes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from monitor_cases import make, tokens

import gnomon


def compiled(model, how):
    if how == "wrapped":
        return torch.compile(model, backend="eager")
    if how == "in place":
        model.compile(backend="eager")
    else:
        for block in model.model.layers:
            block.compile(backend="eager")
    return model


def run(model, monitored, steps=3):
    optimizer, losses, records = torch.optim.AdamW(model.parameters(), lr=1e-3), [], []
    monitor = gnomon.Monitor(model, every=2) if monitored else None
    for step in range(steps):
        out = model(input_ids=tokens(seed=step), labels=tokens(seed=step))
        out.loss.backward()
        record = monitor.before_step(step) if monitor else {}
        optimizer.step()
        optimizer.zero_grad()
        records.append(record | (monitor.after_step(step) if monitor else {}))
        losses.append(out.loss.item())
    return losses, records


def two_blocks():
    """Enough of them for a second to follow a first; each is traced anew, which is what takes time."""
    model = make("llama", "sdpa")
    model.config.num_hidden_layers = 2
    del model.model.layers[2:]
    return model


@pytest.mark.parametrize("how", ["wrapped", "in place", "blocks"])
def test_compiled(how):
    torch._dynamo.reset()
    expected, bare = run(two_blocks(), True)
    plain, _ = run(compiled(two_blocks(), how), False)
    torch._dynamo.reset()
    losses, records = run(compiled(two_blocks(), how), True)
    assert losses == plain and losses == pytest.approx(expected, rel=1e-6)
    assert [bool(record) for record in records] == [True, False, True]
    for one, other in zip(bare, records):
        assert one.keys() == other.keys()
        for key, series in one.items():
            for place, value in series.items():
                assert other[key][place] == pytest.approx(value, rel=1e-5, abs=1e-7), (key, place)


_TWO = """
import os, sys, torch, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2], RANK=sys.argv[1], WORLD_SIZE="2")
dist.init_process_group("gloo")
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[3])
from monitor_cases import make, tokens
import gnomon

rank, kind = int(sys.argv[1]), sys.argv[4]
plain, other = make("llama", "sdpa"), make("llama", "sdpa")
if kind == "ddp":
    other = DistributedDataParallel(other)
elif kind == "compiled ddp":
    other = torch.compile(DistributedDataParallel(other), backend="eager")
else:
    for block in other.model.layers:
        if kind == "compiled fsdp":
            block.compile(backend="eager")
        fully_shard(block)
    fully_shard(other)
settings = dict(every=2, sample=32, rows=8, track_every=2)
one, two = gnomon.Monitor(plain, **settings), gnomon.Monitor(other, **settings)
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, other)]
for step in range(3):
    x, records = tokens(4, 12, seed=step), []
    for model, monitor, optimizer, rows in ((plain, one, optimizers[0], x), (other, two, optimizers[1], x[2 * rank : 2 * rank + 2])):
        model(input_ids=rows, labels=rows).loss.backward()
        record = monitor.before_step(step)
        optimizer.step()
        optimizer.zero_grad()
        records.append(record | monitor.after_step(step))
    assert records[0].keys() == records[1].keys(), records[0].keys() ^ records[1].keys()
    assert bool(records[0]) == (step != 1)
    for key, series in records[0].items():
        assert list(series) == list(records[1][key]), key
        for place, value in series.items():
            a, b = torch.tensor(value), torch.tensor(records[1][key][place])
            # Differences of rounding in a gradient, and in what was learned from it: directions and turns of a step.
            loose = key.endswith(("_v1", "_u1")) or key in ("lost_in_bf16", "lost_to_rounding", "gradient_underflow")
            assert torch.allclose(a, b, rtol=1e-5, atol=2e-3 if loose else 1e-6), (key, place, a, b)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "compiled ddp", "compiled fsdp"])
def test_two_processes(kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = str(Path(__file__).parent.parent)
    processes = [
        subprocess.Popen([sys.executable, "-c", _TWO, str(rank), port, here, kind], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
