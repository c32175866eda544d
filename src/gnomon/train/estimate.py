"""What a run will take before it starts: memory, traffic, operations and time, of one process of several.

Nothing is allocated. The model is built from tensors without data and run forward once; what autograd keeps is counted,
operations of the optimizer likewise. Everything else is arithmetic over the recipe.

Legend: N processes, P numbers in weights, M those that an orthogonalising optimizer moves as matrices.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gnomon import anatomy, optim
from gnomon.errors import UserError
from gnomon.models.transformer import Transformer
from gnomon.progress import duration, quantity
from gnomon.train import optimizer
from gnomon.train.distributed import recompute_blocks, strategy_of
from gnomon.train.recipe import Recipe

UTILISATION = 0.4
"""Share of a machine's peak that training reaches, an assumption: 0.3 to 0.5 is usual for models of this size."""


@dataclass(frozen=True)
class Machine:
    """Peak rates from the maker's data sheet: dense operations a second, bytes a second to a neighbour, bytes of memory."""

    name: str
    bf16: float
    fp32: float
    bandwidth: float
    memory: float


MACHINES = (
    Machine("A100 80 GB", 312e12, 19.5e12, 300e9, 80e9),
    Machine("H100 80 GB", 989e12, 67e12, 450e9, 80e9),
    Machine("H200 141 GB", 989e12, 67e12, 450e9, 141e9),
)


def estimate(recipe: Recipe, processes: int = 1, *, here: bool = False) -> dict[str, Any]:
    """Expectations of one run; plain numbers and text, as JSON has them.

    Args:
        recipe: the run.
        processes: how many share it, one a device.
        here: add this computer's processor to the machines, by timing a matrix product (a tenth of a second).

    Returns:
        `processes`, `strategy`, `parameters` P, `matrix_parameters` M, `tokens_per_step`, `tokens`, `flops_per_step` and
        `flops` (of all processes), `optimizer_flops` (of one step of one process), `watch_flops` (evaluations and probes of the
        whole run); `memory`, bytes of one process:
        `weights`, `gradients`, `optimizer`, `gathered` (whole weights under "fsdp"), `activations` (of one micro-batch, with
        the gradient of the largest) and `total`; `communication`, bytes one process sends a step: `gradients`, `weights`,
        `optimizer`, `total`; `checkpoint`, bytes of one checkpoint; `machines`, a list of `machine`, `fits`, `step_seconds`
        and `run_seconds`.

    Raises:
        UserError: the batch cannot be dealt to that many processes.
    """
    strategy = strategy_of(recipe, processes)
    rows = recipe.data.batch // recipe.data.accumulate // processes
    with FakeTensorMode():
        model = Transformer(recipe.model)
        sizes = [p.numel() for p in model.parameters()]
        block = max(sum(p.numel() for p in one.parameters()) for one in model.blocks)
        shapes = _matrices(model, recipe)
        kept = _activations(recipe, rows)
        watching = _watching(model, recipe)
    P, M = sum(sizes), sum(m * n for m, n, _ in shapes)
    root = P - recipe.model.layers * block
    wide = 2 if recipe.compute.precision == "bf16" else 4
    cut = processes if strategy == "fsdp" else 1
    sharing = (processes - 1) / processes

    memory = {
        "weights": 4 * P // cut,
        "gradients": 4 * P // cut,
        "optimizer": 4 * (2 * P - M) // cut,
        # The root's weights stay gathered over a step, and a block's while the next ones are under way.
        "gathered": 4 * root + 2 * wide * block if strategy == "fsdp" else 0,
        "activations": kept,
    }
    memory["total"] = sum(memory.values())
    traffic = {
        # A ring all-reduce is a reduce-scatter and an all-gather; FSDP does the first on gradients, the second on weights.
        "gradients": int(sharing * 4 * P * (1 if strategy == "fsdp" else 2)),
        "weights": int(sharing * (4 * root + 2 * wide * (P - root))) * recipe.data.accumulate if strategy == "fsdp" else 0,
        "optimizer": int(sharing * 4 * M * (3 / processes if strategy == "fsdp" else 1))
        if recipe.optim.name == "manifold-muon"
        else 0,
    }
    traffic["total"] = sum(traffic.values())
    flops = recipe.model.flops_per_token * recipe.tokens_per_step
    optimum = recipe.optim.name, recipe.optim.solver_steps
    updates = sum(count * _update_flops(*shape, *optimum) for shape, count in Counter(shapes).items())
    found: dict[str, Any] = {
        "processes": processes,
        "strategy": strategy,
        "parameters": P,
        "matrix_parameters": M,
        "tokens_per_step": recipe.tokens_per_step,
        "tokens": recipe.tokens_per_step * recipe.steps,
        "flops_per_step": flops,
        "flops": flops * recipe.steps,
        "optimizer_flops": updates // processes if recipe.optim.name == "manifold-muon" else updates,
        "watch_flops": watching,
        "memory": memory,
        "communication": traffic,
        "checkpoint": 4 * (3 * P - M) + (4 * P if processes > 1 else 0),
    }
    machines = [*MACHINES, *([_this_computer()] if here else [])]
    return found | {"machines": [_on(machine, found, recipe) for machine in machines]}


