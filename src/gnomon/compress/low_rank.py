"""Methods that give each layer bases of its own: `private` and `pivoted`.

A method takes the blocks of a group and the share of their weights that may stay, and tells for each block what its linears become.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from gnomon.compress.block_matrices import BlockMatrices, Matrix, joined
from gnomon.compress.replacements import Replacement, Term
from gnomon.compress.whitened_svd import output_basis
from gnomon.errors import UserError

Method = Callable[[Sequence[BlockMatrices], float], list[dict[str, Replacement]]]
"""(blocks, share of their weights that may stay) -> for each block: name of a linear -> what it becomes."""


def private(blocks: Sequence[BlockMatrices], keep: float) -> list[dict[str, Replacement]]:
    """Each matrix as A B of least loss on its inputs (SVD-LLM, arXiv 2403.07378); the same share of each.

    Raises:
        UserError: a rank rounds to zero.
    """
    return [joined(block, {number: factored(block, matrix, keep) for number, matrix in enumerate(block.matrices)}) for block in blocks]


def pivoted(blocks: Sequence[BlockMatrices], keep: float) -> list[dict[str, Replacement]]:
    """The same products, stored without what a product says twice: R rows as they are, the others as combinations of them
    (pivoting factorization, arXiv 2501.19090). A rank R costs R (M + N - R) numbers and not R (M + N), so more rank fits.

    Raises:
        UserError: a rank rounds to zero.
    """
    return [joined(block, {number: with_pivots(block, matrix, keep) for number, matrix in enumerate(block.matrices)}) for block in blocks]


def factored(block: BlockMatrices, matrix: Matrix, keep: float) -> Term:
    """A B within `keep` of the numbers of W."""
    M, N = matrix.W_MN.shape
    rank = whole_rank(keep * M * N / (M + N), keep, matrix, block)
    U_MR = _basis(block, matrix)[:, :rank]
    return Term(U_MR.float(), (U_MR.T @ matrix.W_MN.double()).float())


def with_pivots(block: BlockMatrices, matrix: Matrix, keep: float) -> Term:
    """Pivot rows and combinations of them, within `keep` of the numbers of W."""
    M, N = matrix.W_MN.shape
    # R (M + N - R) = keep M N
    rank = whole_rank((M + N - math.sqrt((M + N) ** 2 - 4 * keep * M * N)) / 2, keep, matrix, block)
    U_MR = _basis(block, matrix)[:, :rank]
    # Gaussian elimination with partial pivoting picks the rows: the combinations have no large numbers.
    P, L, _ = torch.linalg.lu(U_MR)
    order = P.argmax(0).tolist()
    X = torch.linalg.solve_triangular(L[:rank], L[rank:], upper=False, left=False, unitriangular=True)
    # Rows and pivots are stored in increasing order.
    pivots, first = _sorted(order[:rank])
    rows, last = _sorted(order[rank:])
    B_RN = U_MR[list(pivots)] @ (U_MR.T @ matrix.W_MN.double())
    return Term(X[last][:, first].float(), B_RN.float(), rows=rows, pivots=pivots)


def _basis(block: BlockMatrices, matrix: Matrix) -> torch.Tensor:
    """Of the outputs, of every rank: its first columns are that of a smaller one."""
    key = "output basis", matrix.linear, matrix.rows
    if key not in block.known:
        block.known[key] = output_basis([matrix.W_MN], [block.C_NN(matrix)])
    return block.known[key]


def whole_rank(rank: float, keep: float, matrix: Matrix, block: BlockMatrices) -> int:
    """The rank as a whole number.

    Raises:
        UserError: it rounds to zero.
    """
    if rank < 1:
        M, N = matrix.W_MN.shape
        raise UserError(
            f"block {block.index}, {matrix.role} ({M} x {N}): {keep:.3g} of its numbers pay for no rank at all. Keep more: a rank of "
            f"one takes {(M + N) / (M * N):.3g} of it."
        )
    return min(int(rank), *matrix.W_MN.shape)


def _sorted(places: list[int]) -> tuple[tuple[int, ...], list[int]]:
    """Increasing, and where each stood."""
    order = sorted(range(len(places)), key=lambda at: places[at])
    return tuple(places[at] for at in order), order
