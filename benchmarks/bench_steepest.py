"""The direction of descent: its alignment with the optimum, tangency and cost, by aspect and accuracy.

Random points, 256 constrained columns; gradients are Gaussian, or decay like those of training (singular values 1 / (1 + 60 i / n):
half of them below a thirtieth of the largest). `alignment` is a lower bound (the optimum is bounded by the dual
after four refinements). Cost is the median of paired rounds over five bf16 quintics of the same matrix (torch.optim.Muon's
direction), products counted by what they multiply, factorisations left out.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.timing import ratio, side_by_side
from gnomon.geometry.manifolds import DGram, Manifold, Stiefel
from gnomon.geometry.polar import polar
from gnomon.geometry.steepest import direction

COLUMNS = 256
TARGETS = {1: "1e-3", 2: "1.5e-2", 3: "7e-3", 4: "5e-3"}


def rows(rounds: int = 7) -> list[dict]:
    found = []
    for aspect in (1, 2, 3, 4):
        for manifold in (Stiefel(), DGram()):
            for steps in (0, 1, 2) if aspect > 1 or isinstance(manifold, DGram) else (0,):
                found += [row(aspect, manifold, steps, kind, rounds) for kind in ("gaussian", "decaying")]
    return found


def gradient(kind: str, rows: int, generator: torch.Generator) -> Tensor:
    if kind == "gaussian":
        return torch.randn(rows, COLUMNS, generator=generator)
    U, V = (torch.linalg.qr(torch.randn(n, COLUMNS, generator=generator))[0] for n in (rows, COLUMNS))
    return (U / (1 + 60 * torch.arange(COLUMNS) / COLUMNS)) @ V.T


def row(aspect: int, manifold: Manifold, steps: int, kind: str, rounds: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    W = manifold.random(aspect * COLUMNS, COLUMNS, generator=generator)
    G = gradient(kind, aspect * COLUMNS, generator)
    found = direction(W, G, manifold, steps=steps)
    seconds = side_by_side(
        {"ours": lambda: direction(W, G, manifold, steps=steps), "muon": lambda: polar(G, "newton-schulz")}, rounds
    )
    with FlopCounterMode(display=False) as ours:
        direction(W, G, manifold, steps=steps)
    with FlopCounterMode(display=False) as muon:
        polar(G, "newton-schulz")
    return {
        "manifold": manifold.name,
        "aspect": f"{aspect}:1",
        "gradient": kind,
        "steps": steps,
        "1 - alignment": f"{1 - float(found.alignment):.1e}",
        "target": TARGETS[aspect] if steps == 0 and kind == "gaussian" and (aspect > 1 or manifold.name == "stiefel") else "",
        "tangency": f"{float(found.tangency):.1e}",
        "time / Muon's direction": ratio(seconds, "ours", "muon"),
        "products / Muon's": ours.get_total_flops() / muon.get_total_flops(),
    }


if __name__ == "__main__":
    from gnomon import report

    report.show(rows())
