"""`modules`: blocks with fewer channels inside their MLPs and heads (MoDeGPT, arXiv 2408.09632), by the functions of `narrowing`.

Matrices stay dense and only become smaller. An MLP of fewer channels is one that any library runs. In attention, code that exists
wants heads of the width it knows: so what is cut there is not stored and gives zeros, of queries and keys at its place, of values at
the end of the head, and the output projection reads the rest.

Legend: M outputs, N inputs, K hidden channels kept, H query heads, C channels of a head, R those kept of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnomon.compress.block_matrices import BlockMatrices, Matrix, joined
from gnomon.compress.narrowing import leverage, query_key, refit, rotary_pairs, spectrum, value_directions
from gnomon.compress.replacements import Replacement, Term
from gnomon.errors import UserError

# Models of transformers whose rotary pairs are neighbours.
_NEIGHBOURS = {"codegen", "cohere", "cohere2", "ernie4_5", "glm", "glm4", "gptj", "helium"}
_OF_QUERY_OR_KEY = re.compile(r"(^|[._])(q|k|query|key)_?(norm|ln|layernorm)")


class _Cut(NamedTuple):
    """What a matrix of attention becomes, and its bias, of the old length."""

    term: Term
    bias_M: Tensor | None


def modules(blocks: Sequence[BlockMatrices], keep: float) -> list[dict[str, Replacement]]:
    """Each block by itself, MLP and attention at the same share; arguments, result and errors as of every method."""
    return [narrow(block, keep) for block in blocks]


def mlp(blocks: Sequence[BlockMatrices], keep: float) -> list[dict[str, Replacement]]:
    """The same of the MLP alone: attention stays whole, and plain transformers runs the result."""
    return [narrow(block, keep, attention=1.0) for block in blocks]


def narrow(block: BlockMatrices, keep: float, attention: float | None = None) -> dict[str, Replacement]:
    """The block with at most the share `keep` of its weights.

    Args:
        block: with the moments of its linears' inputs.
        keep: share of the weights of all matrices.
        attention: share of a head's channels that stay; None for `keep`. The MLP has what is left: every channel that fits.

    Returns:
        name of a linear -> what it becomes. Queries and keys that are normalised by head stay as they are, since the norm is one of
        all their channels; so does attention with norms elsewhere, or whose heads are not known.

    Raises:
        UserError: no channel would be left, or the channels of the MLP cannot go one by one.
    """
    cuts = _attention(block, keep if attention is None else attention)
    biases = dict(block.biases)
    for number, cut in cuts.items():
        matrix, bias_M = block.matrices[number], biases[block.matrices[number].linear]
        if cut.bias_M is not None and bias_M is not None:
            biases[matrix.linear] = bias_M.index_copy(0, _rows(matrix), cut.bias_M)
    made = joined(replace(block, biases=biases), {number: cut.term for number, cut in cuts.items()})
    up, down = block.of("up"), block.of("down")
    if up is None or down is None or len(up.W_MN) != down.W_MN.shape[1] or _norms(block, down):
        raise UserError(
            f"block {block.index} has no MLP whose channels go from an up to a down projection one by one, so none can be left out. "
            "Use another method."
        )
    parts = [matrix for matrix in (block.of("gate"), up, down) if matrix is not None]
    left = keep * block.numel - sum(tensor.numel() for cut in cuts.values() for tensor in cut.term.stored.values())
    left -= sum(matrix.W_MN.numel() for number, matrix in enumerate(block.matrices) if number not in cuts and matrix not in parts)
    width = len(up.W_MN)
    count = min(width, math.floor(left / (sum(matrix.W_MN.numel() for matrix in parts) // width) + 1e-9))
    if count < 1:
        raise UserError(
            f"{keep:g} of block {block.index} are {keep * block.numel:,.0f} weights, of which its attention leaves {left:,.0f}: not one "
            f"of the {width:,} channels of its MLP. Keep more, or less of attention."
        )
    return made | (_mlp(block, down, parts[:-1], count) if count < width else {})


def _mlp(block: BlockMatrices, down: Matrix, readers: list[Matrix], count: int) -> dict[str, Replacement]:
    """Nystrom: channels by leverage, the down projection refitted."""
    C_NN, width = block.C_NN(down), down.W_MN.shape[1]
    key = "spectrum", down.linear
    if key not in block.known:
        block.known[key] = spectrum(C_NN)
    kept_K = leverage(block.known[key], count)
    W_MK = refit(down.W_MN, C_NN, kept_K)
    made = {down.linear: Replacement((len(W_MK), count), (Term(W_MK),), block.biases[down.linear])}
    for linear in dict.fromkeys(matrix.linear for matrix in readers):
        parts = [matrix for matrix in readers if matrix.linear == linear]
        places = torch.cat([_rows(matrix) for matrix in parts])
        kept = torch.cat([kept_K + number * width for number in range(len(parts))])
        # Rows of a fused gate and up keep their order, so that its halves, or every second row, are theirs as before.
        kept = kept[places[kept].argsort()]
        W_MN, bias_M = torch.cat([matrix.W_MN for matrix in parts])[kept], block.biases[linear]
        made[linear] = Replacement((len(W_MN), W_MN.shape[1]), (Term(W_MN),), None if bias_M is None else bias_M[places[kept]])
    return made


def _attention(block: BlockMatrices, share: float) -> dict[int, _Cut]:
    """Number of a matrix in the block -> what it becomes."""
    found = [block.of(role) for role in ("query", "key", "value", "output")]
    query, key, value, output = found
    if share >= 1 or any(matrix is None or not matrix.heads or not matrix.head_dim for matrix in found):
        return {}
    assert query and key and value and output
    norms = _norms(block, value)
    if not all(_OF_QUERY_OR_KEY.search(name) for name in norms):
        return {}
    count = math.floor(share * (value.head_dim or 0) + 1e-9)
    if count < 1:
        raise UserError(f"{share:g} of a head's {value.head_dim} channels is less than one. Keep more of attention.")
    cuts = _values(block, value, output, count)
    if not norms:
        cuts |= _queries(block, query, key, count)
    return {block.matrices.index(matrix): cut for matrix, cut in zip((value, output, query, key), cuts.values())}


def _values(block: BlockMatrices, value: Matrix, output: Matrix, count: int) -> dict[str, _Cut]:
    """A few directions of each value head, which its query heads share; the output projection refitted to all heads at once."""
    heads, C = value.heads or 0, value.head_dim or 0
    shared = (output.heads or 0) // heads
    C_NN, bias_M = block.C_NN(output), _bias(block, value)
    T_HRC = []
    for own in torch.arange(C_NN.shape[0]).view(heads, shared, C):
        S_CC = torch.stack([C_NN[head][:, head] for head in own]).mean(0)
        T_HRC.append(value_directions(S_CC, torch.stack([output.W_MN[:, head] for head in own]), count))
    T_KN = torch.block_diag(*T_HRC)
    first = torch.arange(count)
    rows = (torch.arange(heads)[:, None] * C + first).flatten()
    columns = (torch.arange(heads * shared)[:, None] * C + first).flatten()
    P_KN = torch.block_diag(*(T_RC for T_RC in T_HRC for _ in range(shared)))
    if bias_M is not None:
        bias_M = torch.zeros_like(bias_M).index_copy(0, rows, (T_KN @ bias_M.double()).to(bias_M.dtype))
    return {
        "value": _Cut(Term((T_KN @ value.W_MN.double()).to(value.W_MN.dtype), rows=_places(rows)), bias_M),
        "output": _Cut(Term(refit(output.W_MN, C_NN, P_KN), columns=_places(columns)), None),
    }


def _queries(block: BlockMatrices, query: Matrix, key: Matrix, count: int) -> dict[str, _Cut]:
    """Channels (or rotary pairs) of a key head and of all its queries, by the product of their sizes."""
    heads, C = key.heads or 0, key.head_dim or 0
    shared = (query.heads or 0) // heads
    q_GHC, k_GC = _squares(block, query).view(heads, shared, C), _squares(block, key).view(heads, C)
    units = _units(block.config, C)
    kept = [query_key(q_HC, k_C, units, count) for q_HC, k_C in zip(q_GHC, k_GC)]
    if not all(map(len, kept)):
        raise UserError(f"{count} of a head's {C} channels is less than one rotary pair. Keep more of attention.")
    cuts = {}
    for name, matrix, times in (("query", query, shared), ("key", key, 1)):
        rows = torch.cat([kept[head // times] + head * C for head in range(heads * times)])
        bias_M = _bias(block, matrix)
        if bias_M is not None:
            bias_M = torch.zeros_like(bias_M).index_copy(0, rows, bias_M[rows])
        cuts[name] = _Cut(Term(matrix.W_MN[rows], rows=_places(rows)), bias_M)
    return cuts


def _squares(block: BlockMatrices, matrix: Matrix) -> Tensor:
    """Mean square of each output, as if inputs had no mean beside the bias."""
    W_MN, bias_M = matrix.W_MN.double(), _bias(block, matrix)
    square_M = (W_MN @ block.C_NN(matrix) * W_MN).sum(1)
    return square_M if bias_M is None else square_M + bias_M.double().square()


def _units(config: Any, width: int) -> Tensor:
    """Which channels of a head turn together."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]
    share = next((kind["partial_rotary_factor"] for kind in kinds if "partial_rotary_factor" in kind), 1.0)
    turns = rope or getattr(config, "positions", "") == "rope"
    rotated = getattr(config, "rotary_dim", None) or (int(share * width) if turns else 0)
    return rotary_pairs(width, rotated, config.model_type in _NEIGHBOURS)


def _norms(block: BlockMatrices, matrix: Matrix) -> list[str]:
    """Normalisations that stand beside a matrix in its module."""
    beside = matrix.linear.rpartition(".")[0] + "."
    return [name for name in block.norms if name.startswith(beside)]


def _rows(matrix: Matrix) -> Tensor:
    return torch.arange(len(matrix.W_MN)) if matrix.rows is None else torch.tensor(matrix.rows)


def _bias(block: BlockMatrices, matrix: Matrix) -> Tensor | None:
    bias_M = block.biases[matrix.linear]
    return None if bias_M is None else bias_M[_rows(matrix)]


def _places(numbers: Tensor) -> tuple[int, ...]:
    return tuple(numbers.tolist())
