"""Two gloo processes of one thread each against one process of two threads, on the same work.

- `training`: steps of a width-384 model, eight rows of 256 tokens; tokens a second, higher is better.
- `optimizer`: one step of ManifoldMuon (hetero) over the matrices of two GPT-2-small layers, each process stepping those it
  owns, against both stepping all of them.
- `checkpoint`: how long training stands still for one written in the background, against one that is waited for.

Ratios are of paired rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.bench_muon import matrices
from gnomon import data
from gnomon.geometry.manifolds import DGram, Stiefel
from gnomon.models import Transformer
from gnomon.optim import ManifoldMuon, ownership
from gnomon.train import device, loop, optimizer, preset, replace, run_data
from gnomon.train.distributed import ALONE, Ranks, grad_norm, parallelise
from gnomon.train.sharded_saving import Saver

SIZE = {"model.layers": 6, "model.width": 384, "model.heads": 6, "model.context": 256, "data.batch": 8}
TARGETS = {"training": "at least 0.9", "optimizer": "at most 0.6", "checkpoint": "at most 0.05"}


def recipe(size: dict):
    return replace(preset("tiny", "proj-spheret", "adamw"), size | {"compute.device": "cpu"})


class Trainer:
    """Steps of a recipe as the loop takes them."""

    def __init__(self, settings, ranks: Ranks):
        torch.manual_seed(0)
        self.settings, self.ranks = settings, ranks
        self.model = Transformer(settings.model)
        self.loss = parallelise(self.model, settings, ranks)
        self.optim = optimizer.build(self.model, settings.optim)
        self.tokens, _ = run_data.open_data(settings)
        self.step = 0

    def __call__(self) -> None:
        s, ranks = self.settings, self.ranks
        x, y = device.to_device(
            data.batch(self.tokens, seed=0, step=self.step, batch=s.data.batch, context=s.model.context,
                       rank=ranks.rank, world=ranks.world),
            torch.device("cpu"),
        )  # fmt: skip
        self.step += 1
        self.optim.zero_grad(set_to_none=True)
        share = loop.backward(self.loss, self.model, [x], [y], device.autocast(s.compute, x.device), ranks)
        norm = grad_norm(self.model)
        ranks.reduce_step(share, norm, False)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), 1.0, norm)
        self.optim.step()


def seconds_of(work, rounds: int, warmup: int = 2) -> list[float]:
    taken = []
    for _ in range(warmup + rounds):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken[warmup:]


def alone(rank: int, folder: str, size: dict, rounds: int) -> None:
    torch.set_num_threads(2)
    torch.set_flush_denormal(True)
    torch.save(seconds_of(Trainer(recipe(size), ALONE), rounds), f"{folder}/alone")


def together(rank: int, folder: str, size: dict, rounds: int, layers: int) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {"training": seconds_of(Trainer(recipe(size), Ranks(rank, 2, "ddp")), rounds)}
    found |= optimizer_step(rounds, layers)
    found |= saves(Ranks(rank, 2, "ddp"), Path(folder), size, rounds)
    if rank == 0:
        torch.save(found, f"{folder}/together")
    dist.destroy_process_group()


def optimizer_step(rounds: int, layers: int) -> dict[str, list[float]]:
    attention, mlp = matrices()
    groups = [{"params": attention[: 4 * layers], "manifold": Stiefel()}, {"params": mlp[: 2 * layers], "manifold": DGram()}]
    muon = ManifoldMuon(groups, lr=0.02, check_finite=False)
    for group in muon.param_groups:
        group["step"] = 20
    shared, world, number = [], ownership.world, ownership.rank
    redundant = []
    for _ in range(rounds + 1):
        shared += seconds_of(muon.step, 1, 0)
        ownership.world, ownership.rank = (lambda: 1), (lambda: 0)
        redundant += seconds_of(muon.step, 1, 0)
        ownership.world, ownership.rank = world, number
    return {"optimizer": shared[1:], "redundant": redundant[1:]}


def saves(ranks: Ranks, folder: Path, size: dict, rounds: int) -> dict[str, list[float]]:
    """Seconds that `save` takes in the background, with a training step between, and until the file is whole."""
    trainer = Trainer(recipe(size), ranks)
    trainer()
    (folder / "run").mkdir(exist_ok=True)
    background, waiting = Saver(ranks, True), Saver(ranks, False)
    found: dict[str, list[float]] = {"stall": [], "save": []}
    for number in range(rounds + 1):
        for name, saver in (("stall", background), ("save", waiting)):
            trainer()
            progress = {"step": 2 * number + (name == "save")}
            dist.barrier()
            start = time.perf_counter()
            saver.save(folder / "run", trainer.model, trainer.optim, progress, 2)
            found[name].append(time.perf_counter() - start)
            saver.wait()
    background.close()
    waiting.close()
    return {name: taken[1:] for name, taken in found.items()}


def paired(a: list[float], b: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b))


def rows(rounds: int = 7, size: dict = SIZE, layers: int = 2) -> list[dict]:
    settings = recipe(size)
    tokens = settings.data.batch * settings.model.context
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(alone, (folder, size, rounds), nprocs=1)
        mp.spawn(together, (folder, size, rounds, layers), nprocs=2)
        one = torch.load(f"{folder}/alone", weights_only=True)
        two = torch.load(f"{folder}/together", weights_only=True)
    medians = {name: statistics.median(taken) for name, taken in two.items()}
    return [
        {
            "what": f"training, {tokens / medians['training']:,.0f} tokens/s",
            "against": f"one process of two threads, {tokens / statistics.median(one):,.0f} tokens/s",
            "ratio": statistics.median(one) / medians["training"],
            "target": TARGETS["training"],
        },
        {
            "what": f"optimizer step of owned matrices, {1e3 * medians['optimizer']:.0f} ms",
            "against": f"of all matrices in each process, {1e3 * medians['redundant']:.0f} ms",
            "ratio": paired(two["optimizer"], two["redundant"]),
            "target": TARGETS["optimizer"],
        },
        {
            "what": f"checkpoint in the background: training stands {1e3 * medians['stall']:.1f} ms",
            "against": f"one that is waited for, {1e3 * medians['save']:.0f} ms",
            "ratio": paired(two["stall"], two["save"]),
            "target": TARGETS["checkpoint"],
        },
    ]


if __name__ == "__main__":
    from gnomon import report

    report.show(rows())
