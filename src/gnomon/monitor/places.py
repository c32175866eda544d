"""Where in a live model the hidden states pass and attention happens, found from its residuals and its anatomy.

A block is measured at its boundaries: what enters it, what enters each of its sublayers, what leaves it. The state that enters a
sublayer is what its first norm reads; where norms follow the sum (Post-LN) or the branch (OLMo-2), what its first matrix reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os.path import commonprefix

from torch import nn

from gnomon.anatomy import Anatomy, Part
from gnomon.residual import Residual


@dataclass(frozen=True)
class BlockPlace:
    """One block: its module, and for each sublayer, in stored order, the module whose input is the state that enters it."""

    stack: str
    layer: int
    module: nn.Module
    boundaries: tuple[tuple[str, nn.Module], ...] = ()

    def place(self, sublayer: str) -> str:
        return f"{self.stack}.{self.layer}.{sublayer}"


@dataclass(frozen=True)
class AttentionPlace:
    """One attention: its module, inside which queries meet keys, and how many heads it has where that is known."""

    place: str
    module: nn.Module
    heads: int | None


@dataclass(frozen=True)
class Places:
    """What is watched. A model of ours has `joins`, any other `blocks`."""

    joins: tuple[tuple[str, Residual], ...]
    blocks: tuple[BlockPlace, ...]
    attentions: tuple[AttentionPlace, ...]


def find(model: nn.Module, parts: Anatomy) -> Places:
    """The places of `model`, whose anatomy is `parts`; empty where nothing is known of a stack of layers."""
    stacks = [stack for stack in parts.stacks if parts.layers(stack)]
    inside = {(s, n): [p for p in parts if p.layer == n and p.stack == s] for s in stacks for n in parts.layers(s)}
    attentions = [found for at, here in inside.items() for found in _attentions(model, *at, here)]
    joins = tuple(residual_places(model, stacks[0] if stacks else "text"))
    # The first block of a Post-LN stack reads what is no norm of a block; the last one tells for all.
    norms = {stack: _where_norms_are(inside[stack, parts.layers(stack)[-1]], parts.layers(stack)[-1]) for stack in stacks}
    blocks = () if joins else tuple(_block(model, *at, here, norms[at[0]]) for at, here in inside.items())
    return Places(joins, blocks, tuple(attentions))


def residual_places(model: nn.Module, stack: str) -> list[tuple[str, Residual]]:
    """The residuals of a model by place: `text.0.attention`, `text.0.mlp`; by number where a block has not two of them."""
    found: dict[str, Residual] = {}
    for name, join in model.named_modules():
        if isinstance(join, Residual):
            layer, number = divmod(join.index, join.per_block)
            sublayer = ("attention", "mlp")[number] if join.per_block == 2 else f"sublayer{number}"
            place = f"{stack}.{layer}.{sublayer}"
            # A second stack of residuals bears the name of the module that holds it.
            found[place if place not in found else f"{name.split('.')[0]}.{layer}.{sublayer}"] = join
    order = sorted(found.items(), key=lambda item: (item[0].split(".")[0] != stack, item[1].index))
    return order


def sublayer_of(part: Part) -> str:
    """ "attention", "cross_attention", "mlp" (a router is a part of one), "mixer" or ""."""
    if part.role.startswith("cross_"):
        return "cross_attention"
    return "mlp" if part.sublayer == "router" else part.sublayer


def _block(model: nn.Module, stack: str, layer: int, parts: list[Part], norms: str) -> BlockPlace:
    matrices = _matrices(parts)
    path = block_path([part.name for part in matrices or parts], layer)
    boundaries = []
    for sublayer, part in _readers(matrices).items() if norms else ():
        name = part.norm_before if norms == "before" and part.norm_before else part.name
        boundaries.append((sublayer, model.get_submodule(_owner(name))))
    return BlockPlace(stack, layer, model.get_submodule(path), tuple(boundaries))


def _where_norms_are(parts: list[Part], layer: int) -> str:
    """ "before" the sublayers of this block, "after" them, or "" where that is not known.

    Norms that stand before a sublayer belong to its block. Where they stand after the sum, the first one that is read belongs to the
    block before; where they stand after the branch, none is read.
    """
    matrices = _matrices(parts)
    first = next(iter(_readers(matrices).values()), None)
    if first is not None and first.norm_before is not None:
        path = block_path([part.name for part in matrices], layer)
        return "before" if first.norm_before.startswith(path + ".") else "after"
    return "after" if any(part.norm_after for part in matrices) else ""


def _matrices(parts: list[Part]) -> list[Part]:
    return [part for part in parts if part.is_matrix and part.sublayer]


def _readers(matrices: list[Part]) -> dict[str, Part]:
    """Of each sublayer the first matrix that reads the stream."""
    found: dict[str, Part] = {}
    for part in matrices:
        if part.reads_stream:
            found.setdefault(sublayer_of(part), part)
    return found


def _attentions(model: nn.Module, stack: str, layer: int, parts: list[Part]) -> Iterable[AttentionPlace]:
    for sublayer in ("attention", "cross_attention"):
        here = [part for part in parts if part.is_matrix and sublayer_of(part) == sublayer]
        query = [part for part in here if part.role.endswith("query") or part.role.startswith("query+")]
        both = query + [part for part in here if "key" in part.role]
        if query and len(both) > len(query) or any("+key" in part.role for part in query):
            paths = [_owner(part.name) for part in both]
            path = _common(paths)
            while path in paths or _wraps(model, path):
                if not (held := path.rpartition(".")[0]) or isinstance(model.get_submodule(path), nn.MultiheadAttention):
                    break
                path = held
            yield AttentionPlace(f"{stack}.{layer}.{sublayer}", model.get_submodule(path), query[0].heads)


def _wraps(model: nn.Module, path: str) -> bool:
    """Whether this is what peft puts around one matrix."""
    return hasattr(model.get_submodule(path), "base_layer")


def block_path(names: list[str], layer: int) -> str:
    """The module that holds all tensors of a layer: their common path, up to the layer's number."""
    segments = _common(names).split(".")
    last = max(i for i, segment in enumerate(segments) if segment == str(layer))
    return ".".join(segments[: last + 1])


def _common(paths: list[str]) -> str:
    return ".".join(commonprefix([path.split(".") for path in paths]))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
