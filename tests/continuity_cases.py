"""Small models with known singular vectors, for the tests of continuity."""

from __future__ import annotations

import math

import anatomy_cases
import numpy as np
import torch

TURN_V, TURN_U = math.radians(20), math.radians(35)  # from one layer to the next


def direction(dim: int, angle: float, seed: int) -> np.ndarray:
    """A unit vector at `angle` in a fixed random plane of R^dim."""
    if dim == 1:
        return np.ones(1)
    plane = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, 2)))[0]
    return plane @ np.array([math.cos(angle), math.sin(angle)])


class Spiked:
    """Stands in for a random generator: matrices with v1 and u1 turned by a known angle a layer."""

    def __init__(self, layer: int, seed: int):
        self.layer, self.random = layer, np.random.default_rng(seed)

    def standard_normal(self, shape):
        M, N = shape
        bulk = self.random.standard_normal(shape) * 1e-3 / math.sqrt(max(shape))
        return bulk + np.outer(direction(M, self.layer * TURN_U, 1), direction(N, self.layer * TURN_V, 2))


def planted(family: str, layout: str, monkeypatch) -> anatomy_cases.Case:
    """A checkpoint of `family` in which every matrix of every layer is spiked."""
    plain, count = anatomy_cases._plant, iter(range(10**6))

    def plant(made, name, layer, expert, shape, role, family, random):
        plain(made, name, layer, expert, shape, role, family, Spiked(layer, next(count)))

    monkeypatch.setattr(anatomy_cases, "_plant", plant)
    return anatomy_cases.case(family, layout)


def as_torch(case: anatomy_cases.Case, dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(x)).to(dtype) for name, x in case.tensors.items()}


LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(layers: int = 4, seed: int = 0, d: int = 32, f: int = 48, norms: bool = False) -> dict[str, torch.Tensor]:
    """A random Llama checkpoint."""
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (d // 2, d),
        "self_attn.v_proj": (d // 2, d),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }
    tensors = {"model.embed_tokens.weight": torch.randn(50, d, generator=g)}
    for layer in range(layers):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape, generator=g)
        if norms:
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{layer}.{name}.weight"] = torch.rand(d, generator=g) + 0.5
    return tensors
