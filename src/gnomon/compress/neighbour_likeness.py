"""How much a block is like the next: in its weights alone, or in what sharing would lose.

Legend: B rows, T tokens, D channels of the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gnomon.compress.block_matrices import BlockMatrices, measured
from gnomon.compress.shared_basis import BY_ROLE, Sides, shared
from gnomon.compress.whitened_svd import lost
from gnomon.continuity import inspect
from gnomon.running.streamed import Block, Streamed
from gnomon.running.token_rows import Rows


def continuity_of(checkpoint: Any) -> dict[int, dict[str, float]]:
    """Block -> role -> |cos| of its leading singular vector and that of the block before, on the side of the stream (arXiv 2605.04971)."""
    alike: dict[int, dict[str, list[float]]] = {}
    for row in inspect(checkpoint, k=2).rows:
        key = {"reads": "v1_cos", "writes": "u1_cos"}.get(row["stream"])
        if row["defined"] and not row["missing"] and key and row[key] is not None:
            alike.setdefault(row["next_layer"], {}).setdefault(row["role"], []).append(row[key])
    return {layer: {role: sum(values) / len(values) for role, values in roles.items()} for layer, roles in alike.items()}


def sharing_losses(
    streamed: Streamed,
    rows: Rows,
    keep: float,
    sides: Sides = BY_ROLE,
    tell: Callable[[int], None] = lambda _: None,
) -> list[dict[str, float]]:
    """What two neighbours lose when they share bases, of the model as it is: the share of their outputs' energy, by role.

    Args:
        keep: share of the weights that stays.
        sides: role -> "input" or "output"; roles that are left out lose what bases of their own lose.
        tell: called with the number of each block that is measured.

    Returns:
        for each block but the last, role -> ‖(W - Ŵ) X‖² / ‖W X‖², summed over the block and the next.
    """
    found: list[dict[str, float]] = []
    before: list[BlockMatrices] = []

    def visit(index: int, h_BTD: Tensor, block: Block) -> Tensor:
        after_BTD, matrices = measured(streamed, index, h_BTD, block)
        if before:
            found.append(_losses([before.pop(), matrices], keep, sides))
        before.append(matrices)
        tell(index)
        return after_BTD

    streamed.run(rows.tokens_BT, visit, **streamed.without_logits)
    return found


def _losses(pair: list[BlockMatrices], keep: float, sides: Sides) -> dict[str, float]:
    gone: dict[str, float] = {}
    there: dict[str, float] = {}
    for block, made in zip(pair, shared(pair, keep, sides)):
        for matrix in block.matrices:
            whole_MN = made[matrix.linear].W_MN
            own_MN = whole_MN if matrix.rows is None else whole_MN[list(matrix.rows)]
            C_NN = block.C_NN(matrix)
            gone[matrix.role] = gone.get(matrix.role, 0.0) + lost(matrix.W_MN, own_MN, C_NN)
            there[matrix.role] = there.get(matrix.role, 0.0) + lost(matrix.W_MN, 0 * own_MN, C_NN)
    return {role: gone[role] / energy for role, energy in there.items() if energy > 0}
