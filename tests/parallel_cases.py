"""Several gloo processes for tests, started once for all of them, since the start is what takes time."""

from __future__ import annotations

import functools
import multiprocessing.connection
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from gnomon import data, sharding
from gnomon.models import Transformer
from gnomon.train import device, loop, optimizer, preset, replace, run_data
from gnomon.train.distributed import ALONE, Ranks, grad_norm, parallelise

SMALL = {
    "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 16, "data.batch": 8, "steps": 6,
    "schedule.name": "constant", "schedule.warmup": 2, "compute.device": "cpu",
    "watch.eval_every": 3, "watch.probe_every": 3, "watch.save_every": 2, "watch.eval_tokens": 176,
    "watch.probe_tokens": 32, "watch.keep": 3,
}  # fmt: skip


def recipe(residual="pre-norm", assignment="adamw", **changes):
    return replace(preset("tiny", residual, assignment), SMALL | changes)


def steps(settings, ranks: Ranks = ALONE, *, count=4, double=False, ragged=False):
    """A few steps as the loop takes them; returns what they end with, whole: losses, norms, weights and momenta.

    Ragged: the first rows of the global batch, all of them the first process's, have no targets after the third.
    """
    torch.manual_seed(settings.seed)
    model = Transformer(settings.model)
    if double:
        model.double()
    loss_fn = parallelise(model, settings, ranks)
    optim = optimizer.build(model, settings.optim)
    tokens, _ = run_data.open_data(settings)
    cast = device.autocast(settings.compute, torch.device("cpu"))
    micro = settings.data.batch // settings.data.accumulate // ranks.world
    losses = []
    for step in range(count):
        x, y = (
            torch.from_numpy(part)
            for part in data.batch(
                tokens, seed=settings.seed, step=step, batch=settings.data.batch, context=settings.model.context,
                rank=ranks.rank, world=ranks.world,
            )
        )  # fmt: skip
        if ragged and ranks.main:
            y = y.clone()
            y[:2, 3:] = data.NO_TARGET
        optim.zero_grad(set_to_none=True)
        share = loop.backward(loss_fn, model, x.split(micro), y.split(micro), cast, ranks)
        norm = grad_norm(model)
        losses.append(ranks.reduce_step(share, norm, False)[:2])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), settings.optim.clip, norm)
        optim.step()
    named = dict(model.named_parameters())
    momenta = {f"{n}.{k}": v for n, p in named.items() for k, v in optim.state[p].items() if v.shape == p.shape}
    end = {name: sharding.whole(value).detach().clone() for name, value in (named | momenta).items()}
    violations = optim.measure().get("feasibility", {}) if hasattr(optim, "measure") else {}
    return {"losses": losses, "end": end, "feasibility": violations}


def spawn(world: int, work, *arguments) -> list:
    """What `work(rank, world, barrier, *arguments)` returns on each of the first `world` processes, which share the barrier.

    The processes are started once a session and live to its end, unless one fails: then all are gone.
    """
    pipes, *_ = processes = _processes()
    asked = pipes[:world]
    for pipe in asked:
        pipe.send((sys.path, work, world, arguments))
    waiting = {pipe: rank for rank, pipe in enumerate(asked)}
    while waiting:
        for pipe in multiprocessing.connection.wait(list(waiting)):
            try:
                failure = pipe.recv()
            except (EOFError, OSError):
                failure = "it ended without a word"
            if failure:
                _stop(processes)
                raise AssertionError(f"process {waiting[pipe]} of {world}: {failure}")
            del waiting[pipe]
    return [torch.load(Path(arguments[0]) / f"answer.{rank}", weights_only=False) for rank in range(world)]


@functools.cache
def _processes(count: int = 4):
    """(a pipe to each, the processes, their barriers: those must be held here for the processes to find them)."""
    context = multiprocessing.get_context("spawn")
    barriers = {world: context.Barrier(world) for world in range(1, count + 1)}
    ours, theirs = zip(*(context.Pipe() for _ in range(count)))
    processes = [context.Process(target=_serve, args=(r, theirs[r], barriers), daemon=True) for r in range(count)]
    for process, pipe in zip(processes, theirs):
        process.start()
        pipe.close()
    return ours, processes, barriers


def _stop(processes) -> None:
    for process in processes[1]:
        process.terminate()
    _processes.cache_clear()


def _serve(rank, pipe, barriers):
    torch.set_num_threads(1)
    while True:
        try:
            path, work, world, arguments = pipe.recv()
        except EOFError:
            return
        sys.path[:] = path
        try:
            torch.save(work(rank, world, barriers[world], *arguments), Path(arguments[0]) / f"answer.{rank}")
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())


class Group:
    """The first `world` of the processes as a process group, while open."""

    def __init__(self, rank: int, world: int, store: Path):
        self.rank, self.world, self.store = rank, world, store

    def __enter__(self):
        if self.rank < self.world and self.world > 1:
            dist.init_process_group("gloo", init_method=f"file://{self.store}", rank=self.rank, world_size=self.world)
        return self.rank < self.world

    def __exit__(self, *_):
        if dist.is_initialized():
            dist.destroy_process_group()
