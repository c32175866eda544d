"""Text and token files as rows for a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from running_cases import make, write_tokens

from gnomon.errors import UserError
from gnomon.running import open_streamed, read_rows

transformers = pytest.importorskip("transformers")
TOKENS_BT = torch.randint(3, 128, (3, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make("llama").save_pretrained(folder)
    return open_streamed(folder)


def test_rows_of_a_token_file(llama, tmp_path):
    ids = np.arange(200) % 128
    rows = read_rows(llama, write_tokens(tmp_path / "t.bin", ids), tokens=150)
    assert rows.tokens_BT.shape == (2, 64)  # the context of the model
    assert torch.equal(rows.tokens_BT.flatten(), torch.tensor(ids[:128]))
    assert rows.own_T.all() and rows.tokenizer == "byte"
    assert read_rows(llama, tmp_path / "t.bin", tokens=50).tokens_BT.shape == (1, 50)
    assert read_rows(llama, tmp_path / "t.bin", length=40).tokens_BT.shape == (5, 40)


def test_what_does_not_fit_is_told(llama, tmp_path):
    with pytest.raises(UserError, match="has 20 tokens .* too short: 32"):
        read_rows(llama, write_tokens(tmp_path / "short.bin", np.arange(20)))
    with pytest.raises(UserError, match="token id 163, and the embedding of .* has 128 rows"):
        read_rows(llama, write_tokens(tmp_path / "large.bin", np.arange(100, 201)))
    with pytest.raises(UserError, match="--tokens 5: 32 at least"):
        read_rows(llama, tmp_path / "large.bin", tokens=5)
    with pytest.raises(UserError, match="a mixture, which has no beginning"):
        read_rows(llama, "0.5*jargon + 0.5*jargon")
    (tmp_path / "text.txt").write_text("words " * 100)
    with pytest.raises(UserError, match="no tokenizer that transformers opens .* token file"):
        read_rows(llama, tmp_path / "text.txt")


def test_a_tokenizer_puts_its_own_around_each_row(tmp_path):
    import tokenizers

    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(100)} | {"[C]": 100, "[S]": 101}, "w0")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[C] $A [S]", special_tokens=[("[C]", 100), ("[S]", 101)]
    )
    make("bert", "AutoModelForMaskedLM").save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, cls_token="[C]", sep_token="[S]").save_pretrained(
        tmp_path
    )
    (tmp_path / "text.txt").write_text(" ".join(f"w{i % 100}" for i in range(500)))
    rows = read_rows(open_streamed(tmp_path), tmp_path / "text.txt", tokens=128)
    assert rows.tokens_BT.shape == (2, 64)
    assert rows.tokens_BT[:, 0].tolist() == [100, 100] and rows.tokens_BT[:, -1].tolist() == [101, 101]
    assert rows.tokens_BT[:, rows.own_T].flatten().tolist() == [i % 100 for i in range(124)]


def test_a_run_reads_with_its_own_tokenizer(tiny_run, tmp_path):
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 20)
    rows = read_rows(open_streamed(tiny_run), tmp_path / "text.txt", tokens=128)
    assert rows.tokens_BT.shape == (2, 64) and rows.tokens_BT[:, 0].tolist() == [256, 256]
    assert bytes(rows.tokens_BT[0, 1:].tolist()) == ("All work and no play makes Jack a dull boy.\n" * 2)[:63].encode()


def test_models_in_memory_bring_no_tokenizer(tmp_path):
    from gnomon.checkpoints.checkpoint import from_module

    model = make("llama")
    streamed = open_streamed(from_module(model))
    with torch.no_grad():
        torch.testing.assert_close(streamed.run(TOKENS_BT).logits, model(TOKENS_BT, use_cache=False).logits)
    (tmp_path / "text.txt").write_text("words " * 100)
    with pytest.raises(UserError, match="lies in memory and brings no tokenizer"):
        read_rows(streamed, tmp_path / "text.txt")
