"""The sphere residual against RMSNorm + add, forward and backward, at (16384, 768): time and memory kept for backward.

Floor: the sphere moves 9 vectors of D numbers a token (forward 2 reads, 1 write; backward 4 reads, 2 writes), RMSNorm +
add 8, so compiled code can at best cost 9/8 = 1.125 of it (derived in docs/guides/residuals.md).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import median_ms, ratio, side_by_side
from gnomon.geometry import sphere

T, D = 16384, 768
FLOOR = 9 / 8


def add_norm(h: Tensor, f: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What Pre-LN does between two branches: join the last one, normalise for the next."""
    h = h + f
    return F.rms_norm(h, (D,), weight, 1e-6), h


def rows() -> list[dict]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for compiled in (False, True):
            torch._dynamo.reset()
            contestants = {"RMSNorm + add": norm_step(dtype, compiled)}
            contestants |= {f"sphere p = {p:g}": sphere_step(dtype, compiled, p) for p in (1.0, 2.0, math.inf)}
            seconds = side_by_side(contestants)
            for name in contestants:
                found.append(
                    {
                        "what": name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "mode": "compiled" if compiled else "eager",
                        "ms": median_ms(seconds[name]),
                        "ratio": ratio(seconds, name, "RMSNorm + add"),
                        "target": 1.25 if compiled else 2.0,
                        "floor": FLOOR,
                    }
                )
    return found + memory_rows()


def norm_step(dtype: torch.dtype, compiled: bool):
    h, f, g = (torch.randn(T, D, dtype=dtype) for _ in range(3))
    weight = torch.ones(D, dtype=dtype, requires_grad=True)
    h.requires_grad_(), f.requires_grad_()
    function = torch.compile(add_norm, fullgraph=True, dynamic=False) if compiled else add_norm

    def run():
        torch.autograd.backward(function(h, f, weight), (g, g))
        h.grad = f.grad = weight.grad = None

    return run


def sphere_step(dtype: torch.dtype, compiled: bool, p: float):
    h, f, g = (torch.randn(T, D, dtype=dtype) for _ in range(3))
    alpha = torch.ones(1, requires_grad=True)
    h.requires_grad_(), f.requires_grad_()

    def residual(h, f, alpha):
        # The stream is both the next branch's input and its own continuation: two gradients arrive at it.
        out = sphere.step(h, f, alpha, p=p, radius=math.sqrt(D))
        return out, out.view_as(out)

    function = torch.compile(residual, fullgraph=True, dynamic=False) if compiled else residual

    def run():
        torch.autograd.backward(function(h, f, alpha), (g, g))
        h.grad = f.grad = alpha.grad = None

    return run


def memory_rows() -> list[dict]:
    """Bytes a token kept for the backward pass by one join and the linear layer that reads the stream after it."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        kept = {}
        for name in ("RMSNorm + add", "sphere p = 1"):
            h, f = (torch.randn(1024, D, dtype=dtype, requires_grad=True) for _ in range(2))
            linear, weight = nn.Linear(D, 8, dtype=dtype), torch.ones(D, dtype=dtype, requires_grad=True)
            saved: dict[int, int] = {}

            def pack(t, saved=saved):
                saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                # `h` itself was kept by the branch that read it, so it is not counted again.
                if name == "sphere p = 1":
                    linear(sphere.step(h, f, torch.ones(1, requires_grad=True), radius=math.sqrt(D)))
                else:
                    linear(add_norm(h, f, weight)[0])
            for counted_elsewhere in (linear.weight, weight, h):
                saved.pop(counted_elsewhere.untyped_storage().data_ptr(), None)
            kept[name] = sum(saved.values()) / 1024
        for name, size in kept.items():
            found.append(
                {
                    "what": f"saved for backward, {name}",
                    "dtype": str(dtype).removeprefix("torch."),
                    "mode": "eager",
                    "bytes/token": size,
                    "ratio": size / kept["RMSNorm + add"],
                    "target": 1.0,
                }
            )
    return found


if __name__ == "__main__":
    from gnomon import report

    report.show(rows())
