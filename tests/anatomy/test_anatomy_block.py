"""Blocks: take and put on numpy and torch, views where memory allows, partitions for any period."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.anatomy import Block, Cut
from gnomon.errors import UserError


@st.composite
def cuts(draw):
    """An axis length and cuts that share out every group of it."""
    period, groups = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    marks = sorted(draw(st.sets(st.integers(1, period - 1), max_size=3))) if period > 1 else []
    bounds = [0, *marks, period]
    return period * groups, [Cut(period, a, b) for a, b in zip(bounds, bounds[1:])]


@given(cuts(), cuts(), st.booleans(), st.sampled_from([None, 0, 2]), st.sampled_from([np, torch]))
def test_cuts_partition_a_tensor_and_rebuild_it(rows, columns, transposed, index, library):
    (m, row_cuts), (n, column_cuts) = rows, columns
    stored = (n, m) if transposed else (m, n)
    stored = stored if index is None else (3, *stored)
    whole = library.arange(int(np.prod(stored))).reshape(stored)
    rebuilt = library.full_like(whole, -1)
    seen = []
    for row in row_cuts:
        for column in column_cuts:
            block = Block(index, transposed, row, column)
            taken = block.take(whole)
            assert tuple(taken.shape) == block.shape(stored) and block.size(stored) == np.asarray(taken).size
            seen += np.asarray(taken).ravel().tolist()
            block.put(rebuilt, taken)
    expected = whole if index is None else whole[index]
    assert sorted(seen) == np.asarray(expected).ravel().tolist()
    np.testing.assert_array_equal(np.asarray(rebuilt if index is None else rebuilt[index]), np.asarray(expected))
    if index is not None:
        assert (np.asarray(rebuilt)[1] == -1).all()


def test_taking_agrees_with_reading_row_by_row():
    """(heads, q k v, channels): the second role of every head, told by explicit loops."""
    W = np.random.default_rng(0).standard_normal((2 * 3 * 5, 7))
    expected = [W[head * 15 + 5 + channel] for head in range(2) for channel in range(5)]
    np.testing.assert_array_equal(Block(rows=Cut(15, 5, 10)).take(W), expected)
    np.testing.assert_array_equal(Block(transposed=True, rows=Cut(15, 5, 10)).take(W.T), expected)


@pytest.mark.parametrize("block", [Block(), Block(transposed=True), Block(rows=Cut(6, 2, 4)), Block(1)])
def test_one_group_is_a_view(block):
    shape = (3, 6, 4) if block.index is not None else (6, 4)
    tensor = torch.zeros(shape)
    block.take(tensor).fill_(1)
    assert tensor.sum() == block.size(shape)
    array = np.zeros(shape)
    assert np.shares_memory(block.take(array), array)


def test_put_writes_through_a_parameter_without_a_graph():
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    Block(rows=Cut(3, 0, 1)).put(parameter, torch.ones(2, 4))
    assert parameter.sum() == 8 and parameter.grad_fn is None


def test_put_refuses_another_shape():
    with pytest.raises(UserError, match=r"\(2, 4\).*\(4, 2\)"):
        Block(rows=Cut(3, 0, 1)).put(np.zeros((6, 4)), np.zeros((4, 2)))


def test_a_part_across_two_groups_is_refused():
    assert Cut(6, 0, 3).part(12, 3, 2) == Cut(12, 6, 8)
    with pytest.raises(UserError, match="two groups"):
        Cut(6, 0, 3).part(12, 2, 2)


def test_reading_names_and_shapes_does_not_import_torch():
    code = "import sys; from gnomon import anatomy; anatomy.read({'h.0.attn.c_attn.weight': (96, 288)}); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
