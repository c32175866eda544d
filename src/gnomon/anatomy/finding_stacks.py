"""Sharing a model's tensors out among its stacks (text, vision, encoder, decoder, mtp …)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from gnomon.anatomy.families import family_of_type
from gnomon.anatomy.names import parse
from gnomon.anatomy.sizes import model_type, nested
from gnomon.anatomy.stack import Member, Stack

_WORDS = {
    "mtp": {"mtp"},
    "vision": {"vision", "visual", "vit", "image"},
    "audio": {"audio", "speech"},
}
# Outside the layers: what is as wide as the stream.
_TABLE = re.compile(r"embed|wte|tok_emb|shared$|lm_head|norm|(?:^|[._])ln", re.IGNORECASE)

# A container of layers inside a layer, with modules in it: `blocks.#.attn`, not `mlp.layers.#`.
_NESTED = re.compile(r"(?:^|\.)(?:layers?|blocks?)\.#\.(?=[a-zA-Z])")


def members_of(tensors: list[Any]) -> list[Member]:
    """Each tensor with its name taken apart.

    Layers are what a container called layers, blocks, h … numbers. Where a model has none, any number counts
    that repeats the same weights at least twice. Where layers hold layers (Swin's stages), the inner ones
    count. DeepSeek keeps its multi-token-prediction layer as one more layer of the stack; it becomes a stack
    of its own.
    """
    names = {tensor.name for tensor in tensors}
    members = [Member(tensor, parse(tensor.name, names)) for tensor in tensors]
    if all(at.layer is None for _, at in members):
        members = _any_number(members, names)
    members = _inner_layers(members)
    extra = {(at.prefix, at.layer) for _, at in members if at.layer is not None and at.path == "eh_proj"}
    if extra:
        members = [
            Member(tensor, at._replace(prefix=f"{at.prefix}.mtp")) if (at.prefix, at.layer) in extra else member
            for member in members
            for tensor, at in [member]
        ]
    return members


def find_stacks(members: list[Member], config: Mapping[str, Any]) -> dict[str, Stack]:
    """prefix -> `Stack`, in stored order."""
    by_prefix: dict[str, list[Member]] = {}
    for member in members:
        if member.at.layer is not None:
            by_prefix.setdefault(member.at.prefix, []).append(member)
    names: dict[str, str] = {}
    # The largest stack of a kind gets the plain name, whatever lies before it in the file.
    for prefix in sorted(by_prefix, key=lambda prefix: -_weight(by_prefix[prefix])):
        name = _name(prefix, by_prefix)
        names[prefix] = f"{name}[{prefix}]" if name in names.values() else name
    stacks = {
        prefix: Stack(names[prefix], inside, _config(config, names[prefix])) for prefix, inside in by_prefix.items()
    }
    by_name = {stack.name: stack for stack in stacks.values()}
    for tensor, at in members:
        if at.layer is None and len(tensor.shape) in (1, 2) and at.leaf != "bias" and _TABLE.search(at.path):
            stack = by_name[stack_served_by(at.path, stacks)] if stacks else None
            if stack is not None:
                stack.outside |= set(tensor.shape[-1:])
    return stacks


def stack_served_by(path: str, stacks: Mapping[str, Stack]) -> str:
    """Name of the stack that a tensor outside the layers serves: the one whose prefix it shares most of."""
    segments = path.split(".")
    shared = {}
    for prefix, stack in stacks.items():
        common = 0
        for a, b in zip(segments, prefix.split(".")):
            if a != b:
                break
            common += 1
        shared[stack.name] = common
    best = [name for name, common in shared.items() if common == max(shared.values()) and common > 0]
    return best[0] if len(best) == 1 else main_stack(stacks)


def main_stack(stacks: Mapping[str, Stack]) -> str:
    """The stack that carries the model's own family: the decoder or the text, else the first."""
    names = [stack.name for stack in stacks.values()]
    return next((name for name in ("decoder", "text") if name in names), names[0] if names else "main")


def _name(prefix: str, prefixes: Mapping[str, Any]) -> str:
    words = set(re.split(r"[._]", prefix))
    for name, marks in _WORDS.items():
        if words & marks:
            return name
    for one, other in ((("encoder", "enc"), ("decoder", "dec")), (("decoder", "dec"), ("encoder", "enc"))):
        if words & set(one) and any(set(other) & set(re.split(r"[._]", p)) for p in prefixes if p != prefix):
            return one[0]
    return "text"


def _config(config: Mapping[str, Any], stack: str) -> dict[str, Any]:
    if not config:
        return {}
    own = nested(config, stack)
    kind = model_type(own) or model_type(config)
    defaults = family.defaults if (family := family_of_type(kind)) else {}
    return {**defaults, "model_type": kind, **{key: value for key, value in own.items() if value is not None}}


def _weight(members: list[Member]) -> int:
    return sum(math.prod(tensor.shape) for tensor, _ in members if len(tensor.shape) == 2)


def _inner_layers(members: list[Member]) -> list[Member]:
    """Stacks whose layers hold several modules of the same make: each such layer becomes a stack."""
    seen: dict[tuple[str, int | None, str], set[tuple[int, ...]]] = {}
    for tensor, at in members:
        if at.inner and len(tensor.shape) == 2 and _NESTED.search(at.template):
            seen.setdefault((at.prefix, at.layer, at.template), set()).add(at.inner)
    nested = {prefix for (prefix, _, _), numbers in seen.items() if len(numbers) > 1}
    return [_descend(member) if member.at.prefix in nested else member for member in members]


def _descend(member: Member) -> Member:
    tensor, at = member
    found = _NESTED.search(at.template)
    if not found or not at.inner:
        return member
    path = at.path.split(".")
    depth = at.template[: found.end()].rstrip(".").count(".")
    return Member(
        tensor,
        at._replace(
            prefix=".".join([at.prefix, str(at.layer), *path[:depth]]),
            layer=int(path[depth]),
            path=".".join(path[depth + 1 :]),
            template=at.template[found.end() :],
            inner=at.inner[1:],
        ),
    )


def _any_number(members: list[Member], names: set[str]) -> list[Member]:
    renamed = [Member(tensor, parse(tensor.name, names, any_number=True)) for tensor, _ in members]
    layers: dict[tuple[str, str], set[int]] = {}
    for tensor, at in renamed:
        if at.layer is not None and len(tensor.shape) >= 2:
            layers.setdefault((at.prefix, at.template), set()).add(at.layer)
    repeated = {prefix for (prefix, _), seen in layers.items() if len(seen) > 1}
    return [
        new if new.at.layer is not None and new.at.prefix in repeated else old for old, new in zip(members, renamed)
    ]
