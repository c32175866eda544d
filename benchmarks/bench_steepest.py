"""The direction of descent: its alignment with the optimum, tangency and cost, by aspect and accuracy.

Gaussian gradients, random points; 256 constrained columns. `alignment` is a lower bound (the optimum is bounded by the dual
after four refinements). Cost is the median of paired rounds over five bf16 quintics of the same matrix (torch.optim.Muon's
direction), products counted by what they multiply, factorisations left out.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.timing import ratio, side_by_side
from gnomon.geometry.manifolds import DGram, Manifold, Stiefel
from gnomon.geometry.polar import polar
from gnomon.geometry.steepest import direction

COLUMNS = 256
TARGETS = {1: "1e-5", 2: "7e-2", 3: "3e-2", 4: "2e-2"}


def rows(rounds: int = 7) -> list[dict]:
    found = []
    for aspect in (1, 2, 3, 4):
        for manifold in (Stiefel(), DGram()):
            for steps in (0, 1, 2) if aspect > 1 or isinstance(manifold, DGram) else (0,):
                found.append(row(aspect, manifold, steps, rounds))
    return found


def row(aspect: int, manifold: Manifold, steps: int, rounds: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    W = manifold.random(aspect * COLUMNS, COLUMNS, generator=generator)
    G = torch.randn(W.shape, generator=generator)
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
        "steps": steps,
        "1 - alignment": f"{1 - float(found.alignment):.1e}",
        "target": TARGETS[aspect] if steps == 0 and (aspect > 1 or manifold.name == "stiefel") else "",
        "tangency": f"{float(found.tangency):.1e}",
        "time / Muon's direction": ratio(seconds, "ours", "muon"),
        "products / Muon's": ours.get_total_flops() / muon.get_total_flops(),
    }


if __name__ == "__main__":
    from gnomon import report

    report.show(rows())
