"""One optimizer step over the hidden matrices of two GPT-2-small layers, beside torch.optim.Muon and the paper's settings.

Eight 768 x 768 attention matrices, two 3072 x 768 and two 768 x 3072 MLP matrices, fp32 weights and gradients. Ratios are of
paired rounds in one process. `GFLOP` counts the matrix products of a step (torch.optim.Muon's are all in bf16; of ours those
of the small side, the quintics and the retraction's correction), not the factorisations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.timing import median_ms, ratio, side_by_side
from gnomon.geometry.manifolds import DGram, Euclidean, Stiefel
from gnomon.optim import ManifoldMuon

LAYERS, WIDTH = 2, 768
TARGETS = {"ManifoldMuon hetero": "at most 1.5", "paper's hetero": "at least 10 x hetero"}


def matrices(
    layers: int = LAYERS, width: int = WIDTH, aspect: int = 4
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Attention and MLP matrices of so many layers, with their gradients."""
    generator = torch.Generator().manual_seed(0)

    def make(name: str, m: int, n: int) -> tuple[str, nn.Parameter]:
        parameter = nn.Parameter(torch.randn(m, n, generator=generator) * 0.02)
        parameter.grad = torch.randn(m, n, generator=generator)
        return name, parameter

    attention = [make(f"{l}.{role}", width, width) for l in range(layers) for role in ("query", "key", "value", "output")]
    mlp = [make(f"{l}.up", aspect * width, width) for l in range(layers)]
    mlp += [make(f"{l}.down", width, aspect * width) for l in range(layers)]
    return attention, mlp


def manifold_muon(attention_on, mlp_on, size: tuple[int, ...] = (), **options) -> ManifoldMuon:
    attention, mlp = matrices(*size)
    groups = [{"params": attention, "manifold": attention_on}, {"params": mlp, "manifold": mlp_on}]
    optimizer = ManifoldMuon(groups, lr=0.02, check_finite=False, **options)
    for group in optimizer.param_groups:
        group["step"] = 20  # past the first steps, which iterate the retraction to convergence
    return optimizer


def torch_muon(size: tuple[int, ...] = ()) -> torch.optim.Optimizer:
    attention, mlp = matrices(*size)
    return torch.optim.Muon([p for _, p in attention + mlp], lr=0.02)


def first_step(optimizer: ManifoldMuon) -> None:
    for group in optimizer.param_groups:
        group["step"] = 0
    optimizer.step()
    for group in optimizer.param_groups:
        group["step"] = 20


def rows(rounds: int = 7, paper: bool = True) -> list[dict]:
    optimizers: dict[str, torch.optim.Optimizer] = {
        "torch.optim.Muon": torch_muon(),
        "ManifoldMuon none": manifold_muon(Euclidean(), Euclidean()),
        "ManifoldMuon stiefel": manifold_muon(Stiefel(), Stiefel()),
        "ManifoldMuon hetero": manifold_muon(Stiefel(), DGram()),
        "ManifoldMuon hetero, steps=1": manifold_muon(Stiefel(), DGram(), steps=1),
        "ManifoldMuon dgram": manifold_muon(DGram(), DGram()),
    }
    steps: dict[str, Callable[[], object]] = {name: optimizer.step for name, optimizer in optimizers.items()}
    steps["ManifoldMuon hetero, each of the first ten"] = lambda: first_step(optimizers["ManifoldMuon hetero"])
    seconds = side_by_side(steps, rounds=rounds)
    if paper:
        reproduction = manifold_muon(Stiefel(paper=True), DGram(paper=True))
        slow = side_by_side(
            {"paper's hetero": reproduction.step, "ManifoldMuon hetero": optimizers["ManifoldMuon hetero"].step}, 2, 1
        )
        seconds["paper's hetero"] = slow["paper's hetero"]
    found = []
    for name in seconds:
        step = reproduction.step if name == "paper's hetero" else steps[name]
        with FlopCounterMode(display=False) as counted:
            step()
        row = {"what": name, "ms a step": median_ms(seconds[name]), "GFLOP": counted.get_total_flops() / 1e9}
        if name != "paper's hetero":
            row["ratio to torch.optim.Muon"] = ratio(seconds, name, "torch.optim.Muon")
        else:
            row["ratio to torch.optim.Muon"] = median_ms(seconds[name]) / median_ms(seconds["torch.optim.Muon"])
            row["ratio to our hetero"] = ratio(slow, "paper's hetero", "ManifoldMuon hetero")
        found.append({**row, "target": TARGETS.get(name, "")})
    return found


if __name__ == "__main__":
    from gnomon import report

    report.show(rows())
