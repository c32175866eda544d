"""One basis for a group of neighbouring layers (Basis Sharing, arXiv 2410.03765), on the side that each role allows.

Layers that read the stream may share what they look at (W = A B, one B), layers that write to it what they say (one A). Which role
shares on which side is a table; arXiv 2605.04971 proposes `BY_ROLE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gnomon.compress.block_matrices import ROLES, BlockMatrices, joined
from gnomon.compress.low_rank import factored, private, whole_rank
from gnomon.compress.replacements import Replacement, Term
from gnomon.compress.whitened_svd import coefficients, input_basis, output_basis
from gnomon.errors import check_name

Sides = Mapping[str, str]
"""Role -> "input" or "output", the side on which layers share; roles that are left out share nothing."""

BY_ROLE: Sides = {**dict.fromkeys(("query", "key", "gate", "up"), "input"), **dict.fromkeys(("output", "down"), "output")}
"""Query, key, gate and up share what they read, output and down what they write, value nothing (arXiv 2605.04971)."""

SIDES: dict[str, Sides] = {"role": BY_ROLE, "input": {role: "input" for role in ROLES}, "output": {role: "output" for role in ROLES}}
"""Tables by name."""


def shared(blocks: Sequence[BlockMatrices], keep: float, sides: Sides = BY_ROLE) -> list[dict[str, Replacement]]:
    """One basis for each role of the group; roles that are not in `sides` keep their own.

    Args:
        blocks: the layers of the group; one alone, or layers of different shapes, are made `private`.
        keep: share of the weights that may stay, the same of each role.
        sides: role -> side.

    Raises:
        UserError: a rank rounds to zero, or a side is neither.
    """
    if len({tuple((matrix.linear, matrix.role, matrix.W_MN.shape) for matrix in block.matrices) for block in blocks}) > 1:
        return private(blocks, keep)
    terms: list[dict[int, Term]] = [{} for _ in blocks]
    for number, first in enumerate(blocks[0].matrices):
        side = sides.get(first.role, "")
        if not side or len(blocks) == 1:
            for block, made in zip(blocks, terms):
                made[number] = factored(block, block.matrices[number], keep)
            continue
        check_name("side", side, ("input", "output"))
        together = _input_terms if side == "input" else _output_terms
        for made, term in zip(terms, together(blocks, number, keep)):
            made[number] = term
    return [joined(block, made) for block, made in zip(blocks, terms)]


def _input_terms(blocks: Sequence[BlockMatrices], number: int, keep: float) -> list[Term]:
    matrices = [block.matrices[number] for block in blocks]
    C_NN = [block.C_NN(matrix) for block, matrix in zip(blocks, matrices)]
    (M, N), layers = matrices[0].W_MN.shape, len(blocks)
    rank = whole_rank(keep * layers * M * N / (layers * M + N), keep, matrices[0], blocks[0])
    B_RN = input_basis([matrix.W_MN for matrix in matrices], C_NN, rank)
    one = B_RN.float()
    return [
        Term(coefficients(matrix.W_MN, C, B_RN).float(), one, B_shared=_name(blocks, number)) for matrix, C in zip(matrices, C_NN)
    ]


def _output_terms(blocks: Sequence[BlockMatrices], number: int, keep: float) -> list[Term]:
    matrices = [block.matrices[number] for block in blocks]
    C_NN = [block.C_NN(matrix) for block, matrix in zip(blocks, matrices)]
    (M, N), layers = matrices[0].W_MN.shape, len(blocks)
    rank = whole_rank(keep * layers * M * N / (M + layers * N), keep, matrices[0], blocks[0])
    U_MR = output_basis([matrix.W_MN for matrix in matrices], C_NN, rank)
    one = U_MR.float()
    return [Term(one, (U_MR.T @ matrix.W_MN.double()).float(), A_shared=_name(blocks, number)) for matrix in matrices]


def _name(blocks: Sequence[BlockMatrices], number: int) -> str:
    matrix = blocks[0].matrices[number]
    return f"{blocks[0].index}.{matrix.linear}.{matrix.role}"
