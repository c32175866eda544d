"""`auto`: whole blocks left out, blocks made smaller inside, or some of both: what loses least on text it was not fitted to.

The search is small and the same for every model: none, half or all of what goes may go as whole blocks, those that turn the states least
(ShortGPT, arXiv 2403.03853); the blocks that are left are made smaller by each method of `WITHIN`. Each mixture is fitted to three
quarters of the calibration rows and judged on the others.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnomon.compress.block_choice import changes
from gnomon.compress.budget import budget_of, check_calibration, check_share, open_whole
from gnomon.compress.compressing import Compressed, compress, make
from gnomon.compress.in_place import loss_with
from gnomon.compress.methods import METHODS
from gnomon.compress.shortening import NumberedBlocks, shorten
from gnomon.compress.work_folder import InMemory
from gnomon.errors import UserError
from gnomon.progress import Progress, tell
from gnomon.running.streamed import Streamed
from gnomon.running.token_rows import Rows, read_rows

DEPTH = (0.0, 0.5, 1.0)
"""Shares of what goes that may go as whole blocks."""
WITHIN = ("pivoted", "modules", "mlp")
"""How the blocks that are left are made smaller."""
JUDGES = 4
"""One calibration row in so many is judged on."""


@dataclass(frozen=True)
class Mixture:
    """One way to meet the budget.

    Attributes:
        gone: blocks that are left out.
        method: a key of `METHODS` for the others; "" where nothing more has to go.
        share: of the weights of the blocks that are left.
        loss: nats a token on the rows that judge; infinite before it is measured.
    """

    gone: tuple[int, ...]
    method: str
    share: float
    loss: float = math.inf

    def __str__(self) -> str:
        parts = [f"without blocks {', '.join(map(str, sorted(self.gone)))}"] * bool(self.gone)
        return "; ".join(parts + [f"{self.method}, {self.share:.3g} of the others"] * bool(self.method))


def candidates(streamed: Streamed, rows: Rows, keep: float) -> list[Mixture]:
    """The mixtures that are tried; a single pass of the text tells which blocks would go.

    Raises:
        UserError: `keep` is no share.
    """
    check_share(keep)
    sizes = [streamed.nbytes(name) for name in streamed.block_names]
    total, blocks = sum(sizes), len(sizes)
    order = sorted(range(blocks), key=changes(streamed, rows).__getitem__)
    found: dict[tuple[Any, ...], Mixture] = {}
    for share in DEPTH:
        gone = tuple(order[: min(math.floor(share * (1 - keep) * blocks + 1e-9), blocks - 1)])
        left = keep * total / (total - sum(sizes[index] for index in gone))
        for method in WITHIN if left < 1 - 1e-9 else ("",):
            found[gone, method] = Mixture(gone, method, left if method else 1.0)
    return list(found.values())


def search(streamed: Streamed, rows: Rows, keep: float, advance: Callable[[float, str], None] = lambda *_: None) -> list[Mixture]:
    """All mixtures that this model can be made into, the least loss first.

    Raises:
        UserError: there is none, or too few rows to fit and to judge.
    """
    if len(rows.tokens_BT) < 2:
        raise UserError(f"{rows.text} makes one row of {rows.tokens_BT.shape[1]} tokens; auto needs one to fit to and one to judge by")
    judges = [number % JUDGES == 0 for number in range(len(rows.tokens_BT))]
    judge = replace(rows, tokens_BT=rows.tokens_BT[judges])
    fit = replace(rows, tokens_BT=rows.tokens_BT[[not one for one in judges]])
    measured, refused = [], []
    for mixture in candidates(streamed, fit, keep):
        made = InMemory()
        try:
            if mixture.method:
                _fill(streamed, fit, mixture, made)
        except UserError as error:  # a method that this architecture has no place for, or a rank of nothing
            refused.append(f"{mixture}: {error}")
            advance(1, f"{mixture}: not possible")
            continue
        loss = loss_with(streamed, judge, made.load, mixture.gone)
        measured.append(replace(mixture, loss=loss))
        advance(1, f"{mixture}: {loss:.4f}")
    if not measured:
        raise UserError("nothing of what auto tries fits this model: " + "; ".join(refused))
    return sorted(measured, key=lambda mixture: mixture.loss)


def _fill(streamed: Streamed, rows: Rows, mixture: Mixture, made: InMemory) -> None:
    budget = budget_of(streamed, mixture.share, mixture.gone)
    groups = [[index] for index in range(len(streamed.blocks)) if index not in mixture.gone]
    make(streamed, rows, METHODS[mixture.method], budget.of_linears, groups, made, gone=mixture.gone)


def auto(
    source: Any,
    out: str | Path,
    text: str | Path,
    keep: float = 0.8,
    *,
    tokens: int = 16384,
    length: int | None = 512,
    config: Mapping[str, Any] | None = None,
    progress: bool = False,
    **options: Any,
) -> tuple[Compressed, list[Mixture]]:
    """Search, then write the best mixture, fitted to all rows. Killed, it searches again, and goes on with what it was writing.

    Args:
        source, out, text, keep, tokens, length, config, progress: of `compress`.
        options: more of them.

    Returns:
        what was made, and all that was tried, the least loss first.

    Raises:
        UserError: as `compress`.
    """
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists already; remove it or choose another name")
    streamed = open_whole(source, config)
    rows = read_rows(streamed, text, tokens, length)
    check_calibration(streamed, rows)
    with Progress("searching", len(DEPTH) * len(WITHIN), "mixtures") as bar:
        tried = search(streamed, rows, keep, bar.advance if progress else lambda *_: None)
    settings: dict[str, Any] = dict(tokens=tokens, length=length, progress=progress)
    short = out.with_name(f".{out.name}.short")
    for mixture in tried:
        method = mixture.method or WITHIN[0]
        if not mixture.gone:
            return compress(source, out, text, keep, method=method, config=config, **settings, **options), tried
        shutil.rmtree(short, ignore_errors=True)
        try:
            cut = shorten(source, short, text, by=mixture.gone, config=config, **settings)
            made = compress(short, out, text, mixture.share, method=method, **settings, **options)
            return replace(made, parameters_before=cut.parameters_before, loss_before=cut.loss_before), tried
        except NumberedBlocks as error:
            tell(f"{mixture}: {error} The next best is taken.")
        finally:
            shutil.rmtree(short, ignore_errors=True)
    raise UserError("of all mixtures, only those without some blocks fit this model, and its blocks cannot be left out")
