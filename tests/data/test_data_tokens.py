"""Token files: what is written is read, by us and by others; every trap names file, fact and fix."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.data import Tokens, TokenWriter, jargon, open_tokens, open_train_val, split, tokenizer, train_bpe
from gnomon.data.tokens import Joined
from gnomon.errors import UserError

BYTE = tokenizer("byte")


def write(path: Path, ids, opened=BYTE) -> Path:
    with TokenWriter(path, opened, source="a test") as writer:
        for part in np.array_split(np.asarray(ids), 3):
            writer.append(part)
    return path


def with_header(path: Path, ids, magic=20240520, version=1, count=None, dtype="<u2") -> Path:
    """As llm.c and modded-nanogpt write it, independently of our writer."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(ids).astype(dtype).tobytes())
    return path


def test_what_is_written_is_read(tmp_path):
    ids = BYTE.encode(jargon()[:5000])
    path = write(tmp_path / "a.bin", ids)
    tokens = open_tokens(path)
    assert np.array_equal(tokens[:], ids) and len(tokens) == len(ids)
    assert (tokens.vocab_size, tokens.tokenizer, tokens.name) == (257, "byte", str(path))
    assert not tokens.array.flags.writeable
    assert path.read_bytes() == with_header(tmp_path / "b.bin", ids).read_bytes()  # to the bit what llm.c writes
    notes = json.loads((tmp_path / "a.bin.json").read_text())
    assert (notes["count"], notes["dtype"], notes["source"]) == (len(ids), "uint16", "a test")


def test_the_files_of_others_are_read(tmp_path):
    ids = np.arange(50_000, 50_257)
    (tmp_path / "train.bin").write_bytes(ids.astype("<u2").tobytes())  # nanoGPT
    with_header(tmp_path / "fineweb_train_000001.bin", ids)
    with_header(tmp_path / "llama.bin", ids + 100_000, 20240801, 7, dtype="<u4")
    for name, wanted in {"train": ids, "fineweb_train_000001": ids, "llama": ids + 100_000}.items():
        tokens = open_tokens(tmp_path / f"{name}.bin")
        assert np.array_equal(tokens[:], wanted)
        assert tokens.vocab_size is None and tokens.tokenizer is None
    known = open_tokens(tmp_path / "train.bin", tokenizer="gpt2")
    assert (known.vocab_size, known.tokenizer) == (50257, "gpt2")


def test_a_large_vocabulary_is_written_as_uint32(tmp_path):
    class Large(type(BYTE)):
        name, vocab_size, end_of_text = "large", 100_000, 99_999

    path = write(tmp_path / "a.bin", [70_000, 1, 99_999], Large())
    assert np.array_equal(open_tokens(path)[:], [70_000, 1, 99_999])
    assert path.read_bytes() == with_header(tmp_path / "b", [70_000, 1, 99_999], 20240801, 7, dtype="<u4").read_bytes()


GOOD = list(range(100, 200))