def table(found: dict[str, Any]) -> list[dict[str, str]]:
    """The estimate as rows of `what`, `amount`, `how`, for `gnomon.report.show`."""
    memory, traffic, N = found["memory"], found["communication"], found["processes"]

    def row(what: str, amount: str, how: str = "") -> dict[str, str]:
        return {"what": what, "amount": amount, "how": how}

    rows = [
        row("processes", str(N), found["strategy"]),
        row("parameters", quantity(found["parameters"]), f"{quantity(found['matrix_parameters'])} orthogonalised"),
        row("tokens", quantity(found["tokens"]), f"{found['tokens_per_step']:,} a step"),
        row("operations", f"{found['flops'] / 1e15:,.3g} PFLOP", f"{quantity(found['flops_per_step'], 'FLOP')} a step"),
    ]
    if found["optimizer_flops"]:
        rows.append(row("optimizer", quantity(found["optimizer_flops"], "FLOP"), "a step of one process"))
    rows.append(row("evaluations, probes", quantity(found["watch_flops"], "FLOP"), "over the run"))
    rows += [row(f"memory: {name}", quantity(n, "B"), "of one process") for name, n in memory.items() if n]
    rows += [row(f"sent: {name}", quantity(n, "B"), "by one process, a step") for name, n in traffic.items() if n]
    rows.append(row("checkpoint", quantity(found["checkpoint"], "B"), "on disk"))
    for one in found["machines"]:
        seconds = one["step_seconds"]
        amount = f"{seconds:.3g} s a step" if seconds >= 1 else f"{1e3 * seconds:.3g} ms a step"
        fits = "" if one["fits"] else "; does not fit its memory"
        rows.append(row(one["machine"], amount, f"{duration(one['run_seconds'])} in all{fits}"))
    return rows


def _matrices(model: nn.Module, recipe: Recipe) -> list[tuple[int, int, Any]]:
    """Shape and manifold of every matrix that is orthogonalised, fused ones part by part."""
    if recipe.optim.name == "adamw":
        return []
    assigned = optimizer.assignment(model, recipe.optim) or optim.assign(model, "none")
    entries = [entry for entry in assigned if entry.manifold is not None]
    return [(entry.part.shape[0], entry.part.shape[1], entry.manifold) for entry in entries]


def _activations(recipe: Recipe, rows: int) -> int:
    """Bytes autograd keeps of one micro-batch, and the gradient of the largest; with `recompute`, one block's besides."""
    tokens = torch.zeros(rows, recipe.model.context, dtype=torch.int64)
    total, largest = _kept_at_depth(recipe, tokens, recompute=False)
    if recipe.parallel.recompute:
        inputs, largest = _kept_at_depth(recipe, tokens, recompute=True)
        block = max(0, total - inputs) // recipe.model.layers
        total, largest = inputs + block, max(largest, block)
    return total + largest


def _kept_at_depth(recipe: Recipe, tokens: torch.Tensor, recompute: bool) -> tuple[int, int]:
    """Bytes autograd keeps in all, and of the largest tensor. Blocks keep alike, so models of one and two tell of any depth."""
    found = []
    for layers in (1, 2):
        model = Transformer(replace(recipe.model, layers=layers))
        if recompute:
            recompute_blocks(model)
        found.append(_kept(model, recipe, tokens))
    one, two = map(sum, found)
    deep = recipe.model.layers > 1
    return one + (recipe.model.layers - 1) * (two - one), max(found[deep])


