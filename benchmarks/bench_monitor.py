"""What `gnomon.Monitor` costs: steps without it, between two measurements and measured, in turn; and the peak of memory.

Overhead is of a run that measures every 50 steps; between them nothing is done, and what is told for it is the noise. Times are of
the processor, which a busy machine slows less than the clock. Memory is the largest resident set of a process that makes three steps,
less that of one without a monitor, in units of what one block keeps for its backward pass (`since_start=False`: the copy of the first
weights is a choice, and lies on the CPU).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import gnomon
from benchmarks.timing import median_ms, ratio, side_by_side
from gnomon.models import Transformer, TransformerConfig
from gnomon.train import optimizer, preset
from gnomon.train.recipe import OptimConfig

EVERY = 50
WIDE = dict(vocab_size=257, context=512, layers=2, heads=12, width=768)


def stepper(model: Transformer, sequences: int, optim: torch.optim.Optimizer) -> Callable[[], None]:
    x, y = torch.randint(model.config.vocab_size, (2, sequences, model.config.context))

    def forward_and_backward() -> None:
        optim.zero_grad(set_to_none=True)
        model.loss(x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return forward_and_backward


def row(what: str, model: Transformer, sequences: int, rounds: int, target: float, **options) -> dict:
    """One model: a step without a monitor, one between measurements, one that is measured, again and again."""
    optim = optimizer.build(model, OptimConfig(lr=1e-4))
    work, number = stepper(model, sequences, optim), iter(range(1, 1000))
    monitor = gnomon.Monitor(model, every=2, **options)
    monitor.close()

    def plain() -> None:
        work()
        optim.step()

    def watched() -> None:
        step = next(number)
        work()
        monitor.before_step(step)
        optim.step()
        monitor.after_step(step)

    seconds = side_by_side({"without": plain, "between": watched, "measured": watched}, rounds, 1, clock=time.process_time)
    measured, between = ratio(seconds, "measured", "without") - 1, ratio(seconds, "between", "without") - 1
    return {
        "what": what,
        "step (ms)": median_ms(seconds["without"]),
        "measuring costs (steps)": measured,
        "a step between costs (steps)": between,
        "overhead at every=50": measured / EVERY,
        "target": target,
    }


def rows() -> list[dict]:
    torch.manual_seed(0)
    tiny = preset("tiny")
    model = Transformer(tiny.model)
    batch = torch.randint(257, (max(tiny.watch.probe_tokens // tiny.model.context, 1), tiny.model.context))
    found = [
        row("tiny, its own batch", Transformer(tiny.model), tiny.data.batch, 7, 0.03, since_start=False),
        row("tiny, as `gnomon train` looks", model, tiny.data.batch, 7, 0.03, since_start=False, batch=batch, rows=None),
        row("GPT-2 small's width, 2 blocks, 1,024 tokens", Transformer(TransformerConfig(**WIDE)), 2, 5, 0.01),
    ]
    without, with_it = (peak(flag) for flag in ("without", "with"))
    more, unit = with_it["peak"] - without["peak"], without["block"]
    told = {"more (MB)": more / 1e6, "a block (MB)": unit / 1e6, "more (blocks)": more / unit, "target": 1.0}
    found.append({"what": "peak memory, the same with 2,048 tokens"} | told)
    return found


def peak(flag: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.bench_monitor", flag]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def three_steps(watched: bool) -> dict:
    """In a process of its own: the peak after three steps, and what one block keeps for its backward pass."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**WIDE))
    optim = optimizer.build(model, OptimConfig(lr=1e-4))
    work = stepper(model, 4, optim)
    work()
    optim.step()
    monitor = gnomon.Monitor(model, every=1, since_start=False) if watched else None
    for step in range(3):
        work()
        if monitor is not None:
            monitor.before_step(step)
        optim.step()
        if monitor is not None:
            monitor.after_step(step)
    # Not ru_maxrss, which a process has from the one that started it.
    status = Path("/proc/self/status").read_text()
    at_peak = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    h = torch.randn(4, model.config.context, model.config.width, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model.blocks[0](h, None, None, 0)
    return {"peak": at_peak, "block": sum(size for at, size in kept.items() if at not in weights) + 0 * out.numel()}


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(three_steps(sys.argv[1] == "with")))
    else:
        from gnomon import report

        report.show(rows())
