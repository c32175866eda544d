"""Tokenizers, against the published vocabulary, transformers and the plain definition."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.data import CITATION, jargon, tokenizer, train_bpe
from gnomon.data.corpus import packaged
from gnomon.data.sources import _CUT, PIECE_CHARS, cut_text
from gnomon.data.tokenizers import END_OF_TEXT, gpt2_vocabulary
from gnomon.errors import UserError

SHARED = Path(__file__).parents[3] / "shared" / "data"

DIFFICULT = [
    "",
    " ",
    "hello world",
    "  two  blanks and\ttabs\n\n\nlines \r\n end   ",
    "I'll can't we've THEY'RE don’t 'tis",
    "naïve café — “quotes” … ½ ² ٣ 五",
    "日本語のテキスト、한국어, ไทย, עברית, हिन्दी",
    "👩‍👩‍👧‍👦 flags 🇬🇧 and e\u0301 combining",
    "\x00\x01\x1c\x85\u00a0\u2003\u200b\ufeff\ufffd",
    "1234567 3.14159 x86_64 foo_bar()[0]{}",
    "a" * 3000,
    "def f(x):\n    return  x  # done\n",
]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def test_the_corpus_is_the_file_it_says_and_is_cited():
    text = jargon()
    assert text.startswith("Welcome to the Jargon File") and len(text.encode()) == 1_448_700
    assert "4.4.7" in CITATION and "public domain" in CITATION


def test_a_damaged_package_is_noticed():
    with pytest.raises(UserError, match="damaged.*install it again"):
        packaged("jargon_file_4.4.7.txt.gz", size=1_448_700, sha256="0" * 64)


def test_gpt2_knows_what_everybody_knows():
    gpt2 = tokenizer("gpt2")
    assert gpt2.encode("hello world").tolist() == [31373, 995]
    assert (gpt2.vocab_size, gpt2.end_of_text, gpt2.dtype) == (50257, 50256, np.uint16)
    assert len(gpt2.encode(jargon())) == 355_986


def test_gpt2_agrees_with_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    raw = packaged(
        "gpt2_merges.txt.gz",
        size=456_318,
        sha256="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ).decode()
    (tmp_path / "merges.txt").write_text(raw, encoding="utf-8")
    (tmp_path / "vocab.json").write_text(json.dumps(gpt2_vocabulary(raw)[0]))
    theirs = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    ours = tokenizer("gpt2")
    for text in [*DIFFICULT, jargon()[200_000:300_000]]:
        assert ours.encode(text).tolist() == theirs(text)["input_ids"], text[:40]
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.skipif(not SHARED.exists(), reason="the development data is not there")
def test_gpt2s_vocabulary_follows_from_its_merges():
    merges = (SHARED / "tokenizer_gpt2" / "vocab.bpe").read_text(encoding="utf-8")
    published = json.loads((SHARED / "tokenizer_gpt2" / "encoder.json").read_text(encoding="utf-8"))
    assert gpt2_vocabulary(merges)[0] == published


@pytest.mark.parametrize("name", ["byte", "gpt2"])
@given(text=texts)
@settings(max_examples=40)
def test_decoding_gives_the_text_back(name, text):
    opened = tokenizer(name)
    ids = opened.encode(text)
    assert ids.dtype == opened.dtype and (ids < opened.vocab_size).all()
    assert opened.end_of_text not in ids
    assert opened.decode(ids) == text


@pytest.mark.parametrize("name", ["byte", "gpt2", "own"])
def test_a_text_cannot_forge_the_separator(name, tmp_path):
    opened = tokenizer(train_bpe(["some text"], 300).save(tmp_path) if name == "own" else name)
    ids = opened.encode(f"a{END_OF_TEXT}b")
    assert opened.end_of_text not in ids
    assert opened.decode([*opened.encode("a"), opened.end_of_text, *opened.encode("b")]) == f"a{END_OF_TEXT}b"


@functools.cache
def with_library(name: str) -> tuple:
    ours = train_bpe(["some words, and words"], 300) if name == "trained" else tokenizer(name)
    return ours, ours.library()


@pytest.mark.parametrize("name", ["byte", "gpt2", "trained"])
@given(text=st.text())
@settings(max_examples=20)
def test_other_programs_get_the_same_ids(name, text):
    ours, library = with_library(name)
    ids = ours.encode(text).tolist()
    assert library.encode(text).ids == ids or END_OF_TEXT in text
    assert library.decode(ids) == ours.decode(ids)
    assert library.encode("a" + END_OF_TEXT).ids == [*ours.encode("a"), ours.end_of_text]


def test_bytes_are_utf8():
    byte = tokenizer("byte")
    assert byte.encode("é€").tolist() == list("é€".encode())
    assert (byte.vocab_size, byte.end_of_text) == (257, 256)
    assert byte.decode([0xC3, 65]) == "\ufffdA"  # a character cut in two
    with pytest.raises(UserError, match="257 is not in the 257"):
        byte.decode([257])


@pytest.mark.parametrize("name", ["byte", "gpt2"])
@pytest.mark.parametrize("word", ["word ", "日本 ", "x", " ", "a  b\n", "it's. "])
def test_pieces_are_tokenised_like_the_whole(name, word):
    text = (word * (5 * PIECE_CHARS // len(word)))[: 4 * PIECE_CHARS + 77]
    pieces = list(cut_text(text))
    assert "".join(pieces) == text and len(pieces) > 1 and max(map(len, pieces)) <= 2 * PIECE_CHARS
    if " " in word.strip("\n") and word.strip():  # there is a place to cut
        opened = tokenizer(name)
        assert np.array_equal(np.concatenate(opened.encode_many(pieces)), opened.encode(text))


@functools.cache
def blank_merging():
    """A vocabulary that, other than GPT-2's, merges blanks with each other and with line breaks."""
    return train_bpe(["x   y\n\n  \t\t z    -- \n" * 50], 300)


