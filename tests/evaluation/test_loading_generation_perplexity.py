"""Perplexity and generation from a finished run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gnomon import data, evaluation
from gnomon.errors import UserError
from gnomon.evaluation import text_perplexity
from gnomon.evaluation.generation import _Unfinished
from gnomon.run_folder import read_metrics
from gnomon.train import preset, replace, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    changes = {"model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32, "steps": 30,
               "watch.eval_tokens": 2048,
               "compute.device": "cpu", "watch.save_every": 10, "watch.keep": 2}  # fmt: skip
    train(replace(preset("tiny", "proj-spheret"), changes), folder)
    return folder


def test_own_validation_loss_is_the_run_s(run):
    row = evaluation.perplexity(run, tokens=2048, device="cpu")
    assert row["loss"] == pytest.approx(read_metrics(run)[-1]["val_loss"], rel=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert row["tokens"] == 2048


def test_other_text(run, tmp_path):
    (tmp_path / "t.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    row = evaluation.perplexity(run, str(tmp_path / "t.txt"), device="cpu")
    assert row["data"].endswith("t.txt") and 1 < row["perplexity"] < 300
    model, tokenizer, _ = evaluation.load(run, "cpu")
    ids = torch.tensor(tokenizer.encode((tmp_path / "t.txt").read_text()).astype("int64"))
    windows = (len(ids) - 1) // 32
    x, y = ids[: windows * 32].view(-1, 32), ids[1 : windows * 32 + 1].view(-1, 32)
    assert row["loss"] == pytest.approx(model.loss(x, y).item(), rel=1e-5)
    # One byte a token here.
    assert row["bits_per_byte"] == row["bits_per_token"] == pytest.approx(row["loss"] / math.log(2))


def test_bits_a_byte_compare_tokenizers():
    """Three ids that spell seven bytes; the end of a text is no text."""
    tokenizer = data.train_bpe(["naïve naïve naïve"] * 9, 300)
    ids = tokenizer.encode("naïve 1")
    assert len(ids) < 8 and text_perplexity._bytes(tokenizer, np.append(ids, tokenizer.end_of_text)) == 8
    assert math.isnan(text_perplexity._bytes(tokenizer, np.array([tokenizer.end_of_text])))


def test_text_of_another_tokenizer_is_refused(run, tmp_path):
    np.arange(3000, dtype=np.uint16).tofile(tmp_path / "x.bin")
    with pytest.raises(UserError):
        evaluation.perplexity(run, str(tmp_path / "x.bin"), device="cpu")


def test_checkpoints_of_a_run_can_be_named(run):
    from gnomon.run_folder import checkpoint_folders

    first, last = checkpoint_folders(run)
    losses = [evaluation.perplexity(path, tokens=2048, device="cpu")["loss"] for path in (first, last)]
    assert losses[0] > losses[1]


def text(run, **options):
    model, tokenizer, _ = evaluation.load(run, "cpu")
    return "".join(evaluation.generate(model, tokenizer, "The", 100, **options))


def test_generation_starts_with_the_prompt_and_repeats_with_its_seed(run):
    a, b, c = text(run, seed=1), text(run, seed=1), text(run, seed=2)
    assert a == b != c and a.startswith("The") and len(a) > 60


def test_greedy_generation_equals_the_model_without_cache(run):
    model, tokenizer, _ = evaluation.load(run, "cpu")
    ids = list(tokenizer.encode("The"))
    for _ in range(20):
        ids.append(int(model(torch.tensor([[int(i) for i in ids]]))[0, -1].argmax()))
    got = "".join(evaluation.generate(model, tokenizer, "The", 20, temperature=0))
    assert got == tokenizer.decode(ids)


def test_characters_of_several_bytes_arrive_whole():
    tokenizer = data.tokenizer("byte")
    stream = _Unfinished(tokenizer)
    ids = list(tokenizer.encode("naïve — 数学 " * 20))
    pieces = [stream.add(int(i)) for i in ids]
    assert "".join(pieces) == "naïve — 数学 " * 20 and "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": -1}])
def test_wrong_options_are_told(run, options):
    with pytest.raises(UserError):
        text(run, **options)


def test_no_checkpoint_is_told(tmp_path):
    with pytest.raises(UserError, match="no checkpoint"):
        evaluation.load(tmp_path)