def _kept(model: Transformer, recipe: Recipe, tokens: torch.Tensor) -> list[int]:
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage()._cdata not in weights:
            found[x.untyped_storage()._cdata] = x
        return x

    bf16 = recipe.compute.precision == "bf16"
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model.loss(tokens, tokens)
    assert loss.requires_grad
    return [x.untyped_storage().nbytes() for x in found.values()]


@functools.cache
def _update_flops(m: int, n: int, manifold: Any, name: str, solver_steps: int) -> int:
    """Operations of one step of one matrix; torch.optim.Muon does five quintic iterations."""
    short, long = sorted((m, n))
    if name == "muon":
        return 5 * (4 * short * short * long + 2 * short**3)
    W = torch.empty(m, n, device="meta")
    with FlopCounterMode(display=False) as counter:
        optim.advance(W, W.clone(), manifold, 1.0, steps=solver_steps)
    return counter.get_total_flops()


def _on(machine: Machine, found: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Gradients and weights travel while the backward pass (two thirds of the operations) runs; the rest waits."""
    rate = UTILISATION * (machine.bf16 if recipe.compute.precision == "bf16" else machine.fp32)
    compute = found["flops_per_step"] / found["processes"] / rate * (4 / 3 if recipe.parallel.recompute else 1)
    moved = found["communication"]
    hidden = (moved["gradients"] + moved["weights"]) / machine.bandwidth
    exposed = max(0.0, hidden - compute * 2 / 3) + moved["optimizer"] / machine.bandwidth
    seconds = compute + found["optimizer_flops"] / rate + exposed
    return {
        "machine": machine.name,
        "fits": found["memory"]["total"] < 0.95 * machine.memory,
        "step_seconds": seconds,
        "run_seconds": seconds * recipe.steps + found["watch_flops"] / found["processes"] / rate,
    }


def _watching(model: nn.Module, recipe: Recipe) -> int:
    """Operations of the evaluations and looks of a whole run, at the rate of the rest.

    A forward pass is a third of a training step's operations. A look at an (m, n) matrix is six products with it and its transpose, and
    a handful of passes over it and its gradient, at a tenth of that rate: about 400 m n. What continuity and ManifoldMuon's measures
    take grows like the singular values' 4 m n min(m, n), at less than half of the rate (measured on `tiny`: 0.18 of a matrix product's
    against 0.4); the latter, whose optimum is sought again, some six times as long. Attention logits, which training never writes down,
    and the sums over hidden states make a look at them 1.4 forward passes.
    """
    watch, T = recipe.watch, recipe.model.context
    forward = recipe.model.flops_per_token / 3
    shapes = [part.shape for part in anatomy.read(model) if part.is_matrix and part.sublayer in ("attention", "mlp")]
    spectra = sum(9 * m * n * min(m, n) for m, n in shapes)
    looks = sum(400 * m * n for m, n in shapes) + 1.4 * forward * watch.probe_tokens
    looks += 6 * spectra if recipe.optim.name == "manifold-muon" else 0
    evaluation = forward * max(watch.eval_tokens // T, 1) * T
    tracked = 3 * spectra * (recipe.steps // watch.track_every if watch.track_every else 0)
    return int(_times(recipe.steps, watch.eval_every) * evaluation + _times(recipe.steps, watch.probe_every) * looks + tracked)


def _times(steps: int, every: int) -> int:
    """How often something falls due; before the first step too, at the last in any case."""
    return 1 - (-steps // every) if every else 1


@functools.cache
def _this_computer() -> Machine:
    """The rate of an fp32 product on the processor's threads."""
    x = torch.randn(768, 768)
    y = x @ x
    start = time.perf_counter()
    for _ in range(10):
        torch.mm(x, x, out=y)
    rate = 10 * 2 * 768**3 / (time.perf_counter() - start)
    return Machine(f"this processor, {torch.get_num_threads()} threads", rate, rate, 5e9, _memory())


def _memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError) as error:
        raise UserError(f"this system does not tell how much memory it has: {error}") from error
