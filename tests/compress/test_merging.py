"""Neighbours merged into one block: plain transformers opens the result, and its blocks are the means of the old ones."""

from __future__ import annotations

import itertools

import hf_cases
import numpy as np
import pytest
import torch
from running_cases import check_folder, make, pass_over, write_tokens

from gnomon import cli
from gnomon.compress import MERGED_BY, shorten
from gnomon.compress.merging import by_change, groups_without, likest_pairs
from gnomon.errors import UserError
from gnomon.running import open_streamed, read_rows

transformers = pytest.importorskip("transformers")
IDS_N = np.random.default_rng(0).integers(3, 128, 150)
TOKENS_BT = torch.from_numpy(IDS_N).view(3, 50)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "t.bin", IDS_N)


def saved(kind, folder, dtype=torch.float32):
    model = make(kind).to(dtype)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def by_hand(model, prefix, gone):
    """The model in memory, whose blocks before those that are gone are the mean of both, and which passes over those."""
    blocks = model.get_submodule(prefix)
    for index in gone:
        for own, other in zip(blocks[index - 1].parameters(), blocks[index].parameters(), strict=True):
            own.copy_((own.float() + other.float()) / 2)
    return pass_over(model, prefix, gone)


@pytest.mark.parametrize("by", MERGED_BY)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "gpt_neox", "qwen3"])
def test_plain_transformers_opens_the_means(kind, by, tmp_path, tokens):
    model = saved(kind, tmp_path / "whole")
    made = shorten(tmp_path / "whole", tmp_path / "short", tokens, 0.67, by=by, merge=True, length=50)
    assert len(made.removed) == 1 and made.blocks == model.config.num_hidden_layers - 1 and made.parameters < made.parameters_before
    expected = by_hand(model, open_streamed(tmp_path / "whole").prefix, made.removed)
    check_folder(tmp_path / "short", expected, TOKENS_BT, made.loss)


def test_means_are_those_of_the_stored_numbers(tmp_path, tokens):
    model = saved("llama", tmp_path / "whole", torch.bfloat16)
    made = shorten(tmp_path / "whole", tmp_path / "short", tokens, by=[2], merge=True, length=50)
    short = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "short", dtype=torch.bfloat16)
    up = [layer.mlp.up_proj.weight for layer in model.model.layers]
    assert torch.equal(short.model.layers[1].mlp.up_proj.weight, ((up[1].float() + up[2].float()) / 2).bfloat16())
    assert torch.equal(short.model.layers[0].mlp.up_proj.weight, up[0]) and made.removed == (2,)


def test_pairs_are_the_best_there_are():
    drawn = np.random.default_rng(0)
    for blocks, count in itertools.product(range(2, 9), range(5)):
        likeness = drawn.normal(size=blocks - 1).tolist()
        every = [some for some in itertools.combinations(range(blocks - 1), count) if all(b - a > 1 for a, b in itertools.pairwise(some))]
        if every:
            best = max(every, key=lambda some: sum(likeness[first] for first in some))
            assert likest_pairs(likeness, count) == [(first, first + 1) for first in best]


def test_groups():
    assert groups_without(5, {2, 3}, merge=True) == [[0], [1, 2, 3], [4]]
    assert groups_without(5, {0, 3}, merge=False) == [[1], [2], [4]]


def test_change_is_of_the_states_transformers_returns(tmp_path, tokens):
    model = saved("gpt_neox", tmp_path)
    with torch.no_grad():
        states = model(TOKENS_BT, output_hidden_states=True).hidden_states
    streamed = open_streamed(tmp_path)
    found = by_change(streamed, read_rows(streamed, tokens, 150, 50))
    # The state behind the last block is returned behind the final norm as well; so of the first pair.
    assert len(found) == 2 and found[0] == pytest.approx(torch.cosine_similarity(states[0], states[2], dim=-1).mean().item() - 1, abs=1e-5)


def test_blocks_that_depend_on_their_number_are_refused(tmp_path, tokens, monkeypatch):
    from gnomon.models.hf import GnomonForCausalLM

    monkeypatch.setitem(hf_cases.SMALL, "layers", 3)
    GnomonForCausalLM.from_transformer(hf_cases.build("llama-sphere")).save_pretrained(tmp_path / "whole")
    with pytest.raises(UserError, match="depends on their number"):
        shorten(tmp_path / "whole", tmp_path / "short", tokens, by=[1], merge=True)
    assert not (tmp_path / "short").exists()


def test_mistakes_are_told(tmp_path, tokens):
    saved("llama", tmp_path / "whole")
    with pytest.raises(UserError, match="2 of 3 blocks are to go by merging, and each takes two. Keep half"):
        shorten(tmp_path / "whole", tmp_path / "short", tokens, 0.34, by="change", merge=True)
    with pytest.raises(UserError, match="Did you mean 'change'"):
        shorten(tmp_path / "whole", tmp_path / "short", tokens, by="chang", merge=True)
    with pytest.raises(UserError, match="block 0 has none before it"):
        shorten(tmp_path / "whole", tmp_path / "short", tokens, by=[0], merge=True)
    from gnomon.compress.merging import merged

    with pytest.raises(UserError, match="differ in their weights"):  # the streams of two models: blocks of other shapes
        streamed = open_streamed(tmp_path / "whole")
        streamed.model.model.layers[1].mlp.up_proj.register_parameter("bias", torch.nn.Parameter(torch.zeros(96)))
        with merged(streamed, [0, 1]):
            pass


def test_the_command(tmp_path, tokens, capsys):
    saved("llama", tmp_path / "whole")
    arguments = [tmp_path / "whole", tmp_path / "short", "--calibrate", tokens, "--keep", 0.67, "--method", "merge"]
    assert cli.main(["compress", *map(str, arguments)]) in (0, None)
    assert "merged with the block before: " in capsys.readouterr().out
