"""The answer: what every tensor of a model is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from gnomon.anatomy.block import WHOLE, Block, Cut
from gnomon.anatomy.roles import ROLES
from gnomon.errors import UserError, check_name, printable, suggest


@dataclass(frozen=True, slots=True)
class Part:
    """One role's share of one stored tensor. The parts of a tensor cover each of its numbers once.

    Attributes:
        name: the stored tensor.
        stack: "text", "vision", "encoder", "decoder", "mtp" …; a tensor outside the layers bears the name of
            the stack it serves.
        layer: number of the layer, None outside the layers.
        role: a key of `roles.ROLES`; "query+key+value" when a fused tensor could not be taken apart.
        shape: (out, in) of the matrix; the tensor's own shape when the part is not a matrix.
        block: how to cut the part out of the tensor: `part.block.take(tensor)`.
        in_axis, out_axis: axes of the stored tensor that run over inputs and outputs; None when the part is
            not a matrix. An embedding maps token numbers (in) to the stream (out).
        reads_stream, writes_stream: its inputs are, its outputs go to, the residual stream.
        expert: number of the expert.
        heads, head_dim: how many heads it holds and how wide they are, where known.
        tied_to: the name under which the same parameter came before; this part is then an alias.
        belongs_to: for a scale or zero point, the weight it belongs to.
        adapter: "A" (r x in) or "B" (out x r) of a LoRA pair.
        norm_before, norm_after: the norm gain that scales its inputs, or its outputs before they join the
            stream, where known.
        inner: numbers that tell equal roles of one layer apart (nested blocks).
        doubt: what could not be decided; "" when nothing.
    """

    name: str
    stack: str
    layer: int | None
    role: str
    shape: tuple[int, ...]
    block: Block = WHOLE
    in_axis: int | None = None
    out_axis: int | None = None
    reads_stream: bool = False
    writes_stream: bool = False
    expert: int | None = None
    heads: int | None = None
    head_dim: int | None = None
    tied_to: str | None = None
    belongs_to: str | None = None
    adapter: str = ""
    norm_before: str | None = None
    norm_after: str | None = None
    inner: tuple[int, ...] = ()
    doubt: str = ""

    @property
    def is_matrix(self) -> bool:
        """Whether `block.take` gives an out x in matrix."""
        return self.in_axis is not None

    @property
    def stream(self) -> str:
        """ "reads" when its inputs are the residual stream, "writes" when its outputs join it, else ""."""
        return "reads" if self.reads_stream else "writes" if self.writes_stream else ""

    @property
    def place(self) -> str:
        """Its name in records: `text.3.query`, `text.3.expert7.up`, `text.3.query.lora_A`."""
        expert = "" if self.expert is None else f".expert{self.expert}"
        return f"{self.stack}.{self.layer}{expert}.{self.role}{self.adapter and f'.lora_{self.adapter}'}"

    @property
    def sublayer(self) -> str:
        """ "attention", "mlp", "mixer", "router" or ""."""
        return ROLES[self.role.split("+")[0]].sublayer


class Pair(NamedTuple):
    """Two parts of one role, `lag` layers apart, of one shape or at least of one width on the side of the stream.

    `missing`: numbers of layers between them of which nothing is there at all.
    """

    first: Part
    second: Part
    lag: int
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Anatomy:
    """Every tensor of a model as `Part`s, in stored order. Iterate over it, or ask.

    Attributes:
        parts: all of them.
        family: the model's family; "unknown (structural)" when only its structure was recognised.
        families: the row of `families.FAMILIES` (or the structural reading) behind each stack.
        evidence: how the family was found, one sentence per stack.
        confidence: share of the weight matrices that are identified without doubt.
        norm_offset: norms multiply by this plus their gain; None when not known.
        notes: what a reader should know (ties, one-layer stacks, packed weights …).
        warnings: what speaks against taking these tensors for one whole model (missing layers, a slice of each weight …).
    """

    parts: tuple[Part, ...]
    family: str
    families: dict[str, str] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    confidence: float = 1.0
    norm_offset: float | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, name: str) -> tuple[Part, ...]:
        """The parts of one stored tensor.

        Raises:
            UserError: there is no such tensor; the message names near ones.
        """
        if name not in self._by_name:
            raise UserError(f"no tensor {name!r} in this model. {suggest(name, self._by_name)}")
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, tuple[Part, ...]]:
        grouped: dict[str, list[Part]] = {}
        for part in self.parts:
            grouped.setdefault(part.name, []).append(part)
        return {name: tuple(parts) for name, parts in grouped.items()}

    @cached_property
    def by_role(self) -> dict[str, tuple[Part, ...]]:
        """role -> its parts."""
        grouped: dict[str, list[Part]] = {}
        for part in self.parts:
            grouped.setdefault(part.role, []).append(part)
        return {role: tuple(parts) for role, parts in grouped.items()}

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the stacks of layers, in stored order."""
        return tuple(dict.fromkeys(part.stack for part in self.parts if part.layer is not None))

    @cached_property
    def unknown(self) -> tuple[Part, ...]:
        """What was not recognised, and what was recognised with a doubt. Nothing else was guessed."""
        return tuple(part for part in self.parts if part.role == "unknown" or part.doubt)

    def select(self, role: str | None = None, layer: int | None = None, stack: str | None = None) -> tuple[Part, ...]:
        """The parts that match every argument given.

        Raises:
            UserError: no such role or stack exists; the message names near ones.
        """
        parts = self.parts if role is None else self.by_role.get(self._role(role), ())
        if stack is not None:
            check_name("stack", stack, self.stacks)
        return tuple(
            part for part in parts if (layer is None or part.layer == layer) and (stack is None or part.stack == stack)
        )

    def layers(self, stack: str | None = None) -> tuple[int, ...]:
        """The layer numbers of a stack (of the first one by default), in order."""
        stack = stack or next(iter(self.stacks), None)
        return tuple(sorted({p.layer for p in self.parts if p.layer is not None and p.stack == stack}))

    def pairs(self, role: str | None = None, lag: int = 1, stack: str | None = None) -> tuple[Pair, ...]:
        """Neighbours in depth: matrices of one role, in one stack, `lag` places apart.

        Places are counted among equals, so in a hybrid stack, or one with missing layers, neighbours may be several
        layers apart; `Pair.lag` says how many. Experts meet the same expert number, LoRA factors their like. Shapes that
        alternate (hybrid attention) meet their like; widths that change with depth (a pruned MLP) are no obstacle, for the
        side of the stream compares. Aliases of a tied weight, and parts with a doubt, have no pairs.

        Raises:
            UserError: no such role or stack; `lag` is not positive.
        """
        if lag < 1:
            raise UserError(f"lag must be 1 or more, got {lag}")
        series: dict[tuple[Any, ...], list[Part]] = {}
        for part in self.select(role, stack=stack):
            if part.is_matrix and part.layer is not None and not part.doubt and part.tied_to is None:
                series.setdefault((part.stack, part.role, part.expert, part.adapter, part.inner), []).append(part)
        there = {stack: set(self.layers(stack)) for stack in self.stacks}
        found = []
        for members in series.values():
            for parts in _comparable(members):
                numbered = sorted(((part.layer or 0, part) for part in parts), key=lambda one: one[0])
                for (here, a), (next_, b) in zip(numbered, numbered[lag:]):
                    missing = tuple(n for n in range(here + 1, next_) if n not in there[a.stack])
                    found += [Pair(a, b, next_ - here, missing)] * (next_ > here)
        return tuple(found)

    def layer_matrices(self) -> list[Part]:
        """The matrices of attention, MLP, mixer and router inside layers, each once and without doubt."""
        return [
            part
            for part in self.parts
            if part.is_matrix and part.layer is not None and part.sublayer and not part.doubt and part.tied_to is None
        ]

    def layer_pairs(self, lag: int = 1) -> list[Pair]:
        """`pairs` among `layer_matrices`."""
        return [pair for pair in self.pairs(lag=lag) if pair.first.sublayer]

    def heads(self, part: Part) -> tuple[Part, ...]:
        """`part` head by head: rows of a query, key or value, columns of an output projection.

        Together they cover `part` once.

        Raises:
            UserError: the number of heads is not known, or the part has none.
        """
        if part.heads is None or part.head_dim is None:
            raise UserError(
                f"{part.name} ({part.role}): the number of heads is not known. It comes from the model's "
                "config (num_attention_heads); give it with read(…, config=…)"
            )
        along_columns = ROLES[part.role].writes
        axis = 1 if along_columns else 0
        cut = part.block.columns if along_columns else part.block.rows
        length = part.shape[axis] if cut is None else part.shape[axis] // (cut.stop - cut.start) * cut.period
        cut = cut or Cut(length, 0, length)
        shape = (part.shape[0], part.head_dim) if along_columns else (part.head_dim, part.shape[1])
        found = []
        for head in range(part.heads):
            one = cut.part(length, head * part.head_dim, part.head_dim)
            block = replace(part.block, columns=one) if along_columns else replace(part.block, rows=one)
            found.append(replace(part, block=block, shape=shape, heads=1))
        return tuple(found)

    def table(self) -> str:
        """One line per kind of tensor: stack, role, layers, matrix shape, stream, tensor."""
        rows: dict[tuple[Any, ...], list[Part]] = {}
        for part in self.parts:
            pattern = part.name
            if part.layer is not None:
                pattern = re.sub(rf"(?<![^.]){part.layer}(?![^.])", "{l}", pattern, count=1)
            if part.expert is not None:
                pattern = pattern.replace(f"experts.{part.expert}.", "experts.{e}.")
            key = (
                part.stack,
                part.role,
                pattern,
                part.shape,
                part.adapter,
                part.tied_to is not None,
                part.doubt,
            )
            rows.setdefault(key, []).append(part)
        lines = [("stack", "layers", "role", "shape", "stream", "heads", "tensor")]
        for (stack, role, pattern, shape, adapter, _, doubt), parts in rows.items():
            one = parts[0]
            stream = "/".join(["reads"] * one.reads_stream + ["writes"] * one.writes_stream)
            remarks = [f"x {len({p.expert for p in parts})} experts"] if one.expert is not None else []
            remarks += [f"LoRA {adapter}"] * bool(adapter)
            remarks += [f"= {one.tied_to}"] * bool(one.tied_to)
            remarks += [f"of {one.belongs_to}"] * bool(one.belongs_to and one.layer is None)
            remarks += [f"? {doubt}"] * bool(doubt)
            lines.append(
                (
                    *(stack, _ranges(p.layer for p in parts if p.layer is not None), role),
                    " x ".join(map(str, shape)) or "1",
                    stream,
                    f"{one.heads} x {one.head_dim}" if one.heads else "",
                    "  ".join([printable(pattern), *remarks]),
                )
            )
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join(
            map(printable, [f"family: {self.family}", *self.evidence, *self.warnings, *self.notes, "", *text])
        )

    def _role(self, role: str) -> str:
        return role if role in self.by_role else check_name("role", role, ROLES)


def _comparable(parts: list[Part]) -> list[list[Part]]:
    """One role's parts, shared out so that each list holds one a layer and neighbours compare on one side at least."""
    if len({part.layer for part in parts}) < len(parts):
        groups = _grouped(parts, lambda part: re.sub(rf"(?<![^.]){part.layer}(?![^.])", "#", part.name, count=1))
        if len(groups) > 1:
            return [like for group in groups for like in _comparable(group)]
    count = Counter(part.shape for part in parts)
    if parts[0].sublayer != "mlp" and min(count.values()) > 1:
        return _grouped(parts, lambda part: part.shape)
    reads, writes = parts[0].reads_stream, parts[0].writes_stream
    return _grouped(parts, lambda part: part.shape[reads] if reads != writes else part.shape)


def _grouped(parts: list[Part], key: Callable[[Part], Any]) -> list[list[Part]]:
    groups: dict[Any, list[Part]] = {}
    for part in parts:
        groups.setdefault(key(part), []).append(part)
    return list(groups.values())


def _ranges(numbers: Any) -> str:
    """0,1,2,5 -> "0-2,5"."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)
