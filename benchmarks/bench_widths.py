"""What a hetero step costs over the width of a layer and over the aspect of its MLP, beside torch.optim.Muon on the same matrices.

One layer: four square attention matrices on Stiefel, an up and a down of `aspect` : 1 on DGram, fp32 weights and gradients. Ratios are
of paired rounds in one process. The floor of a contestant is the time that the products of its step (`GFLOP`) would take at the rate
of a square bf16 product of that width on this machine, measured in the same rounds.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.bench_muon import manifold_muon, torch_muon
from benchmarks.timing import median_ms, ratio, side_by_side
from gnomon.geometry.manifolds import DGram, Stiefel

SIZES = [(width, 4) for width in (256, 512, 1024, 2048)] + [(512, aspect) for aspect in (1, 2, 3, 8)]
PRODUCTS = 4
TARGET = 1.2


def step_of(optimizer: torch.optim.Optimizer):
    optimizer.step()  # makes its state, which no step after the first does
    return optimizer.step


def rows(rounds: int = 5, sizes: list[tuple[int, int]] = SIZES) -> list[dict]:
    found = []
    for width, aspect in sizes:
        factor = torch.randn(width, width).bfloat16()
        size = (1, width, aspect)
        steps = {
            "torch.optim.Muon": step_of(torch_muon(size)),
            "ManifoldMuon hetero": step_of(manifold_muon(Stiefel(), DGram(), size)),
        }
        products = {"bf16 products": lambda factor=factor: [factor @ factor for _ in range(PRODUCTS)]}
        seconds = side_by_side(steps | products, rounds, warmup=1)
        rate = PRODUCTS * 2 * width**3 / (median_ms(seconds["bf16 products"]) / 1e3)
        for name, step in steps.items():
            with FlopCounterMode(display=False) as counted:
                step()
            flops = counted.get_total_flops()
            ours = name != "torch.optim.Muon"
            found.append({
                "what": f"width {width}, MLP {aspect} : 1", "optimizer": name, "ms a step": median_ms(seconds[name]),
                "GFLOP": flops / 1e9, "of the floor": median_ms(seconds[name]) / (1e3 * flops / rate),
                "ratio to torch.optim.Muon": ratio(seconds, name, "torch.optim.Muon"), "target": TARGET if ours else None,
            })  # fmt: skip
    return found


if __name__ == "__main__":
    from gnomon import report

    report.show(rows())
