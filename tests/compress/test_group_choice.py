"""Groups of neighbouring blocks, against all ways to cut, and the losses behind a choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from running_cases import make, write_tokens

from gnomon.compress.group_choice import GROUPS, cut_where_least, equal_groups, find_groups
from gnomon.compress.low_rank import private
from gnomon.compress.neighbour_likeness import continuity_of, sharing_losses
from gnomon.compress.shared_basis import BY_ROLE
from gnomon.compress.whitened_svd import lost
from gnomon.errors import UserError
from gnomon.running import open_streamed, read_rows

pytest.importorskip("transformers")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("blocks", [2, 5, 8])
def test_cuts_are_the_best_of_all(blocks, size):
    if size > blocks:
        with pytest.raises(UserError, match=f"from 1 to {blocks}"):
            equal_groups(blocks, size)
        return
    likeness = np.random.default_rng(blocks + size).normal(size=blocks - 1).tolist()
    count = len(equal_groups(blocks, size))
    ways = []
    for cuts in itertools.combinations(range(1, blocks), count - 1):
        ends = [0, *cuts, blocks]
        if max(b - a for a, b in itertools.pairwise(ends)) <= 2 * size:
            ways.append((sum(likeness[cut - 1] for cut in cuts), [list(range(a, b)) for a, b in itertools.pairwise(ends)]))
    assert cut_where_least(likeness, size) == min(ways)[1]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = make("llama")
    with torch.no_grad():  # the second block is nearly the first, the third has nothing in common with it
        for name, parameter in model.model.layers[1].named_parameters():
            parameter.copy_(model.model.layers[0].get_parameter(name) + 1e-4 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    streamed = open_streamed(folder)
    tokens = write_tokens(folder / "t.bin", np.random.default_rng(0).integers(3, 128, 960))
    return streamed, read_rows(streamed, tokens, 960, 48)


@pytest.mark.parametrize("rule", ["continuity", "tail"])
def test_equal_neighbours_are_found(rule, opened):
    first, second = GROUPS[rule](*opened, 0.8, 0)
    assert first > second
    assert find_groups(*opened, 0.8, 2, rule) == [[0, 1], [2]]
    assert find_groups(*opened, 0.8, 1, rule) == find_groups(*opened, 0.8, 1) == [[0], [1], [2]]


def test_groups_at_random_depend_on_the_seed(opened):
    assert len({tuple(map(tuple, find_groups(*opened, 0.8, 2, "random", seed))) for seed in range(9)}) == 2


def test_continuity_of_equal_blocks_is_one(opened):
    assert continuity_of(opened[0].checkpoint)[1] == pytest.approx(dict.fromkeys([*BY_ROLE, "value"], 1), abs=1e-3)


def test_losses_of_roles_that_share_nothing_are_their_own(opened):
    streamed, rows = opened
    from gnomon.compress.block_matrices import measured

    held = []
    streamed.run(rows.tokens_BT, lambda index, h, block: (held.append(measured(streamed, index, h, block)[1]), block(h))[1])
    (value, _) = (one["value"] for one in sharing_losses(streamed, rows, 0.8))
    pair = [block.of("value") for block in held[:2]]
    own = [private([block], 0.8)[0]["self_attn.v_proj"].W_MN for block in held[:2]]
    gone = sum(lost(matrix.W_MN, made, block.C_NN(matrix)) for matrix, made, block in zip(pair, own, held))
    there = sum(lost(matrix.W_MN, torch.zeros_like(matrix.W_MN), block.C_NN(matrix)) for matrix, block in zip(pair, held))
    assert value == pytest.approx(gone / there, rel=1e-6)
