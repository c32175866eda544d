"""Models with blocks left out: plain transformers opens them, and they are the old model that passes over these blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hf_cases import build
from running_cases import check_folder, make, pass_over, write_tokens

from gnomon import cli
from gnomon.compress import BY, shorten
from gnomon.compress.block_choice import by_chance, by_change, by_loss
from gnomon.errors import UserError
from gnomon.running import open_streamed, read_rows

transformers = pytest.importorskip("transformers")
IDS_N = np.random.default_rng(0).integers(3, 128, 150)
TOKENS_BT = torch.from_numpy(IDS_N).view(3, 50)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "t.bin", IDS_N)


def saved(kind, folder):
    model = make(kind)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "gpt_neox"])
def test_plain_transformers_opens_what_is_left(kind, by, tmp_path, tokens):
    model = saved(kind, tmp_path / "whole")
    made = shorten(tmp_path / "whole", tmp_path / "short", tokens, 0.67, by=by, length=50)
    assert (
        len(made.removed) == 1 and made.blocks == open_streamed(tmp_path / "whole").model.config.num_hidden_layers - 1
    )
    assert made.parameters < made.parameters_before
    expected = pass_over(model, open_streamed(tmp_path / "whole").prefix, made.removed)
    check_folder(tmp_path / "short", expected, TOKENS_BT, made.loss)


def test_keeping_all_keeps_the_logits(tmp_path, tokens):
    model = saved("llama", tmp_path / "whole")
    made = shorten(tmp_path / "whole", tmp_path / "same", tokens, 1.0, length=50)
    assert made.removed == () and made.loss == made.loss_before
    same = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "same").eval()
    with torch.no_grad():
        assert torch.equal(same(TOKENS_BT).logits, model(TOKENS_BT).logits)


def test_loss_takes_the_cheapest_block_each_time(tmp_path, tokens):
    saved("gemma2", tmp_path)
    streamed = open_streamed(tmp_path)
    rows = read_rows(streamed, tokens, 150, 50)

    def loss(gone):
        model = pass_over(make("gemma2"), streamed.prefix, gone)
        with torch.no_grad():
            return model(TOKENS_BT, labels=TOKENS_BT, use_cache=False).loss.item()

    first = min(range(4), key=lambda index: loss([index]))
    second = min((index for index in range(4) if index != first), key=lambda index: loss([first, index]))
    told: list[int] = []
    assert by_loss(streamed, rows, 2, 0, told.append) == [first, second] == told


def test_change_is_of_the_states_transformers_returns(tmp_path, tokens):
    model = saved("gpt_neox", tmp_path)
    with torch.no_grad():
        states = model(TOKENS_BT, output_hidden_states=True).hidden_states
    # The last state is behind the final norm; so of the first two blocks.
    change = [1 - torch.cosine_similarity(a, b, dim=-1).mean().item() for a, b in zip(states[:2], states[1:3])]
    streamed = open_streamed(tmp_path)
    order = by_change(streamed, read_rows(streamed, tokens, 150, 50), 3, 0, print)
    assert sorted(order) == [0, 1, 2] and (order.index(0) < order.index(1)) == (change[0] < change[1])


def test_blocks_that_depend_on_their_number_are_refused(tmp_path, tokens):
    from gnomon.models.hf import GnomonForCausalLM

    GnomonForCausalLM.from_transformer(build("llama-sphere")).save_pretrained(tmp_path / "whole")
    first = next(seed for seed in range(9) if by_chance(open_streamed(tmp_path / "whole"), None, 1, seed, print) == [0])
    with pytest.raises(UserError, match="depends on their number"):
        shorten(tmp_path / "whole", tmp_path / "short", tokens, 0.5, by="random", seed=first)
    assert not (tmp_path / "short").exists()


def test_mistakes_are_told(tmp_path, tokens):
    saved("llama", tmp_path / "whole")
    with pytest.raises(UserError, match="--keep 0.1 of 3 blocks leaves 0"):
        shorten(tmp_path / "whole", tmp_path / "short", tokens, 0.1)
    with pytest.raises(UserError, match="Did you mean 'loss'"):
        shorten(tmp_path / "whole", tmp_path / "short", tokens, by="los")
    with pytest.raises(UserError, match="exists already"):
        shorten(tmp_path / "whole", tmp_path, tokens)
    make("bert", "AutoModelForMaskedLM").save_pretrained(tmp_path / "bert")
    with pytest.raises(UserError, match="does not predict a next token"):
        shorten(tmp_path / "bert", tmp_path / "short", tokens)


def test_the_command(tmp_path, tokens, capsys):
    saved("llama", tmp_path / "whole")
    arguments = [tmp_path / "whole", tmp_path / "short", "--calibrate", tokens, "--keep", 0.67, "--method", "depth", "--by", "change"]
    assert cli.main(["compress", *map(str, arguments)]) in (0, None)
    out = capsys.readouterr().out
    assert "left out, in this order:" in out and f"wrote {tmp_path / 'short'}" in out
