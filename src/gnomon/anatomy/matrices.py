"""Reading one tensor the way one family stores it: which matrices it holds, and where."""

from __future__ import annotations

from typing import NamedTuple

from gnomon.anatomy.block import WHOLE, Block
from gnomon.anatomy.families import Family, Weight
from gnomon.anatomy.layouts import LAYOUTS, Facts, Impossible, Undecided
from gnomon.anatomy.roles import ROLES
from gnomon.anatomy.stack import Member, Stack, is_packed, is_transposed


class Matrix(NamedTuple):
    """One matrix found in a tensor: `Part`'s fields, and `fits`: no shape speaks against it."""

    role: str
    shape: tuple[int, ...]
    block: Block = WHOLE
    in_axis: int | None = None
    out_axis: int | None = None
    reads: bool = False
    writes: bool = False
    expert: int | None = None
    heads: int | None = None
    head_dim: int | None = None
    doubt: str = ""
    fits: bool = True


class Open(NamedTuple):
    """A weight that several readings fit. What they agree on is kept; None where they do not."""

    role: str | None
    transposed: bool | None
    why: str


def matrices_in(member: Member, stack: Stack, family: Family, experts_transposed: bool | None) -> list[Matrix]:
    """The matrices `member` holds if it belongs to `family`, whose table must know its path.

    `experts_transposed` is how 3-D experts of this stack lie, where shapes decide (see `expert_orientation`).
    """
    tensor, at = member
    entry = family.roles[at.template]
    weight = entry if isinstance(entry, Weight) else Weight((entry,))
    facts = stack.facts(family, at.layer)
    doubt = ""
    if is_packed(member):
        doubt = "packed: the matrix appears when it is unpacked"
    elif len(tensor.shape) != 2 + weight.experts:
        doubt = f"expected {2 + weight.experts} axes"
    elif weight.layout == "unoriented":
        doubt = (
            "nothing says whether it is stored out x in or in x out; a live model does, or a config with its model_type"
        )
    if doubt:
        return [Matrix("+".join(weight.roles), tensor.shape, doubt=doubt)]
    if weight.experts:
        transposed = weight.transposed if experts_transposed is None else experts_transposed
        if transposed is None:
            transposed, doubt = False, "both axes of the experts fit the stream: in x out or out x in is open"
    elif weight.transposed is None:
        transposed = is_transposed(tensor, at, family)
    else:
        transposed = weight.transposed
    if at.adapter == "A" and len(weight.roles) > 1:
        # One A serves all the roles fused in its base; only B can be cut.
        weight = Weight(("+".join(weight.roles),), reads=weight.reads)
    elif at.adapter == "A":
        facts = Facts()
    found = _cut(weight, tensor.shape, transposed, facts)
    if at.adapter:
        found = [m._replace(reads=m.reads and at.adapter == "A", writes=m.writes and at.adapter == "B") for m in found]
        if at.adapter == "A":
            found = [m._replace(heads=None, head_dim=None) for m in found]
    else:
        found = [_check(m._replace(doubt=m.doubt or doubt), stack.width) for m in found]
    return found if weight.experts else [m._replace(expert=at.expert) for m in found]


def _cut(weight: Weight, stored: tuple[int, ...], transposed: bool, facts: Facts) -> list[Matrix]:
    """Share the rows out and find the axes; experts multiply what one of them holds."""
    lead = 1 if weight.experts else 0
    out_axis, in_axis = (lead + 1, lead) if transposed else (lead, lead + 1)
    rows, columns = stored[out_axis], stored[in_axis]
    doubt, fits = "", True
    try:
        pieces = LAYOUTS[weight.layout](weight.roles, rows, facts)
    except (Undecided, Impossible) as why:
        pieces = LAYOUTS["whole"](("+".join(weight.roles),), rows, Facts())
        doubt, fits = str(why), isinstance(why, Undecided)
    found = []
    for index in range(stored[0]) if weight.experts else (None,):
        for role, cut, heads, head_dim in pieces:
            cut = None if cut and cut.count(rows) == rows else cut
            block = Block(index, transposed, cut)
            habit = ROLES[role.split("+")[0]]
            if habit.writes and habit.sublayer == "attention" and facts.heads and columns % facts.heads == 0:
                heads, head_dim = facts.heads, columns // facts.heads
            found.append(
                Matrix(
                    *(role, block.shape(stored), block, in_axis, out_axis),
                    reads=habit.reads if weight.reads is None else weight.reads,
                    writes=habit.writes,
                    expert=index,
                    heads=heads,
                    head_dim=head_dim,
                    doubt=doubt,
                    fits=fits,
                )
            )
    return found


def _check(matrix: Matrix, width: int | None) -> Matrix:
    """A reader's inputs, and a writer's outputs, fill the stream; a matrix that does otherwise is doubted."""
    out, inputs = matrix.shape
    if width is None or not (matrix.reads and inputs != width or matrix.writes and out != width):
        return matrix
    if inputs == 1:
        return matrix._replace(
            fits=False, doubt=matrix.doubt or f"one column of {out} numbers: packed numbers, no matrix"
        )
    does = f"reads {inputs}" if matrix.reads and inputs != width else f"writes {out}"
    return matrix._replace(fits=False, doubt=matrix.doubt or f"{does} numbers, but the stream is {width} wide")


def expert_orientation(stack: Stack, family: Family) -> bool | None:
    """Whether 3-D experts are stored in x out, by the axis that is as long as the stream is wide.

    A square tensor does not tell; its sibling does (gate_up of width 2 I and down of width I cannot both be
    square). None when nothing tells, or when the tensors disagree.
    """
    said = set()
    for template, member in stack.samples.items():
        entry, shape = family.roles.get(template), member.tensor.shape
        if not (isinstance(entry, Weight) and entry.experts and len(shape) == 3) or is_packed(member):
            continue
        first, second = shape[1:]
        if (first == stack.width) != (second == stack.width):
            reads = ROLES[entry.roles[0]].reads
            said.add((first == stack.width) == reads)
    return said.pop() if len(said) == 1 else None


def undecided_matrix(member: Member, left: Open) -> list[Matrix]:
    """What is agreed about an open weight: the whole tensor, uncut."""
    stored, role = member.tensor.shape, left.role or "unknown"
    if left.transposed is None or len(stored) != 2:
        return [Matrix(role, stored, doubt=left.why)]
    block, habit = Block(transposed=left.transposed), ROLES[role.split("+")[0]]
    in_axis, out_axis = (0, 1) if left.transposed else (1, 0)
    return [Matrix(role, block.shape(stored), block, in_axis, out_axis, habit.reads, habit.writes, doubt=left.why)]