TRAPS = {
    "truncated": (
        lambda p: p.write_bytes(with_header(p, GOOD).read_bytes()[:-7]),
        "was cut off: 100 uint16 ids take",
    ),
    "too long": (lambda p: p.write_bytes(with_header(p, GOOD).read_bytes() + b"xx"), "has bytes too many"),
    "count": (lambda p: with_header(p, GOOD, count=120), "was cut off: 120"),
    "negative count": (lambda p: with_header(p, [], count=-5), "has bytes too many: -5"),
    "no tokens": (lambda p: with_header(p, []), "holds no tokens"),
    "version": (lambda p: with_header(p, GOOD, version=2), "header version 2; gnomon reads version 1"),
    "other magic": (lambda p: with_header(p, GOOD, magic=20240522), "magic 20240522.*20240520 or 20240801"),
    "header only in part": (
        lambda p: p.write_bytes(with_header(p, GOOD).read_bytes()[:600]),
        "inside its 1024-byte",
    ),
    "odd size": (lambda p: p.write_bytes(b"x" * 1001), "1,001 bytes, which is no whole number of uint16"),
    "empty": (lambda p: p.write_bytes(b""), "is empty"),
    "lfs": (
        lambda p: p.write_text("version https://git-lfs.example/spec/v1\noid sha256:00\nsize 12\n"),
        "Git LFS pointer.*git lfs pull",
    ),
    "gzip": (lambda p: p.write_bytes(b"\x1f\x8b" + b"0" * 100), "gzip-compressed"),
    "parquet": (lambda p: p.write_bytes(b"PAR1" + b"0" * 100), "parquet.*gnomon data"),
    "npy": (lambda p: p.write_bytes(b"\x93NUMPY" + b"0" * 100), "tofile"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_bad_file_is_refused_with_name_fact_and_fix(tmp_path, name):
    make, message = TRAPS[name]
    path = tmp_path / "bad.bin"
    make(path)
    with pytest.raises(UserError, match=message) as caught:
        open_tokens(path)
    assert str(path) in str(caught.value)


def test_pipes_are_refused_and_nothing_waits(tmp_path):
    os.mkfifo(tmp_path / "a.bin")
    os.mkfifo(tmp_path / "a.txt")
    os.mkfifo(tmp_path / "tokenizer.json")
    for opens in (open_tokens, open_train_val):
        for source in ("a.bin", "a.txt"):
            with pytest.raises(UserError, match=f"{source} is a pipe, not a file"):
                opens(tmp_path / source)
    with pytest.raises(UserError, match="tokenizer.json is a pipe, not a file"):
        tokenizer(tmp_path)
    (tmp_path / "a.bin").unlink()
    path = write(tmp_path / "a.bin", GOOD)
    (tmp_path / "a.bin.json").unlink()
    os.mkfifo(tmp_path / "a.bin.json")
    with pytest.raises(UserError, match="a.bin.json is a pipe"):
        open_tokens(path)


def test_a_text_is_not_taken_for_tokens(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "even"}')
    with pytest.raises(UserError, match="no token file.*gnomon data"):
        open_tokens(tmp_path / "corpus.jsonl")


def test_a_damaged_file_is_noticed(tmp_path):
    path = write(tmp_path / "a.bin", GOOD)
    raw = bytearray(path.read_bytes())
    raw[1030] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match="changed or damaged"):
        open_tokens(path)


def test_a_sidecar_of_another_file_is_noticed(tmp_path):
    path = write(tmp_path / "a.bin", GOOD)
    with_header(path, GOOD[:50])
    with pytest.raises(UserError, match=r"holds 50 tokens, but a\.bin\.json says 100.*Delete the \.json"):
        open_tokens(path)
    (tmp_path / "a.bin.json").write_text("{")
    with pytest.raises(UserError, match=r"a\.bin\.json is damaged"):
        open_tokens(path)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    path = with_header(tmp_path / "a.bin", [1, 2, 257])
    with pytest.raises(UserError, match=r"a\.bin holds the token id 257.*only 257 ids"):
        open_tokens(path, tokenizer="byte")
    assert len(open_tokens(path)) == 3  # nothing is known of its vocabulary
    tokens = Tokens(np.array([0, 257, 1], np.uint16), "by hand", vocab_size=257)
    assert tokens.windows(np.array([2]), 1).tolist() == [[1]]
    with pytest.raises(UserError, match="by hand holds the token id 257"):
        tokens.windows(np.array([0]), 2)


def test_another_tokenizer_than_asked_for_is_refused(tmp_path):
    path = write(tmp_path / "a.bin", GOOD)
    with pytest.raises(UserError, match="made with tokenizer 'byte' .257 ids., not 'gpt2'"):
        open_tokens(path, tokenizer="gpt2")
    small = train_bpe([jargon()[:9000]], 300)
    other = train_bpe([jargon()[9000:18000]], 300)
    write(path, GOOD, small)
    with pytest.raises(UserError, match="made with tokenizer"):
        open_tokens(path, tokenizer=other)  # as many ids, other meanings
    assert len(open_tokens(path, tokenizer=small)) == 100


def test_missing_files_are_explained(tmp_path):
    write(tmp_path / "train.bin", GOOD)
    with pytest.raises(UserError, match=r"no file or folder .*Did you mean 'train\.bin'"):
        open_tokens(tmp_path / "trian.bin")
    with pytest.raises(UserError, match="Did you mean 'jargon'"):
        open_tokens("jargonn")
    with pytest.raises(UserError, match="no file matches"):
        open_tokens(str(tmp_path / "*.xyz"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no token files.*gnomon data"):
        open_tokens(tmp_path / "empty")


def test_texts_are_tokenised_in_memory(tmp_path):
    assert len(open_tokens("jargon", tokenizer="byte")) == 1_448_700
    assert len(open_tokens("jargon", tokenizer="gpt2")) == 355_986
    (tmp_path / "a.txt").write_text("né", encoding="utf-8")
    assert open_tokens(tmp_path / "a.txt")[:].tolist() == [110, 195, 169]
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 noir")
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8: the byte 0xe9 at offset 3"):
        open_tokens(tmp_path / "b.txt")
    (tmp_path / "c.txt").write_bytes("hello".encode("utf-16"))
    with pytest.raises(UserError, match="UTF-16"):
        open_tokens(tmp_path / "c.txt")
    (tmp_path / "d.txt.gz").write_bytes(b"hello")
    with pytest.raises(UserError, match="d.txt.gz is a damaged gzip file"):
        open_tokens(tmp_path / "d.txt.gz")


def test_a_folder_gives_its_training_shards_and_its_validation(tmp_path):
    write(tmp_path / "val_000000.bin", [1, 2, 3])
    write(tmp_path / "train_000001.bin", [4, 5, 6, 7])
    write(tmp_path / "train_000002.bin", [8, 9])
    assert open_tokens(tmp_path)[:].tolist() == [4, 5, 6, 7, 8, 9]
    assert open_tokens(str(tmp_path / "*_00000[12].bin"))[:].tolist() == [4, 5, 6, 7, 8, 9]
    assert open_tokens([tmp_path / "val_000000.bin", tmp_path / "train_000002.bin"])[:].tolist() == [
        1,
        2,
        3,
        8,
        9,
    ]
    train, val = open_train_val(tmp_path)
    assert train[:].tolist() == [4, 5, 6, 7, 8, 9] and val[:].tolist() == [1, 2, 3]
    train, val = open_train_val(tmp_path / "train_000001.bin", fraction=0.25)
    assert train[:].tolist() == [4, 5, 6] and val[:].tolist() == [7]
    write(tmp_path / "train_000003.bin", [1], train_bpe(["text"], 257))
    with pytest.raises(UserError, match="cannot be read as one"):
        open_tokens(tmp_path)


@given(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=6), min_size=1, max_size=5), st.data())
@settings(max_examples=50)
def test_several_files_read_like_one_array(parts, data):
    joined = Joined([np.array(part, np.uint16) for part in parts])
    whole = np.concatenate(joined.arrays)
    assert len(joined) == len(whole) and np.array_equal(np.asarray(joined), whole)
    bound = st.none() | st.integers(-len(whole) - 2, len(whole) + 2)
    start, stop = data.draw(bound), data.draw(bound)
    assert np.array_equal(joined[start:stop], whole[start:stop])
    index = data.draw(st.integers(-len(whole), len(whole) - 1))
    assert joined[index] == whole[index]
    tokens = Tokens(joined, "joined")
    cut = data.draw(st.integers(0, len(whole)))
    assert np.array_equal([*tokens.part(0, cut)[:], *tokens.part(cut, len(whole))[:]], whole)


def test_reading_within_one_file_copies_nothing():
    arrays = [np.arange(10), np.arange(10, 30)]
    joined = Joined(arrays)
    assert np.shares_memory(joined[2:10], arrays[0]) and np.shares_memory(joined[10:30], arrays[1])
    assert joined[8:12].tolist() == [8, 9, 10, 11]
    assert np.shares_memory(Tokens(joined, "two").part(5, 20).array.arrays[1], arrays[1])
    with pytest.raises(IndexError, match="step 1"):
        joined[::2]


def test_the_validation_part_is_the_tail():
    tokens = Tokens(np.arange(100), "numbers")
    train, val = split(tokens, 0.1)
    assert train[:].tolist() == list(range(90)) and val[:].tolist() == list(range(90, 100))
    for fraction in (0, 1, -0.5, float("nan")):
        with pytest.raises(UserError, match="between 0 and 1"):
            split(tokens, fraction)
    with pytest.raises(UserError, match="too few"):
        split(tokens, 0.001)


def test_a_writer_that_fails_leaves_no_trace(tmp_path):
    path = write(tmp_path / "a.bin", GOOD)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(UserError, match="token id 257 is not one of tokenizer..byte"):
        with TokenWriter(path, BYTE) as writer:
            writer.append([1, 2])
            writer.append([257])
    with pytest.raises(UserError, match="nothing was written"):
        TokenWriter(path, BYTE).close()
    with pytest.raises(KeyboardInterrupt):
        with TokenWriter(path, BYTE) as writer:
            writer.append([1, 2])
            raise KeyboardInterrupt
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("when", ["append", "close"])
def test_a_full_disk_leaves_earlier_files_alone(tmp_path, monkeypatch, when):
    path = write(tmp_path / "a.bin", GOOD)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    class FullDisk(io.FileIO):
        full = False

        def write(self, data):
            if FullDisk.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    real = open
    monkeypatch.setattr(
        "builtins.open",
        lambda file, mode="r", **k: io.BufferedWriter(FullDisk(file, "w")) if mode == "wb" else real(file, mode, **k),
    )
    writer = TokenWriter(path, BYTE)
    writer.append(np.zeros(100, np.uint16))
    FullDisk.full = True
    with pytest.raises(UserError, match=r"cannot write .*a\.bin.*No space left.*untouched.*Free some space"):
        if when == "append":
            writer.append(np.zeros(100_000, np.uint16))
        writer.close()
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert len(open_tokens(path)) == 100


def test_a_real_limit_of_the_file_system_is_explained(tmp_path):
    """The kernel itself refuses the write here (RLIMIT_FSIZE), in a process of its own."""
    code = f"""
import numpy as np
from gnomon.data import TokenWriter, tokenizer
from gnomon.errors import UserError
writer = TokenWriter({str(tmp_path / "a.bin")!r}, tokenizer("byte"))
try:
    for _ in range(100):
        writer.append(np.zeros(10_000, np.uint16))
    writer.close()
except UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000)),
    )
    assert "cannot write" in done.stdout and "a.bin" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_importing_the_package_is_cheap():
    heavy = {"torch", "datasets", "tokenizers", "pyarrow"}
    code = f"import sys, gnomon.data; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
