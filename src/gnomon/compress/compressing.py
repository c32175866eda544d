"""`compress`: a model whose blocks hold fewer numbers, made one group of blocks at a time.

The text runs through the model once. At each group the stream that reaches it passes through the group twice: as the blocks were, to
measure what their matrices multiply, and as they become, so that later groups are fitted to what they will be given.

Legend: B rows, T tokens, D channels of the stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gnomon.compress import compressed_folder
from gnomon.compress.block_matrices import BlockMatrices, linears_of, measured, stored_in
from gnomon.compress.budget import budget_of, check_calibration, open_whole
from gnomon.compress.folder_check import check_folder
from gnomon.compress.group_choice import equal_groups, find_groups
from gnomon.compress.in_place import loss_with, replaced
from gnomon.compress.low_rank import Method
from gnomon.compress.methods import METHODS
from gnomon.compress.replacements import Replacement, numel, rounded
from gnomon.compress.shared_basis import SIDES, shared
from gnomon.compress.work_estimate import Work, expected
from gnomon.compress.work_folder import InMemory, WorkFolder
from gnomon.errors import UserError, check_name
from gnomon.files import atomic_folder
from gnomon.progress import Progress
from gnomon.running.streamed import Block, Streamed
from gnomon.running.token_rows import Rows, read_rows


@dataclass(frozen=True)
class Compressed:
    """What was made.

    Attributes:
        folder: where it lies.
        plain: whether transformers opens it without code (else `trust_remote_code=True`).
        parameters, parameters_before: weights of the blocks.
        loss, loss_before: nats a token on the first calibration rows, to which the model was fitted: that of another text is higher.
        difference: largest difference of logits between a fresh process and the model as it was made, as a share of the largest
            logit; None when not verified.
    """

    folder: Path
    plain: bool
    parameters: int
    parameters_before: int
    loss: float
    loss_before: float
    difference: float | None = None


def compress(
    source: Any,
    out: str | Path,
    text: str | Path,
    keep: float = 0.8,
    *,
    method: str = "private",
    group: int = 2,
    groups: str | Sequence[Sequence[int]] = "equal",
    sides: str | Mapping[str, str] = "role",
    tokens: int = 16384,
    length: int | None = 512,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    verify: bool = False,
    show: Callable[[Work], None] = lambda _: None,
    progress: bool = False,
) -> Compressed:
    """Replace the linears of a model's blocks and write the result as a folder that transformers opens.

    Killed and called again it goes on: finished groups lie in a folder `.OUT.part` beside `out`.

    Args:
        source: what `gnomon.checkpoints.open_checkpoint` takes; it is only read.
        out: the folder to make; it appears whole or not at all.
        text: calibration text, on which matrices are fitted.
        keep: share of the block weights that stay; 1 keeps all.
        method: a key of `METHODS`.
        group, groups: of "shared", how many neighbouring blocks share, and how groups are found: "equal", a key of `GROUPS` ("continuity",
            "tail", "random"), or the groups themselves.
        sides: of "shared", a key of `SIDES`, or role -> "input" or "output"; roles that are left out share nothing.
        tokens, length: of the text, and of a row of it (None for the model's context, at most 1,024).
        seed: of groups at random.
        config: used instead of config.json.
        verify: open the folder in a fresh process, without gnomon, and compare logits.
        show: called with the expected work before it is begun.
        progress: show progress with an ETA on stderr.

    Raises:
        UserError: `out` is there already, the budget cannot be reached, the text is too short, or the check failed.
    """
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists already; remove it or choose another name")
    function = METHODS[check_name("method", method, METHODS)]
    if method == "shared":
        table = SIDES[check_name("table of sides", sides, SIDES)] if isinstance(sides, str) else sides
        function = partial(shared, sides=table)
    streamed = open_whole(source, config)
    budget = budget_of(streamed, keep)
    rows = read_rows(streamed, text, tokens, length)
    if keep < 1:
        check_calibration(streamed, rows)
    show(expected(streamed, rows, budget, group if method == "shared" else 1))
    found = find_groups(streamed, rows, keep, group, groups, seed) if method == "shared" else equal_groups(len(streamed.blocks), 1)
    about = {"keep": keep, "method": method, "groups": found, "sides": dict(table) if method == "shared" else None}
    work = WorkFolder(out, about | fingerprint(streamed, rows))
    load = work.load if keep < 1 else lambda index: {}
    if keep < 1 and not all(one in work for one in found):
        with Progress("compressing", len(streamed.blocks), "blocks") as bar:
            make(streamed, rows, function, budget.of_linears, found, work, bar.advance if progress else lambda *_: None)
    before, after = (loss_with(streamed, rows, one) for one in (lambda index: {}, load))
    kept = budget.total - budget.replaceable + _left(streamed, load)
    with atomic_folder(out) as folder:
        plain = compressed_folder.write(streamed, load, folder)
        difference = check_folder(streamed, load, rows, folder) if verify else None
    work.remove()
    return Compressed(out, plain, kept, budget.total, after, before, difference)


def make(
    streamed: Streamed,
    rows: Rows,
    method: Method,
    keep: float,
    groups: Sequence[Sequence[int]],
    work: WorkFolder | InMemory,
    advance: Callable[[float, str], None] = lambda *_: None,
    gone: Collection[int] = (),
) -> None:
    """Fill `work` with what the blocks become.

    Args:
        keep: share of the weights of replaceable linears.
        advance: called with the number of blocks done, and what they were.
        gone: blocks that are passed over; they are in no group.
    """
    of = {index: group for group in groups for index in group}
    waiting: list[tuple[Block, BlockMatrices]] = []
    entered: list[Tensor] = []

    def visit(index: int, h_BTD: Tensor, block: Block) -> Tensor:
        if index in gone:
            return h_BTD
        group = of[index]
        if group in work:
            advance(1, f"block {index}, made before")
            with replaced(streamed, index, work.load(index)):
                return block(h_BTD)
        if not waiting:
            entered[:] = [h_BTD]
        after_BTD, matrices = measured(streamed, index, h_BTD, block)
        waiting.append((block, matrices))
        if index != group[-1]:
            return after_BTD
        made = method([matrices for _, matrices in waiting], keep)
        work.save(group, [_as_stored(streamed, number, linears) for number, linears in zip(group, made)])
        h_BTD = entered.pop()
        for number, (again, _) in zip(group, waiting):
            with replaced(streamed, number, work.load(number)):
                h_BTD = again(h_BTD)
            advance(1, f"block {number}")
        waiting.clear()
        return h_BTD

    streamed.run(rows.tokens_BT, visit, **streamed.without_logits)


def _as_stored(streamed: Streamed, index: int, made: Mapping[str, Replacement]) -> dict[str, Replacement]:
    """In the numbers the linear is stored in, so that what is fitted later sees their rounding."""
    stored = {}
    for linear, one in made.items():
        stored[linear] = rounded(one, stored_in(streamed, f"{streamed.block_names[index]}.{linear}.weight"))
    return stored


def _left(streamed: Streamed, load: Callable[[int], Mapping[str, Replacement]]) -> int:
    """Weights of linears, replaced or not; what is shared counts once."""
    as_they_are, made = 0, []
    for index, name in enumerate(streamed.block_names):
        new = load(index)
        block = streamed.model.get_submodule(name)
        as_they_are += sum(block.get_submodule(one).weight.numel() for one in linears_of(streamed, index) if one not in new)
        made += [replace(one, terms=tuple(_weightless(term) for term in one.terms)) for one in new.values()]
    return as_they_are + numel(made)


def _weightless(term: Any) -> Any:
    """Its shapes without its numbers, so that many can be held."""
    return replace(term, A_MR=term.A_MR.to("meta"), B_RN=None if term.B_RN is None else term.B_RN.to("meta"))


def fingerprint(streamed: Streamed, rows: Rows) -> dict[str, Any]:
    """What tells a model and a calibration from others, without reading the weights."""
    shapes = sorted((key, list(entry.shape), entry.dtype) for key, entry in streamed.checkpoint.entries.items())
    return {
        "model": streamed.checkpoint.name,
        "tensors": hashlib.sha256(repr(shapes).encode()).hexdigest(),
        "calibration": hashlib.sha256(rows.tokens_BT.numpy().tobytes()).hexdigest(),
        "rows": list(rows.tokens_BT.shape),
    }
