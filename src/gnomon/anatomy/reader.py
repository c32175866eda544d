"""`read`: from a model, a folder or a mapping of shapes to an `Anatomy`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gnomon.anatomy.anatomy import Anatomy, Part
from gnomon.anatomy.block import WHOLE, Block
from gnomon.anatomy.families import INSIDE, OUTSIDE, Entry, Weight
from gnomon.anatomy.finding_stacks import find_stacks, main_stack, members_of, stack_served_by
from gnomon.anatomy.matrices import Matrix, expert_orientation, matrices_in, undecided_matrix
from gnomon.anatomy.non_matrix import non_matrix_role
from gnomon.anatomy.recognise import Recognition, recognise
from gnomon.anatomy.roles import ROLES
from gnomon.anatomy.sizes import as_dict
from gnomon.anatomy.stack import Member, Stack, is_packed
from gnomon.anatomy.tensors import Tensor, from_mapping, from_module
from gnomon.anatomy.unlisted_families import STRUCTURAL
from gnomon.errors import UserError


def read(source: Any, config: Any = None) -> Anatomy:
    """What every tensor of a model is. No value is read, and for names and shapes torch is not imported.

    Args:
        source: a live `nn.Module`; a checkpoint by its path, of any kind that `gnomon.checkpoints.open_checkpoint`
            reads; or a mapping from tensor names to shapes (or to anything with `.shape`).
        config: what config.json says: a dict, a Hugging Face config, or any object with the same attributes.
            Found by itself in a folder and on a live model. Without it, fused tensors whose rows lie head by
            head cannot be taken apart; they are reported whole, with a doubt.

    Raises:
        UserError: nothing readable is there, or `source` is of another kind.
    """
    if isinstance(source, (str, os.PathLike)):
        from gnomon.checkpoints import open_checkpoint

        checkpoint = open_checkpoint(source, config=as_dict(config) or None)
        return _read(from_mapping(checkpoint.shapes), dict(checkpoint.config))
    if isinstance(source, Mapping):
        return _read(from_mapping(source), as_dict(config))
    if hasattr(source, "named_parameters"):
        config = config if config is not None else getattr(source, "config", None)
        return _read(from_module(source), as_dict(config), live=True)
    raise UserError(f"expected a model, a path or a mapping of names to shapes, got {type(source).__name__}")


def _read(tensors: list[Tensor], config: dict[str, Any], *, live: bool = False) -> Anatomy:
    members = members_of(tensors)
    stacks = find_stacks(members, config)
    known = {prefix: recognise(stack) for prefix, stack in stacks.items()}
    if len(stacks) == 1:
        for prefix, stack in stacks.items():
            stack.name = known[prefix].family.stack if stack.name == "text" else stack.name

    readers = {prefix: _Inside(stack, known[prefix]) for prefix, stack in stacks.items()}
    parts: list[Part] = []
    for member in members:
        outside = member.at.layer is None
        parts += _outside(member, stacks) if outside else readers[member.at.prefix].parts(member)
    if config.get("tie_word_embeddings") and not live:
        parts = _tie(parts)
    return _anatomy(parts, members, stacks, known, config)


class _Inside:
    """Reads the tensors of one stack; equal ones in other layers cost a look-up."""

    def __init__(self, stack: Stack, known: Recognition) -> None:
        self.stack, self.known = stack, known
        self.experts_transposed = expert_orientation(stack, known.family)
        self._seen: dict[tuple[Any, ...], list[Matrix]] = {}
        self._norms: dict[tuple[int | None, str, str], tuple[str | None, str | None]] = {}

    def parts(self, member: Member) -> list[Part]:
        tensor, at = member
        facts = self.stack.facts(self.known.family, at.layer)
        key = (*at[3:8], bool(at.companion), at.packed, tensor.shape, tensor.dtype, tensor.kind, facts)
        if key not in self._seen:
            self._seen[key] = self._matrices(member)
        return [
            Part(
                *(tensor.name, self.stack.name, at.layer, found.role, found.shape, found.block),
                *(found.in_axis, found.out_axis, found.reads, found.writes, found.expert),
                *(found.heads, found.head_dim, tensor.tied_to, at.companion or None, at.adapter),
                *self._norms_of(found, at.layer),
                inner=at.inner,
                doubt=found.doubt,
            )
            for found in self._seen[key]
        ]

    def _matrices(self, member: Member) -> list[Matrix]:
        tensor, at = member
        if (role := non_matrix_role(tensor, at)) is not None:
            return [Matrix(role, tensor.shape, expert=at.expert)]
        if at.template in self.known.open:
            return undecided_matrix(member, self.known.open[at.template])
        if at.template in self.known.family.roles:
            return matrices_in(member, self.stack, self.known.family, self.experts_transposed)
        return [_named(member, INSIDE.get(at.template))]

    def _norms_of(self, found: Matrix, layer: int | None) -> tuple[str | None, str | None]:
        if found.in_axis is None or not self.known.norms_known:
            return None, None
        family, sublayer = self.known.family, ROLES[found.role.split("+")[0]].sublayer
        sublayer = "mlp" if sublayer == "router" else sublayer
        before = family.before.get(found.role) or (found.reads and family.before.get(sublayer)) or ""
        after = family.after.get(sublayer, "") if found.writes else ""
        key = (layer, before, after)
        if key not in self._norms:
            self._norms[key] = (self.stack.norm(layer, before), self.stack.norm(layer, after))
        return self._norms[key]


def _outside(member: Member, stacks: dict[str, Stack]) -> list[Part]:
    """A tensor outside the repeated layers."""
    tensor, at = member
    found = _read_outside(member)
    return [
        Part(
            *(tensor.name, stack_served_by(at.path, stacks), None, found.role, found.shape, found.block),
            *(found.in_axis, found.out_axis, found.reads, found.writes),
            tied_to=tensor.tied_to,
            belongs_to=at.companion or None,
            adapter=at.adapter,
            doubt=found.doubt,
        )
    ]


def _read_outside(member: Member) -> Matrix:
    tensor, at = member
    if (role := non_matrix_role(tensor, at)) is not None:
        return Matrix(role, tensor.shape)
    segments = at.path.split(".")
    ends = ["^" + at.path, *(".".join(segments[-n:]) for n in (3, 2, 1))]
    return _named(member, next((OUTSIDE[end] for end in ends if end in OUTSIDE), None))


def _named(member: Member, entry: Entry | None) -> Matrix:
    """A weight with a role of its own: a table, a head, or nothing known."""
    tensor, at = member
    if entry is None and tensor.kind != "embedding":
        return _unknown(member)
    role = entry.roles[0] if isinstance(entry, Weight) else entry or "embedding"
    if len(tensor.shape) != 2 or is_packed(member):
        return Matrix(role, tensor.shape, writes=ROLES[role].writes)
    # A look-up table is stored token by token: its rows are the inputs.
    table = role in ("embedding", "positions") and not isinstance(entry, Weight) and tensor.kind != "linear"
    transposed = (table or tensor.kind == "conv1d") and not at.adapter
    return _oriented(role, tensor.shape, transposed, at.adapter)


def _unknown(member: Member) -> Matrix:
    """Not recognised; a live Linear at least tells which axis is which."""
    tensor, at = member
    if tensor.kind in ("linear", "conv1d") and len(tensor.shape) == 2:
        return _oriented("unknown", tensor.shape, tensor.kind == "conv1d")
    if len(tensor.shape) > 2 and sum(size > 1 for size in tensor.shape) <= 1:
        return Matrix("scalar", tensor.shape)  # a vector with axes of length one
    return Matrix("unknown", tensor.shape, expert=at.expert)


def _oriented(role: str, stored: tuple[int, ...], transposed: bool, adapter: str = "") -> Matrix:
    block = Block(transposed=True) if transposed else WHOLE
    in_axis, out_axis = (0, 1) if transposed else (1, 0)
    reads, writes = ROLES[role].reads and adapter != "B", ROLES[role].writes and adapter != "A"
    return Matrix(role, block.shape(stored), block, in_axis, out_axis, reads, writes)


def _tie(parts: list[Part]) -> list[Part]:
    """A checkpoint that stores its head although its config ties it: the loader will share the embedding."""
    tables = {(part.shape[::-1], part.stack): part.name for part in parts if part.role == "embedding"}
    return [
        replace(part, tied_to=tables[part.shape, part.stack])
        if part.role == "head" and not part.adapter and (part.shape, part.stack) in tables
        else part
        for part in parts
    ]


def _anatomy(
    parts: list[Part],
    members: list[Member],
    stacks: dict[str, Stack],
    known: dict[str, Recognition],
    config: dict[str, Any],
) -> Anatomy:
    main = main_stack(stacks)
    prefix = next((prefix for prefix, stack in stacks.items() if stack.name == main), None)
    weights = {t.name for t, at in members if non_matrix_role(t, at) is None}
    doubtful = {part.name for part in parts if part.role == "unknown" or part.doubt} & weights
    notes = []
    for stack in stacks.values():
        layers = {at.layer for _, at in stack.members}
        if len(layers) == 1:
            notes.append(f"{stack.name}: one layer, so no neighbours to compare")
    aliases = {part.name: part.tied_to for part in parts if part.tied_to}
    if 0 < len(aliases) <= 3:
        notes += [f"{name} is the same parameter as {owner}" for name, owner in aliases.items()]
    elif aliases:
        notes.append(f"{len(aliases)} tensors are further names of parameters listed before them")
    if doubtful:
        notes.append(f"{len(doubtful)} of {len(weights)} weights are unknown or in doubt: see .unknown")
    first = known[prefix] if prefix is not None else None
    return Anatomy(
        parts=tuple(parts),
        family=_family(stacks[prefix], first) if prefix is not None and first else STRUCTURAL,
        families={stack.name: known[prefix].family.name for prefix, stack in stacks.items()},
        evidence=tuple(one.evidence for one in known.values()),
        confidence=1 - len(doubtful) / len(weights) if weights else 0.0,
        norm_offset=first.norm_offset if first else None,
        notes=tuple(notes),
        warnings=tuple(_warnings(stacks, known, parts)),
    )


def _warnings(stacks: dict[str, Stack], known: dict[str, Recognition], parts: list[Part]) -> list[str]:
    """What speaks against taking these tensors for one whole model."""
    found = []
    for prefix, stack in stacks.items():
        family = known[prefix].family
        there = sorted({at.layer for _, at in stack.members if at.layer is not None})
        missing = sorted(set(range(there[0], there[-1])) - set(there))
        if missing:
            found.append(
                f"{stack.name}: layer{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}"
                f"{' …' * (len(missing) > 8)} of {there[-1] + 1} missing; pairs across the hole stay out of the means"
            )
        elif (
            there[0] == 0
            and 1 < len(there) < (stack.sizes.layers or 0)
            and stack.config.get("model_type") in family.types.split()
        ):
            found.append(f"{stack.name}: the config speaks of {stack.sizes.layers} layers, {len(there)} are here")
        if slices := _slices(stack, [part for part in parts if part.stack == stack.name]):
            found.append(
                f"{stack.name}: queries and embedding have 1/{slices} of the norms' width, so this looks like one of "
                f"{slices} tensor-parallel slices; a slice has other directions than the whole. Give the merged checkpoint"
            )
    return found


def _slices(stack: Stack, parts: list[Part]) -> int | None:
    """n when queries and the embedding are both 1/n of the width that the norms have (Meta's consolidated.NN files).

    What contradicts a config is refused when the checkpoint is opened (`checkpoints.whole_models`).
    """
    ratios = set()
    for role in ("query", "embedding"):
        rows = {part.shape[0] for part in parts if part.role == role and part.is_matrix}
        if len(rows) != 1 or not stack.width or stack.width % (n := rows.pop()):
            return None
        ratios.add(stack.width // n)
    return ratios.pop() if len(ratios) == 1 and 1 not in ratios else None


def _family(stack: Stack, known: Recognition) -> str:
    """The model type of the config where the table knows it for these names, else the row's name."""
    kind = stack.config.get("model_type")
    return str(kind) if kind and kind in known.family.types.split() else known.family.name
