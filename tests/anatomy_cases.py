"""Generated checkpoints with planted matrices: what each of 36 families stores, and what it means.

data/anatomy_families.json lists names and shapes of tiny models saved by transformers 4.57 and 5.24 (the
same on disk in both), what transformers 5 holds in memory instead, and how each tensor is packed. The
packers below write the packing down once more, as loops over heads, independently of gnomon.anatomy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

FAMILIES = json.loads((Path(__file__).parent / "anatomy" / "anatomy_families.json").read_text())
HEADS, EXPERTS = 6, 4
WIDE = {"qwen3", "gemma", "gemma2", "gpt_oss", "glm"}  # head_dim 24: queries wider than the stream


class Planted(NamedTuple):
    tensor: str
    layer: int
    role: str
    expert: int | None
    matrix: np.ndarray  # out x in


class Case(NamedTuple):
    config: dict
    tensors: dict[str, np.ndarray]
    planted: list[Planted]
    axes: dict[str, tuple[int, int]]  # tensor -> (in axis, out axis)


def case(family: str, layout: str = "disk") -> Case:
    """A checkpoint of `family` with a random matrix planted for every role, as on disk or as in memory."""
    spec = FAMILIES[family]
    shapes, roles = dict(spec["disk"]), dict(spec["roles"])
    if layout == "memory":
        shapes = {name: it for name, it in shapes.items() if name not in spec["memory_without"]} | spec["memory"]
        roles |= spec["memory_roles"]
    made = Case(spec["config"], {}, [], {})
    random = np.random.default_rng(0)
    for template, entry in shapes.items():
        if not isinstance(entry[0], list):
            made.tensors[template] = random.standard_normal(entry)
            continue
        shape, layers = entry
        path = template.partition("{l}.")[2].removeprefix("albert_layers.0.")
        role = roles.get(path)
        for layer in range(layers) if isinstance(layers, int) else layers:
            for expert in range(EXPERTS) if "{e}" in template else (None,):
                name = template.format(l=layer, e=expert)
                if role is None:
                    made.tensors[name] = random.standard_normal(shape)
                else:
                    _plant(made, name, layer, expert, shape, role, family, random)
    return made


def _plant(made, name, layer, expert, shape, role, family, random) -> None:
    names, packing, orientation = role
    names = names.split("+")
    lead = len(shape) - 2
    transposed = orientation == "in_out"
    out, inputs = (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])
    packed = []
    for index in range(shape[0]) if lead else (expert,):
        matrices = [random.standard_normal((rows, inputs)) for rows in _rows(names, out, family, made.config)]
        one = _PACK[packing](matrices)
        packed.append(one.T if transposed else one)
        made.planted.extend(Planted(name, layer, r, index, m) for r, m in zip(names, matrices, strict=True))
    made.tensors[name] = np.stack(packed) if lead else packed[0]
    assert made.tensors[name].shape == tuple(shape), (name, shape)
    made.axes[name] = (lead, lead + 1) if transposed else (lead + 1, lead)


def _rows(names: list[str], out: int, family: str, config: dict) -> list[int]:
    if names == ["query", "key", "value"]:
        head_dim = 24 if family in WIDE else 16
        kv_heads = 1 if family == "falcon7b" else config.get("num_key_value_heads", HEADS)
        return [HEADS * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    if names == ["latent_key_value", "key_rope"]:
        return [config["kv_lora_rank"], config["qk_rope_head_dim"]]
    if names == ["key", "value"]:
        return [HEADS * config["qk_nope_head_dim"], HEADS * config["v_head_dim"]]
    return [out // len(names)] * len(names)


def _by_head(matrices: list[np.ndarray]) -> np.ndarray:
    rows = []
    for head in range(HEADS):
        for matrix in matrices:
            width = len(matrix) // HEADS
            rows += [matrix[head * width + i] for i in range(width)]
    return np.stack(rows)


_PACK = {
    "plain": lambda matrices: matrices[0],
    "stacked": np.concatenate,
    "latent_rope": np.concatenate,
    "by_head": _by_head,
    "nope_value": _by_head,
    "alternating": lambda matrices: np.stack([row for rows in zip(*matrices) for row in rows]),
}