STRETCHES = [" ", "  ", "\n", "\t", "x", "it's", "9", "é", "。", "\x85", "\x1c", "--"]


@given(st.lists(st.sampled_from(STRETCHES), min_size=1))
@settings(max_examples=60)
def test_every_blank_between_two_characters_is_a_safe_cut(parts):
    text = "".join(parts)
    for opened in (tokenizer("gpt2"), blank_merging()):
        whole = opened.encode(text).tolist()
        for found in _CUT.finditer(text):
            left, right = opened.encode_many([text[: found.start()], text[found.start() :]])
            assert [*left, *right] == whole


def test_a_trained_bpe_is_saved_and_opened_again(tmp_path):
    trained = train_bpe([jargon()[:200_000]], 600)
    assert trained.vocab_size == 600 and trained.end_of_text == 0
    again = tokenizer(trained.save(tmp_path))
    assert again.fingerprint == trained.fingerprint != tokenizer("gpt2").fingerprint
    assert again.end_of_text == 0
    for text in DIFFICULT:
        ids = trained.encode(text)
        assert np.array_equal(again.encode(text), ids)
        assert trained.decode(ids) == text
    assert train_bpe([jargon()[:200_000]], 600).fingerprint == trained.fingerprint
    assert trained.encode(jargon()[:9000]).size < 0.6 * 9000


@pytest.mark.parametrize("to", ["mine/", "mine", "mine/tokenizer.json", "deep/mine.json"])
def test_a_vocabulary_is_saved_where_it_is_looked_for(tmp_path, to):
    trained = train_bpe(["some text"], 260)
    path = trained.save(f"{tmp_path}/{to}")
    assert path == tmp_path / (to if to.endswith(".json") else "mine/tokenizer.json") and path.is_file()
    assert tokenizer(f"{tmp_path}/{to}").fingerprint == trained.fingerprint


@pytest.mark.parametrize("kind", ["WordLevel", "BPE", "Unigram", "WordPiece"])
def test_a_tokenizer_without_an_unknown_token_loses_nothing_in_silence(tmp_path, kind):
    """The library raises a bare Exception, or (BPE) leaves the character out."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"a": 0, "b": 1, "</s>": 2}
    model = {
        "WordLevel": lambda: tokenizers.models.WordLevel(words),
        "WordPiece": lambda: tokenizers.models.WordPiece(words),
        "BPE": lambda: tokenizers.models.BPE({**words, "ab": 3}, [("a", "b")]),
        "Unigram": lambda: tokenizers.models.Unigram([(word, -1.0) for word in words]),
    }[kind]()
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    opened = tokenizer(tmp_path)
    assert opened.encode("a b").tolist() == [0, 1]
    with pytest.raises(UserError, match="cannot read a text: .*Give it an unknown token"):
        opened.encode("a bé")
    assert opened.encode("b a").tolist() == [1, 0]
    if kind == "BPE":
        assert opened.encode("ab").tolist() == [3]
        inner.normalizer = tokenizers.normalizers.StripAccents()
        inner.save(str(tmp_path / "tokenizer.json"))
        assert tokenizer(tmp_path).encode("a\u0301b").tolist() == [3]  # what a normaliser removes is meant to go


def test_a_large_vocabulary_takes_uint32_and_the_config_names_its_end(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(70_000)} | {"<stop>": 70_000}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    large = tokenizer(tmp_path)
    assert (large.vocab_size, large.end_of_text, large.dtype) == (70_001, 70_000, np.uint32)
    assert large.encode("w69999").tolist() == [69_999]


def test_wrong_names_and_files_are_explained(tmp_path):
    with pytest.raises(UserError, match="unknown tokenizer 'gtp2'.*Did you mean 'gpt2'"):
        tokenizer("gtp2")
    (tmp_path / "tokenizer.json").write_text('{"no": "tokenizer"}')
    with pytest.raises(UserError, match="not a tokenizer.json"):
        tokenizer(tmp_path)
    with pytest.raises(UserError, match="at least 257"):
        train_bpe(["text"], 100)


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path):
    path = train_bpe(["some text"], 257).save(tmp_path)
    path.write_text(path.read_text().replace(END_OF_TEXT, "<strange>"))
    with pytest.raises(UserError, match="no end-of-text token.*eos_token"):
        tokenizer(tmp_path)


def test_a_missing_extra_names_the_command(monkeypatch, tmp_path):
    path = train_bpe(["some text"], 257).save(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match=r'pip install "gnomon\[data\]"'):
        tokenizer(path)
