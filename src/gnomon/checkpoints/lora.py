"""LoRA folders (PEFT): the update scale * B A of every adapted weight, alone or added to its base.

Hu et al., arXiv:2106.09685, equation 3: W = W_0 + (alpha / r) B A, with A (r, in) and B (out, r);
rank-stabilised adapters divide by sqrt(r) instead (arXiv:2312.03732).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gnomon.checkpoints.checkpoint import Buffer, Checkpoint, Entry
from gnomon.errors import UserError

_PART = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?$"
)


def update(adapter: Checkpoint, config: Mapping[str, Any], base: Checkpoint | None = None) -> Checkpoint:
    """A checkpoint of the updates of `adapter`; with `base`, of the base with the updates added.

    Args:
        config: contents of adapter_config.json; empty when it is lost, and then alpha / r is taken as 1,
            which no measure of directions depends on as long as no base is added.

    Raises:
        UserError: a factor has no partner, the factors do not fit each other, or a target is not in `base`.
    """
    pairs: dict[str, dict[str, str]] = {}
    for name in adapter.entries:
        if found := _PART.match(name):
            pairs.setdefault(f"{found['module']}.weight", {})[found["side"]] = name
    if not pairs:
        raise UserError(f"{adapter.name} holds no LoRA factors (…lora_A.weight, …lora_B.weight).")
    transposed = bool(config.get("fan_in_fan_out"))
    targets = {name: _find(name, base) for name in pairs} if base else {name: name for name in pairs}
    updates: dict[str, tuple[str, str, float]] = {}
    entries: dict[str, Entry] = dict(base.entries) if base else {}
    for name, sides in pairs.items():
        if set(sides) != {"A", "B"}:
            only = next(iter(sides.values()))
            raise UserError(
                f"{adapter.name}: {only!r} has no partner lora_{'B' if 'A' in sides else 'A'}. The file "
                "is cut; download it again."
            )
        A, B = (adapter.entries[sides[side]] for side in "AB")
        if len(A.shape) != 2 or len(B.shape) != 2 or A.shape[0] != B.shape[1]:
            raise UserError(f"{adapter.name}: the factors of {name!r} do not fit: A {A.shape}, B {B.shape}.")
        shape = (A.shape[1], B.shape[0]) if transposed else (B.shape[0], A.shape[1])
        target = targets[name]
        if base and base.entries[target].shape != shape:
            raise UserError(
                f"{adapter.name}: the update of {name!r} is {shape}, its target in {base.name} is "
                f"{base.entries[target].shape}. This adapter belongs to another base."
            )
        entry = A._replace(shape=shape, nbytes=A.nbytes + B.nbytes)
        entries[target] = entry
        if base:
            was = base.entries[target]
            entries[target] = was._replace(nbytes=was.nbytes + entry.nbytes)
        updates[target] = (sides["A"], sides["B"], _scale(name, config, A.shape[0]))

    def load(name: str, buffer: Buffer | None, index: int | None) -> Tensor:
        if name not in updates:
            assert base is not None
            return base.load(name, buffer, index)
        a, b, scale = updates[name]
        delta = scale * (adapter.load(b, None, None).float() @ adapter.load(a, None, None).float())
        delta = delta.T if transposed else delta
        return base.load(name, buffer, None).float() + delta if base else delta

    said = () if config else ("adapter_config.json is missing: alpha / r was taken as 1",)
    kind = f"LoRA update added to {base.name}" if base else "LoRA update alone (no base given)"
    model_config = base.config if base else adapter.config
    return dataclasses.replace(
        adapter, entries=entries, load=load, config=model_config, notes=(*adapter.notes, *said, kind)
    )


def _scale(name: str, config: Mapping[str, Any], rank: int) -> float:
    def own(patterns: Any, otherwise: float) -> float:
        module = name.removesuffix(".weight")
        found = (value for key, value in (patterns or {}).items() if re.search(rf"(^|\.){key}$", module))
        return float(next(found, otherwise))

    if "lora_alpha" not in config:
        if config:
            raise UserError("adapter_config.json has no lora_alpha; it is needed to scale the update.")
        return 1.0
    alpha = own(config.get("alpha_pattern"), config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _find(name: str, base: Checkpoint) -> str:
    """The tensor of `base` that `name` adapts: equal, or equal up to a prefix on one side."""
    if name in base.entries:
        return name
    near = [other for other in base.entries if other.endswith("." + name) or name.endswith("." + other)]
    if len(near) != 1:
        raise UserError(
            f"the adapter changes {name!r}, and {base.name} has {len(near)} tensors of that name. "
            "Give the base this adapter was trained on."
        )
    return near[0]
