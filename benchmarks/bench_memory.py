"""The peak of memory of a training step, against the sum of its tensors, and against a plain PyTorch model of the same function.

Each contestant steps in a process of its own: two layers of GPT-2 small's width, 2,048 tokens, fp32. Its tensors are the weights, their
gradients, the state of the optimizer, and what autograd keeps for the backward pass, every storage counted once: the floor, which a
step needs all at once when the backward pass begins. The peak is the largest resident set from the third step to the fifth, less
what the process held before it had a model.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.bench_whole_run import PlainGPT
from gnomon.models import Transformer, TransformerConfig
from gnomon.train import optimizer, preset

SIZE = dict(vocab_size=257, context=512, layers=2, heads=12, width=768, positions="rope", norm="rms", bias=False, head_bias=True)
SEQUENCES = 4
CONTESTANTS = [
    ("plain", "adamw"), ("pre-norm", "adamw"), ("pre-norm", "muon"), ("proj-spheret", "adamw"), ("pre-norm", "hetero"),
    ("bounded-sphere", "muon"),
]  # fmt: skip
TARGET = 1.0  # of pre-norm and AdamW, against the plain model


def resident(name: str) -> int:
    """Bytes, by the name Linux has for them: VmRSS now, VmHWM at the peak."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def storages(tensors) -> dict[int, int]:
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


def trainer(residual: str, assignment: str, **size):
    """Model, optimizer, a batch, and what takes a step on it."""
    config = TransformerConfig(**SIZE | size, residual="pre-norm" if residual == "plain" else residual)
    model = PlainGPT(config) if residual == "plain" else Transformer(config)
    optim = torch.optim.AdamW(model.parameters(), fused=True) if residual == "plain" else (
        optimizer.build(model, preset("tiny", residual, assignment).optim))  # fmt: skip
    batch = torch.randint(config.vocab_size, (2, SEQUENCES, config.context))

    def step() -> None:
        optim.zero_grad(set_to_none=True)
        model.loss(*batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()

    return model, optim, batch, step


def measure(residual: str, assignment: str) -> dict[str, int]:
    """In a process of its own."""
    torch.manual_seed(0)
    trainer(residual, assignment, layers=1, width=32, heads=2, context=16)[3]()  # what a first step imports is no tensor of a step
    before = resident("VmRSS")
    model, optim, (x, y), step = trainer(residual, assignment)
    for _ in range(2):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for _ in range(3):
        step()
    peak = resident("VmHWM") - before
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.detach()) or t, lambda t: t):
        loss = model.loss(x, y)
    state = [v for one in optim.state.values() for v in one.values() if torch.is_tensor(v)]
    held = storages([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *state])
    both = held | storages(kept)
    assert loss.requires_grad
    return {"peak": peak, "held": sum(held.values()), "sum": sum(both.values())}


def rows(contestants: list[tuple[str, str]] = CONTESTANTS) -> list[dict]:
    found, plain = [], math.nan
    for pair in contestants:
        command = [sys.executable, "-m", "benchmarks.bench_memory", *pair]
        told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        if pair[0] == "plain":
            plain = told["peak"]
        found.append({
            "what": ", ".join(pair), "weights, gradients, state (MB)": told["held"] / 1e6,
            "kept for the backward pass (MB)": (told["sum"] - told["held"]) / 1e6, "peak (MB)": told["peak"] / 1e6,
            "peak / sum": told["peak"] / told["sum"], "peak / plain": told["peak"] / plain,
            "target": TARGET if pair == ("pre-norm", "adamw") else None,
        })  # fmt: skip
    return found


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        from gnomon import report

        report.show(rows())
