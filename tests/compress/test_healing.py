"""Healing: it learns, the folder stays what transformers opens, and nothing is written when it fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from running_cases import make, write_tokens

from gnomon.compress import compress, shorten
from gnomon.compress.healing import HELD_OUT, _apart, heal
from gnomon.errors import UserError

transformers = pytest.importorskip("transformers")
# A text with something to learn: each id is followed by the next.
IDS_N = (np.arange(2000) + np.random.default_rng(0).integers(0, 2, 2000)) % 100 + 3


@pytest.fixture
def tokens(tmp_path):
    return write_tokens(tmp_path / "t.bin", IDS_N)


def held_out_loss(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    held_BT, _ = _apart(torch.from_numpy(IDS_N[: 2000 // 50 * 50].astype(np.int64)).view(-1, 50))
    with torch.no_grad():
        return model(held_BT, labels=held_BT).loss.item()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_it_learns_and_is_opened(kind, tmp_path, tokens):
    make(kind).save_pretrained(tmp_path / "m")
    before = held_out_loss(tmp_path / "m")
    files = sorted(file.name for file in (tmp_path / "m").iterdir())
    made = heal(tmp_path / "m", tokens, 30, rate=3e-3, batch=4, length=50)
    assert made.loss_before == pytest.approx(before, rel=1e-5)
    assert made.loss < made.loss_before - 0.5 and made.rows == -(-40 // HELD_OUT)
    assert held_out_loss(tmp_path / "m") == pytest.approx(made.loss, rel=1e-5)
    assert sorted(file.name for file in (tmp_path / "m").iterdir()) == files
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_a_model_that_brings_its_code_is_healed(tmp_path, tokens):
    """With bases that two blocks share, which stay one tensor."""
    make("llama").save_pretrained(tmp_path / "whole")
    compress(tmp_path / "whole", tmp_path / "m", tokens, 0.7, method="shared", length=50)
    made = heal(tmp_path / "m", tokens, 20, rate=3e-3, batch=4, length=50)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", trust_remote_code=True).eval()
    held_BT, _ = _apart(torch.from_numpy(IDS_N[: 2000 // 50 * 50].astype(np.int64)).view(-1, 50))
    with torch.no_grad():
        assert model(held_BT, labels=held_BT).loss.item() == pytest.approx(made.loss, rel=1e-5)
    assert made.loss < made.loss_before - 0.3
    first, second = (model.model.layers[index].mlp.up_proj.terms[0].B for index in (0, 1))
    assert first is second


def test_the_source_reads_the_text_where_the_folder_cannot(tmp_path, tokens):
    """A run of gnomon's keeps its tokenizer in the recipe."""
    from gnomon.train import preset, replace, train

    recipe = {"steps": 2, "model.width": 32, "model.heads": 2, "model.layers": 2, "model.context": 64, "watch.eval_every": 0}
    run = tmp_path / "run"
    train(replace(preset("tiny"), recipe), run)
    (tmp_path / "t.txt").write_text("The shadow of a gnomon tells the hour. " * 60)
    shorten(run, tmp_path / "m", tmp_path / "t.txt", 1.0, by="change")
    with pytest.raises(UserError, match="tokenizer"):
        heal(tmp_path / "m", tmp_path / "t.txt", 2)
    made = heal(tmp_path / "m", tmp_path / "t.txt", 10, rate=1e-2, source=run)
    assert made.loss < made.loss_before


def test_rows_that_judge_are_not_trained_on():
    held_BT, train_BT = _apart(torch.arange(20)[:, None])
    assert held_BT[:, 0].tolist() == [0, 8, 16] and set(train_BT[:, 0].tolist()) == set(range(20)) - {0, 8, 16}


def test_the_order_is_the_seeds(tmp_path, tokens):
    losses = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make("llama").save_pretrained(tmp_path / name)
        losses.append(heal(tmp_path / name, tokens, 3, rate=1e-3, length=50, seed=seed).loss)
    assert losses[0] == losses[1] != losses[2]


def test_what_goes_astray_is_not_written(tmp_path, tokens):
    model = make("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.inf)
    model.save_pretrained(tmp_path / "m")
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="astray at step 0"):
        heal(tmp_path / "m", tokens, 3, length=50)
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before


def test_mistakes_are_told(tmp_path, tokens):
    make("llama").save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match="both must be 1 or more"):
        heal(tmp_path / "m", tokens, 0)
    with pytest.raises(UserError, match="one row of 60 tokens"):
        heal(tmp_path / "m", tokens, 3, tokens=60, length=60)
