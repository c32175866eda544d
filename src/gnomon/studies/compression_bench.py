"""One model on the bench of `gnomon study compression`: its texts, its matrices, and what a cell measures.

Legend: B rows, T tokens, D channels of the stream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gnomon.compress.block_choice import changes
from gnomon.compress.block_matrices import BlockMatrices, measured
from gnomon.compress.budget import check_calibration
from gnomon.compress.group_choice import by_continuity
from gnomon.compress.low_rank import factored
from gnomon.compress.replacements import Replacement
from gnomon.compress.shared_basis import BY_ROLE, shared
from gnomon.compress.whitened_svd import leading, lost
from gnomon.errors import UserError
from gnomon.running.block_worth import loss_through, losses_without
from gnomon.running.last_words import LastWords, last_words, read_last_words
from gnomon.running.streamed import Block, Streamed, Visit, open_streamed
from gnomon.running.token_rows import Rows, read_rows
from gnomon.studies.compression_cells import HEALED, Cell, Setup
from gnomon.studies.compression_healed import healed
from gnomon.studies.compression_methods import METHODS, ROUNDED, Given, Made, present, size

SIDES = ("", "input", "output")


class Bench:
    """A model, its evaluation texts and its calibration samples, opened once for all cells.

    Attributes:
        setup: the study.
        streamed: the model.
        texts: evaluation rows by name.
        samples: stretches of the calibration text.
        passages: of LAMBADA; none where none were given.

    Raises:
        UserError: the model cannot be run, or a text is too short.
    """

    def __init__(self, setup: Setup):
        self.setup = setup
        self.streamed: Streamed = open_streamed(setup.model)
        texts = setup.named_texts.items()
        self.texts: dict[str, Rows] = {name: read_rows(self.streamed, text, setup.tokens, setup.length) for name, text in texts}
        rows = read_rows(self.streamed, setup.data, setup.calibration * setup.samples, setup.length)
        self.samples: list[Rows] = _parts(rows, setup.samples)
        check_calibration(self.streamed, self.samples[0])
        self.passages: LastWords = read_last_words(self.streamed, setup.lambada, setup.items) if setup.lambada else LastWords("", ())
        self._matrices: tuple[int, list[BlockMatrices]] = (-1, [])

    @torch.no_grad()
    def measure(self, cell: Cell, what: Collection[str]) -> dict[str, Any]:
        """What a cell adds to its line; `what` is of `compression_cells.asked`."""
        if cell.method == "roles":
            return {"roles": self._roles(cell)}
        if cell.method == "pairs":
            return {"pairs": self._pairs(cell)}
        if cell.method == "blocks":
            return {"blocks": self._blocks(cell)}
        if cell.method == "whitening":
            return {"whitening": self._whitening(cell)}
        method, _, steps = cell.method.partition(HEALED)
        made = self._made(method, cell)
        weights, nbytes = size(self.streamed, made)
        found = {"weights": weights, "bytes": nbytes} | ({"gone": made.gone} if made.gone else {})
        if not steps:
            with present(self.streamed, made) as visit:
                return found | self._told(self.streamed, visit, what)
        rows = next(iter(self.texts.values()))
        with healed(self.streamed, made, self.setup.data, int(steps), cell.sample, rows) as smaller, present(smaller, Made()) as visit:
            return found | self._told(smaller, visit, what)

    def _made(self, method: str, cell: Cell) -> Made:
        if method == "whole":
            return Made()
        fitted = method not in ROUNDED and not method.startswith(("depth", "merge"))
        matrices = self.matrices(cell.sample) if fitted and not self.setup.sequential else None
        given = Given(self.streamed, self.samples[cell.sample], matrices, cell.sample)
        return (METHODS | ROUNDED)[method](given, cell.keep)

    def _told(self, streamed: Streamed, visit: Visit, what: Collection[str]) -> dict[str, Any]:
        """Losses on all texts and last words, of those what is wanted."""
        found: dict[str, Any] = {}
        if "losses" in what:
            found["losses"] = self._losses(streamed, visit)
        if "lambada" in what:
            said = last_words(streamed, self.passages, visit)
            found["lambada"] = {"items": said.items, "accuracy": round(said.accuracy, 5), "nats": round(said.nats, 5)}
        return found

    def _losses(self, streamed: Streamed, visit: Visit) -> dict[str, float]:
        return {name: round(loss_through(streamed, rows, visit), 5) for name, rows in self.texts.items()}

    def _loss(self, made: Made) -> float:
        """On the first text."""
        with present(self.streamed, made) as visit:
            return round(loss_through(self.streamed, next(iter(self.texts.values())), visit), 5)

    def _roles(self, cell: Cell) -> dict[str, dict[str, dict[str, float]]]:
        """role -> side ("" for bases of its own) -> losses, where the role alone is made smaller, pair by pair."""
        matrices = self.matrices(cell.sample)
        roles = [matrix.role for matrix in matrices[0].matrices]
        if len(set(roles)) < len(roles) or not _one_by_one(matrices[0]):
            raise UserError(f"{self.setup.name} holds several roles in one tensor, so the part 'roles' cannot take one by itself")
        found: dict[str, dict[str, dict[str, float]]] = {}
        for role in roles:
            for side in SIDES:
                made = Made()
                for first in range(0, len(matrices), 2):
                    self._share(made, matrices[first : first + 2], cell.keep, {role: side} if side else {}, (role,))
                with present(self.streamed, made) as visit:
                    found.setdefault(role, {})[side or "own"] = self._losses(self.streamed, visit)
        return found

    def _pairs(self, cell: Cell) -> dict[str, list[float]]:
        """For each block but the last: the loss on the first text where it and the next alone share by role, and where they are made
        smaller each by itself; and what may predict the difference: continuity, and how much more of the outputs' energy sharing loses."""
        matrices = self.matrices(cell.sample)
        found: dict[str, list[float]] = {"shared": [], "own": [], "tail": []}
        for first in range(len(matrices) - 1):
            pair, gone = matrices[first : first + 2], {}
            for name, sides in (("shared", BY_ROLE), ("own", {})):
                made = Made()
                self._share(made, pair, cell.keep, sides, tuple(BY_ROLE))
                found[name].append(self._loss(made))
                gone[name] = sum(_lost(block, made.load(block.index)) for block in pair)
            found["tail"].append(gone["shared"] - gone["own"])
        return found | {"continuity": by_continuity(self.streamed, self.samples[cell.sample], cell.keep, cell.sample)}

    def _blocks(self, cell: Cell) -> dict[str, Any]:
        """The loss on the first text without each block; what may predict it: how far the block turns the states, and continuity with
        the block before (none for the first), both known without that text; and the loss on the calibration text without it."""
        rows, sample = next(iter(self.texts.values())), self.samples[cell.sample]
        some = replace(sample, tokens_BT=sample.tokens_BT[: len(rows.tokens_BT)])
        whole, without = losses_without(self.streamed, rows)
        return {
            "whole": whole,
            "without": list(without.values()),
            "change": changes(self.streamed, sample),
            "calibration": list(losses_without(self.streamed, some)[1].values()),
            "continuity": [None, *by_continuity(self.streamed, sample, cell.keep, cell.sample)],
        }

    def _whitening(self, cell: Cell) -> dict[str, dict[str, list[float]]]:
        """role -> "whitened" and "plain": block by block the share of the outputs' energy on the calibration sample that a matrix loses
        which is cut to equal rank with regard to its inputs, and by its own singular values alone."""
        found: dict[str, dict[str, list[float]]] = {}
        for block in self.matrices(cell.sample):
            for matrix in block.matrices:
                W_MN, C_NN = matrix.W_MN.double(), block.C_NN(matrix)
                A_MR, B_RN = factored(block, matrix, cell.keep).stored.values()
                U_MR = leading(W_MN @ W_MN.T, A_MR.shape[1])
                whole = lost(W_MN, torch.zeros_like(W_MN), C_NN)
                for name, made_MN in (("whitened", A_MR @ B_RN), ("plain", U_MR @ (U_MR.T @ W_MN))):
                    found.setdefault(matrix.role, {}).setdefault(name, []).append(lost(W_MN, made_MN, C_NN) / whole)
        return found

    def _share(
        self, made: Made, blocks: Sequence[BlockMatrices], keep: float, sides: Mapping[str, str], roles: Sequence[str]
    ) -> None:
        """Only the linears of these roles become what sharing makes of them."""
        if _one_by_one(blocks[0]):
            blocks = [replace(block, matrices=tuple(m for m in block.matrices if m.role in roles)) for block in blocks]
        for block, linears in zip(blocks, shared(blocks, keep, sides)):
            wanted = {matrix.linear for matrix in block.matrices if matrix.role in roles}
            made.save([block.index], [{name: one for name, one in linears.items() if name in wanted}])

    def matrices(self, sample: int) -> list[BlockMatrices]:
        """Every block's, with the moments of the whole model's inputs on a calibration sample; what methods found out about one
        (`BlockMatrices.known`) serves their next share. Some 20 bytes for each weight of the blocks, of one sample at a time."""
        if self._matrices[0] != sample:
            found: list[BlockMatrices] = []

            def visit(index: int, h_BTD: Tensor, block: Block) -> Tensor:
                h_BTD, matrices = measured(self.streamed, index, h_BTD, block)
                found.append(matrices)
                return h_BTD

            self.streamed.run(self.samples[sample].tokens_BT, visit, **self.streamed.without_logits)
            self._matrices = (sample, found)
        return self._matrices[1]


def _one_by_one(block: BlockMatrices) -> bool:
    """Whether every role has a tensor of its own."""
    return len({matrix.linear for matrix in block.matrices}) == len(block.matrices)


def _lost(block: BlockMatrices, made: Mapping[str, Replacement]) -> float:
    """Mean over matrices of the share of the outputs' energy that is lost."""
    shares = []
    for matrix in block.matrices:
        if matrix.linear in made:
            new = made[matrix.linear].W_MN[slice(None) if matrix.rows is None else list(matrix.rows)]
            C_NN = block.C_NN(matrix)
            shares.append(lost(matrix.W_MN, new, C_NN) / lost(matrix.W_MN, torch.zeros_like(new), C_NN))
    return sum(shares) / len(shares)


def _parts(rows: Rows, count: int) -> list[Rows]:
    """Stretches of equal length, one after the other.

    Raises:
        UserError: fewer rows than stretches.
    """
    each = len(rows.tokens_BT) // count
    if not each:
        raise UserError(f"{rows.text} has {rows.count:,} tokens, which are no {count} samples; give a longer text or fewer --seeds")
    return [replace(rows, tokens_BT=rows.tokens_BT[number * each : (number + 1) * each]) for number in range(count)]
