"""What `gnomon study compression` compares: models made smaller in memory, by name.

Legend: B rows, T tokens, D channels of the stream, M outputs, N inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from gnomon.compress.block_choice import BY
from gnomon.compress.block_matrices import BlockMatrices, take
from gnomon.compress.budget import budget_of
from gnomon.compress.compressing import make
from gnomon.compress.group_choice import GROUPS, find_groups
from gnomon.compress.in_place import replaced
from gnomon.compress.low_rank import Method, pivoted, private
from gnomon.compress.merging import MERGED_BY, groups_without, merged, pairs_by
from gnomon.compress.modules import mlp, modules
from gnomon.compress.replacements import Replacement, Term
from gnomon.compress.rounding import FORMATS, Format, rounded
from gnomon.compress.shared_basis import SIDES, shared
from gnomon.compress.work_folder import InMemory
from gnomon.running.streamed import Block, Streamed, Visit
from gnomon.running.token_rows import Rows

WEIGHT = 2
"""Bytes of a weight that is not rounded."""

CHOSEN_ON = 2048
"""Tokens of a calibration sample on which blocks are left out by loss one after the other, half a pass for every block and every choice."""


@dataclass
class Made(InMemory):
    """A smaller model: what the linears of each block become, blocks that are gone, whether they were merged with the one before, and how
    weights are rounded."""

    gone: tuple[int, ...] = ()
    merge: bool = False
    form: Format | None = None


@contextlib.contextmanager
def present(streamed: Streamed, made: Made) -> Iterator[Visit]:
    """While open, the whole smaller model is in memory; gives what runs its blocks."""

    def visit(index: int, h_BTD: Tensor, block: Block) -> Tensor:
        return h_BTD if index in made.gone else block(h_BTD)

    with contextlib.ExitStack() as stack:
        stack.enter_context(streamed.held(streamed.table_names))
        for group in groups_without(len(streamed.blocks), made.gone, made.merge):
            stack.enter_context(merged(streamed, group))
            stack.enter_context(replaced(streamed, group[0], made.load(group[0])))
        yield visit


def size(streamed: Streamed, made: Made) -> tuple[int, int]:
    """Weights of the blocks that are left, and their bytes."""
    weights = nbytes = 0
    for index, name in enumerate(streamed.block_names):
        if index in made.gone:
            continue
        block = streamed.model.get_submodule(name)
        there = sum(parameter.numel() for parameter in block.parameters())
        there -= sum(block.get_submodule(linear).weight.numel() for linear in made.load(index))
        weights, nbytes = weights + there, nbytes + WEIGHT * there
    seen: set[str] = set()
    for one in (one for linears in made.made.values() for one in linears.values()):
        for term in one.terms:
            for side, tensor in term.stored.items():
                if (known := term.shared.get(side, "")) not in seen:
                    weights += tensor.numel()
                    nbytes += WEIGHT * tensor.numel() if made.form is None else rounded(tensor, made.form).nbytes
                    seen |= {known} - {""}
    return weights, nbytes


class Given(NamedTuple):
    """What a method is given.

    Attributes:
        streamed, rows: the model and a calibration sample.
        matrices: every block's with the moments of what they multiply in the whole model; None where each is to be fitted to what the
            smaller blocks before it give, as `gnomon compress` does.
        seed: of what is drawn at random.
    """

    streamed: Streamed
    rows: Rows
    matrices: Sequence[BlockMatrices] | None
    seed: int


Maker = Callable[[Given, float], Made]
"""(what it is given, share of the block weights that stays) -> the smaller model."""


def _within(given: Given, keep: float, *, method: Method, group: int = 1, by: str = "equal", form: str = "") -> Made:
    """Blocks made smaller, one group after the other."""
    streamed, rows, matrices, seed = given
    groups = find_groups(streamed, rows, keep, group, by, seed)
    share = budget_of(streamed, keep).of_linears
    made = Made(form=FORMATS.get(form))
    fitted = method if made.form is None else lambda some, share: [_rounded(one, FORMATS[form]) for one in method(some, share)]
    if matrices is None:
        make(streamed, rows, fitted, share, groups, made)
    else:
        for one in groups:
            made.save(one, fitted([matrices[index] for index in one], share))
    return made


def _without(given: Given, keep: float, *, by: str) -> Made:
    """Whole blocks left out."""
    blocks = len(given.streamed.blocks)
    rows = given.rows.first(CHOSEN_ON) if by == "loss" else given.rows
    return Made(gone=tuple(BY[by](given.streamed, rows, blocks - round(keep * blocks), given.seed, lambda _: None)))


def _merged(given: Given, keep: float, *, by: str) -> Made:
    """Whole blocks merged with the one before."""
    blocks = len(given.streamed.blocks)
    pairs = pairs_by(by, given.streamed, given.rows, blocks - round(keep * blocks), given.seed)
    return Made(gone=tuple(second for _, second in pairs), merge=True)


def _only_rounded(given: Given, keep: float, *, form: str) -> Made:
    """Every matrix as it is, in fewer bits."""
    made, streamed = Made(form=FORMATS[form]), given.streamed
    for index, name in enumerate(streamed.block_names):
        with streamed.held([name]):
            block = take(streamed, index)
        as_it_is = {one: Replacement(block.shapes[one], _terms(block, one), block.biases[one]) for one in block.shapes}
        made.save([index], [_rounded(as_it_is, FORMATS[form])])
    return made


def _terms(block: BlockMatrices, linear: str) -> tuple[Term, ...]:
    return tuple(Term(matrix.W_MN).placed(matrix.rows) for matrix in block.matrices if matrix.linear == linear)


def _rounded(made: dict[str, Replacement], form: Format) -> dict[str, Replacement]:
    def term(one: Term) -> Term:
        return replace(one, A_MR=rounded(one.A_MR, form).W_MN, B_RN=None if one.B_RN is None else rounded(one.B_RN, form).W_MN)

    return {name: replace(one, terms=tuple(map(term, one.terms))) for name, one in made.items()}


METHODS: dict[str, Maker] = {
    "private": partial(_within, method=private),
    "pivoted": partial(_within, method=pivoted),
    "modules": partial(_within, method=modules),
    "mlp": partial(_within, method=mlp),
    **{f"shared by {side}" if side == "role" else f"shared {side}": partial(_within, method=partial(shared, sides=sides), group=2)
       for side, sides in SIDES.items()},
    **{f"shared by role, groups by {by}": partial(_within, method=shared, group=3, by=by) for by in ("equal", *GROUPS)},
    **{f"depth by {by}": partial(_without, by=by) for by in BY},
    **{f"merge by {by}": partial(_merged, by=by) for by in MERGED_BY},
    **{f"modules + {form}": partial(_within, method=modules, form=form) for form in FORMATS},
}  # fmt: skip
"""By name; "shared" without more is by pairs of neighbours, and groups are of three blocks in the mean."""

ROUNDED: dict[str, Maker] = {form: partial(_only_rounded, form=form) for form in FORMATS}
"""The control: nothing but rounding, whatever is to stay."""
