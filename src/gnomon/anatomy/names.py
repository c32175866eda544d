"""Taking a tensor's name apart: stack prefix, layer, path inside the layer, expert, what kind of leaf.

model.layers.3.mlp.experts.7.gate_proj.weight
└ prefix ──┘ 3 └ path: mlp.experts.7.gate_proj   template: mlp.experts.#.gate_proj   expert: 7   leaf: weight
"""

from __future__ import annotations

import re
from collections.abc import Container
from functools import lru_cache
from typing import NamedTuple

_CONTAINER = r"(?:(?:\w+_)?(?:layers?|blocks?)|h|blk|resblocks|albert_layer_groups)"
_LAYER = re.compile(rf"(?:^|\.)(?P<container>{_CONTAINER})\.(?P<layer>\d{{1,9}})(?:\.|$)")
_NUMBERED = re.compile(r"(?:^|\.)(?P<container>(?!experts\.)[A-Za-z_]\w*\.)?(?P<layer>\d{1,9})(?:\.|$)")
# No more digits than a count can have; int() refuses 4,300 and more.
_NUMBER = re.compile(r"(?<![^.])\d{1,9}(?![^.])")
_EXPERT = re.compile(r"(?:^|\.)(?:experts|ffn_(?:gate|up|down))\.(\d{1,9})(?:\.|$)")
_NAMED_EXPERT = re.compile(r"(?<=\bexperts\.)(?:expert_|mlp_|expert)(?=\d)")  # Switch's experts.expert_3

# Segments added by wrappers (DDP, torch.compile, FSDP, activation checkpointing, PEFT); they say nothing.
_WRAPPER = re.compile(
    r"(?:(?<=\.)|^)(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer|original_module"
    r"|modules_to_save\.\w+)\."
)
_PARAMETRIZED = re.compile(r"\.parametrizations\.(\w+)\.original$")
# weight_norm keeps W = g v / ||v|| as g (a number a row) and v, under names that changed with torch 2.1.
_WEIGHT_NORM = re.compile(
    r"\.(?:parametrizations\.(?P<new>\w+)\.original(?P<part>[01])|(?P<old>weight)_(?P<letter>[gv]))$"
)
_LORA = re.compile(r"\.lora_(?:embedding_)?([AB])(?:\.\w+)*$")
_COMPANION = re.compile(
    r"(?:\.(?:weight_(?:scale_inv|scale_2|scale|zero_point|global_scale|shape|g_idx|offset)"
    r"|input_scale|output_scale|input_global_scale|activation_scale|scales?|scale_inv|zeros|qzeros|g_idx|SCB"
    r"|weight_format|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+|SCB))"
    r"|_scales|_scale_inv|_scale)$"
)
_LEAVES = frozenset(["weight", "bias", "gamma", "beta", "qweight", "weight_packed"])


class Name(NamedTuple):
    """A tensor's name, taken apart.

    Attributes:
        prefix: what precedes the layer number (`model.layers`); the whole stack shares it. "" outside layers.
        layer: number of the layer, None outside the layers.
        path: module path inside the layer, or the whole path outside of it.
        template: `path` with every number replaced by `#`.
        leaf: "weight", "bias", … or "" for a parameter that hangs directly on its module.
        expert: number after `experts.` (or after ffn_gate and its like in old GGUF files).
        inner: other numbers in the path, which tell otherwise equal parts of one layer apart.
        adapter: "A" or "B" of a LoRA pair.
        companion: the quantised weight whose scale, zero point or the like this is.
        packed: the weight is stored as packed integers, or as factors.
    """

    prefix: str
    layer: int | None
    path: str
    template: str
    leaf: str
    expert: int | None = None
    inner: tuple[int, ...] = ()
    adapter: str = ""
    companion: str = ""
    packed: bool = False


def parse(name: str, names: Container[str] = (), *, any_number: bool = False) -> Name:
    """Take `name` apart.

    Args:
        names: all names of the model; a scale is one only if the weight it belongs to is among them.
        any_number: the first number of the path counts layers, whatever holds it.
    """
    path = _WRAPPER.sub("", name)
    path = _PARAMETRIZED.sub(r".\1", path)
    if "experts.e" in path or "experts.m" in path:
        path = _NAMED_EXPERT.sub("", path)
    companion, packed, adapter = "", False, ""
    if path[-1:] in ("0", "1", "g", "v") and (found := _WEIGHT_NORM.search(path)):
        kept = found["new"] or found["old"]
        packed = found["part"] == "1" or found["letter"] == "v"
        path = path[: found.start()] + (f".{kept}" if packed else ".weight_norm.gamma")
    elif path.endswith(".W_q"):  # HQQ: integers, not a query
        packed, path = True, path.removesuffix("W_q") + "weight"
    if not path.endswith((".weight", ".bias")):
        if companion := _companion_of(name, names):
            path = _COMPANION.sub("", path) + ".weight"
        elif path.endswith(("_blocks", "_packed", ".qweight")):
            packed, path = True, path.removesuffix("_blocks").removesuffix("_packed")
    packed = packed or f"{name}.absmax" in names  # bitsandbytes, 4 bits
    if "lora_" in path:
        if "lora_magnitude" in path:
            path = path.partition(".lora_magnitude")[0] + ".bias"
        elif found := _LORA.search(path.removesuffix(".weight")):
            adapter, path = found[1], path[: found.start()] + ".weight"
    path, leaf = _leaf(path)

    match = (_NUMBERED if any_number else _LAYER).search(path)
    if match is None:
        return Name("", None, path, _template(path), leaf, adapter=adapter, companion=companion, packed=packed)
    prefix, layer, rest = path[: match.start("layer")].rstrip("."), int(match["layer"]), path[match.end() :]
    if not _NUMBER.search(rest):
        return Name(prefix, layer, rest, rest, leaf, None, (), adapter, companion, packed)
    expert = _EXPERT.search(rest)
    inner = tuple(int(n) for n in _NUMBER.findall(_EXPERT.sub(".", rest)))
    return Name(
        *(prefix, layer, rest, _template(rest), leaf, int(expert[1]) if expert else None, inner),
        *(adapter, companion, packed),
    )


def _companion_of(name: str, names: Container[str]) -> str:
    base = _COMPANION.sub("", name)
    if base == name:
        return ""
    ends = (".weight", ".qweight", ".weight_packed", "_blocks", "")
    return next((base + end for end in ends if base + end in names), "")


def _leaf(path: str) -> tuple[str, str]:
    head, _, last = path.rpartition(".")
    if last in _LEAVES:
        return head, "weight" if last in ("qweight", "weight_packed") else last
    if last in ("in_proj_weight", "in_proj_bias"):  # torch.nn.MultiheadAttention
        return f"{head}.in_proj".lstrip("."), last.removeprefix("in_proj_")
    if last.endswith("_bias") and not last.startswith("relative"):
        return path.removesuffix("_bias"), "bias"
    return path, ""


@lru_cache(maxsize=65536)
def _template(path: str) -> str:
    return _NUMBER.sub("#", path)
