"""`prepare`: every kind of source, exact shards, resuming to the byte, and errors that name the place."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnomon import cli
from gnomon.data import open_tokens, open_train_val, prepare, tokenizer, train_bpe
from gnomon.data import tokenwriter as writing
from gnomon.data.local_source import LocalFiles, find
from gnomon.data.wikitext import split_articles
from gnomon.errors import UserError

BYTE = tokenizer("byte")
DOCUMENTS = [f"Document {i}: " + "word " * (i % 7) + "é€" for i in range(40)]


def expected(documents, opened=BYTE) -> list[int]:
    """Straight from the definition: end of text before each document."""
    return [id for text in documents for id in [opened.end_of_text, *opened.encode(text).tolist()]]


def jsonl(path: Path, documents=DOCUMENTS, field="text") -> Path:
    lines = "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(documents))
    data = lines.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def parquet(path: Path, documents=DOCUMENTS, **columns) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    write_table = pytest.importorskip("pyarrow.parquet").write_table
    write_table(pyarrow.table({"text": documents, **columns}), path, row_group_size=7)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def txt(path: Path, documents=DOCUMENTS) -> Path:
    data = "\n<|endoftext|>\n".join(documents).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("make", [jsonl, parquet, txt])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_every_kind_of_file_gives_the_same_tokens(tmp_path, make, suffix):
    source = make(tmp_path / f"a.{make.__name__}{suffix}")
    paths = prepare(source, tmp_path / "out", tokenizer="byte", val_fraction=0.1, shard_tokens=300)
    held_out = DOCUMENTS[9::10]
    kept = [text for i, text in enumerate(DOCUMENTS) if i % 10 != 9]
    train, val = open_train_val(tmp_path / "out")
    assert train[:].tolist() == expected(kept) and val[:].tolist() == expected(held_out)
    assert (train.tokenizer, train.vocab_size) == ("byte", 257)
    names = [path.name for path in paths]
    assert names == ["val_000000.bin"] + [f"train_{i:06d}.bin" for i in range(1, len(names))]
    assert [len(open_tokens(path)) for path in paths[1:-1]] == [300] * (len(paths) - 2)
    assert sum(json.loads((tmp_path / "out" / f"{name}.json").read_text())["documents"] for name in names) == 40


def test_several_sources_are_one_stream(tmp_path):
    jsonl(tmp_path / "b.jsonl", DOCUMENTS[:20])
    (tmp_path / "sub").mkdir()
    txt(tmp_path / "sub" / "c.txt.gz", DOCUMENTS[20:])
    (tmp_path / "notes.md").write_text("not read")
    for i, source in enumerate([tmp_path, str(tmp_path / "**/*"), [tmp_path / "b.jsonl", tmp_path / "sub"]]):
        out = tmp_path.parent / f"{tmp_path.name}-out{i}"
        prepare(source, out, tokenizer="byte", val_fraction=0)
        assert open_tokens(out)[:].tolist() == expected(DOCUMENTS)
        assert not list(out.glob("val*"))


def test_the_progress_runs_through_all_files(tmp_path):
    for number in range(3):
        jsonl(tmp_path / f"{number}.jsonl", DOCUMENTS * (1 + 100 * number))
    source = LocalFiles(find(tmp_path)[0], "text", 0)
    positions = [piece.position for piece in source.pieces("train")]
    assert positions == sorted(positions) and positions[-1] == source.total("train")
    assert len(set(positions)) > 100


def test_a_text_file_is_kept_to_the_byte_and_long_ones_are_cut_safely(tmp_path, capsys):
    text = "\ufeff" + "A line of words, it's long. " * 20_000 + "\r\n  end \n\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    prepare(tmp_path / "a.txt", tmp_path / "out")
    gpt2 = tokenizer("gpt2")
    assert open_tokens(tmp_path / "out")[:].tolist() == [gpt2.end_of_text, *gpt2.encode(text[1:]).tolist()]
    said = capsys.readouterr().err
    assert "about 130k tokens" in said and "no validation shard" in said
    train, val = open_train_val(tmp_path / "out", fraction=0.1)
    assert len(val) == round(0.1 * (len(train) + len(val)))


def test_only_a_line_of_its_own_separates_documents(tmp_path, capsys):
    """One line break on either side belongs to the separator; every other character is kept."""
    (tmp_path / "a.txt").write_bytes(
        b"<|endoftext|>\nA mark <|endoftext|> inside.\n\n<|endoftext|>\r\n\n  second\n\n\n<|endoftext|>\n"
        b"<|endoftext|>\nlast\n<|endoftext|> not alone\n <|endoftext|>\r\n<|endoftext|>\n"
    )
    prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer="byte", val_fraction=0)
    documents = ["A mark <|endoftext|> inside.\n", "\n  second\n\n", "last\n<|endoftext|> not alone\n <|endoftext|>"]
    assert open_tokens(tmp_path / "out")[:].tolist() == expected(documents)
    assert "left out: 1 empty documents\n" in capsys.readouterr().err
    long = "word " * 60_000 + "\n"
    (tmp_path / "b.txt").write_text(f"{long}\n<|endoftext|>\n{long}")
    prepare(tmp_path / "b.txt", tmp_path / "long", tokenizer="byte", val_fraction=0)
    assert open_tokens(tmp_path / "long")[:].tolist() == expected([long, long])
    assert "left out" not in capsys.readouterr().err


BAD_ROWS = [b'{"text": null}', b'{"body": "x"}', b"oops", b'{"text": "caf\xe9"}', b'{"text": 7}', b'["text"]']


def test_bad_rows_are_left_out_and_counted_if_asked(tmp_path, capsys):
    good = jsonl(tmp_path / "a.jsonl").read_bytes().splitlines()
    rows = [*BAD_ROWS[:3], *good[:20], b'{"text": ""}', *BAD_ROWS[3:], *good[20:]]
    source = tmp_path / "b.jsonl"
    source.write_bytes(b"\n".join(rows) + b"\n")
    with pytest.raises(UserError, match="line 1: the field 'text' holds None, not a text.*--skip-bad leaves such rows out"):
        prepare(source, tmp_path / "out", tokenizer="byte")
    shutil.rmtree(tmp_path / "out")
    kwargs = dict(tokenizer="byte", val_fraction=0.1, shard_tokens=300)
    prepare(source, tmp_path / "out", skip_bad=True, **kwargs)
    assert f"left out: 1 empty documents; 6 bad rows (the first: {source}, line 1: the field" in capsys.readouterr().err
    prepare(tmp_path / "a.jsonl", tmp_path / "good", **kwargs)
    for name in ("val_000000.bin", "train_000001.bin", "train_000002.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "good" / name).read_bytes()
    with pytest.raises(UserError, match="skip_bad was True and is now None"):
        prepare(source, tmp_path / "out", **kwargs)
    source.write_bytes(b"\n".join(BAD_ROWS))
    with pytest.raises(UserError, match="holds no text.*6 bad rows .the first.*holds None"):
        prepare(source, tmp_path / "none", skip_bad=True, tokenizer="byte")
    parquet(tmp_path / "a.parquet", ["x", None, "y"])
    prepare(tmp_path / "a.parquet", tmp_path / "p", tokenizer="byte", val_fraction=0, skip_bad=True)
    assert open_tokens(tmp_path / "p")[:].tolist() == expected(["x", "y"])


def test_files_of_other_kinds_are_counted(tmp_path, capsys):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name in ("a.txt", "b.md", "sub/c.md", "sub/d.csv", "sub/README", ".hidden"):
        (tmp_path / "in" / name).write_text("text")
    os.mkfifo(tmp_path / "in" / "pipe.txt")
    (tmp_path / "in" / "gone.txt").symlink_to("nowhere")
    (tmp_path / "in" / "empty.txt").touch()
    for number, source in enumerate([tmp_path / "in", str(tmp_path / "in/**/*"), [tmp_path / "in"]]):
        prepare(source, tmp_path / f"out{number}", tokenizer="byte", val_fraction=0)
        said = capsys.readouterr().err
        assert "left out: 7 files of other kinds (2 .md, 2 pipe or broken link, 1 empty, 1 README, 1 .csv)" in said
        assert open_tokens(tmp_path / f"out{number}")[:].tolist() == expected(["text"])
    (tmp_path / "in" / "a.txt").unlink()
    with pytest.raises(UserError, match=r"holds no \.txt.*There: 2 \.md"):
        prepare(tmp_path / "in", tmp_path / "none", tokenizer="byte")
    with pytest.raises(UserError, match="pipe.txt is a pipe, not a file"):
        prepare(tmp_path / "in" / "pipe.txt", tmp_path / "none", tokenizer="byte")
    for nothing in ([], ""):
        with pytest.raises(UserError, match="empty name or list"):
            prepare(nothing, tmp_path / "none", tokenizer="byte")


@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_the_bytes_of_the_text_are_known(tmp_path, name):
    prepare(jsonl(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer=name, val_fraction=0.1, shard_tokens=300)
    train, val = open_train_val(tmp_path / "out")
    held_out = DOCUMENTS[9::10]
    kept = [text for i, text in enumerate(DOCUMENTS) if i % 10 != 9]
    for tokens, documents in ((train, kept), (val, held_out)):
        size = sum(len(text.encode()) for text in documents)
        assert tokens.bytes_per_token * len(tokens) == pytest.approx(size, rel=1e-5)
    assert (train.bytes_per_token < 1) == (name == "byte")  # an end of text is a token and no byte
    (tmp_path / "a.txt").write_text("né 日本 ")
    text = open_tokens(tmp_path / "a.txt", tokenizer=name)
    assert text.bytes_per_token * len(text) == pytest.approx(11)
    mixed = open_tokens(f"0.25*{tmp_path}/out+0.75*{tmp_path}/a.txt", tokenizer=name)
    assert mixed.bytes_per_token == pytest.approx(0.25 * train.bytes_per_token + 0.75 * text.bytes_per_token)
    (tmp_path / "out" / "train_000001.bin.json").unlink()
    assert open_tokens(tmp_path / "out" / "train_000001.bin").bytes_per_token is None


def test_a_folder_stands_alone_whatever_ends_its_texts(tmp_path):
    """The end-of-text token that `tokenizer_config.json` names goes along, and a name that is taken misleads nobody."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"</s>": 0, "a": 1, "b": 2, "<stop>": 3, "[UNK]": 4}
    (tmp_path / "mine").mkdir()
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "mine" / "tokenizer.json"))
    (tmp_path / "mine" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    (tmp_path / "a.txt").write_text("a b c")
    prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path / "mine"), val_fraction=0)
    prepare(tmp_path / "a.txt", tmp_path / "named", tokenizer=train_bpe(DOCUMENTS, 300, name="gpt2"), val_fraction=0)
    shutil.rmtree(tmp_path / "mine")
    tokens = open_tokens(tmp_path / "out")
    assert tokens[:].tolist() == [3, 1, 2, 4] and tokens.open_tokenizer().end_of_text == 3
    assert tokens.vocabulary == tokens.open_tokenizer().fingerprint and tokens.vocab_size == 5
    named = open_tokens(tmp_path / "named")
    assert named.open_tokenizer().vocab_size == named.vocab_size <= 300
    train_bpe(["other words"], 280).save(tmp_path / "named")
    with pytest.raises(UserError, match="made with another tokenizer than .*tokenizer.json' is now"):
        open_tokens(tmp_path / "named").open_tokenizer()


def test_training_and_validation_are_of_one_tokenizer(tmp_path):
    source = jsonl(tmp_path / "a.jsonl")
    own = train_bpe(DOCUMENTS, 300)
    own.save(tmp_path / "mine")
    for number, name in enumerate(["byte", tmp_path / "mine", own]):
        prepare(source, tmp_path / f"out{number}", tokenizer=name, val_fraction=0)
    with pytest.raises(UserError, match="made with tokenizer 'byte', the validation tokens .*out1 with .*tokenizer.json"):
        open_train_val(tmp_path / "out0", tmp_path / "out1")
    train, val = open_train_val(tmp_path / "out1", tmp_path / "out2")
    assert train[:].tolist() == val[:].tolist() and train.tokenizer != val.tokenizer
    assert len(open_tokens(f"0.5*{tmp_path}/out1 + 0.5*{tmp_path}/out2")) == 2 * len(train)  # one vocabulary, two files


def test_places_that_cannot_be_written_are_one_message(tmp_path, capsys):
    source = jsonl(tmp_path / "a.jsonl")
    command = ["data", str(source), "--tokenizer", "byte"]
    for out, message in ((source, f"{source}: File exists."), (source / "out", f"{source}/out: Not a directory.")):
        assert cli.main([*command, str(out)]) == 2
        assert capsys.readouterr().err.startswith(f"gnomon: {message}")
    done = subprocess.run(
        [sys.executable, "-m", "gnomon", *command, str(tmp_path / "out")],
        capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"gnomon: {tmp_path}/out/prepare.json: File too large. The system limits" in done.stderr


def test_a_tokenizer_of_ones_own_travels_with_the_shards(tmp_path):
    own = train_bpe(DOCUMENTS, 300)
    own.save(tmp_path / "mine.json")
    prepare(txt(tmp_path / "a.txt"), tmp_path / "out", tokenizer=str(tmp_path / "mine.json"), val_fraction=0)
    (tmp_path / "mine.json").unlink()
    (tmp_path / "out").rename(tmp_path / "moved")
    tokens = open_tokens(tmp_path / "moved")
    assert tokens[:].tolist() == expected(DOCUMENTS, own)
    assert tokenizer(tokens.tokenizer).fingerprint == own.fingerprint


def test_a_limit_counts_all_tokens(tmp_path):
    source = jsonl(tmp_path / "a.jsonl")
    prepare(source, tmp_path / "out", tokenizer="byte", val_fraction=0.1, limit=500, shard_tokens=200)
    train, val = open_train_val(tmp_path / "out")
    assert (len(train), len(val)) == (450, 50)
    kept = [text for i, text in enumerate(DOCUMENTS) if i % 10 != 9]
    assert train[:].tolist() == expected(kept)[:450] and val[:].tolist() == expected(DOCUMENTS[9::10])[:50]


class Killed(BaseException):
    pass


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.sampled_from([97, 300, 10_000]), st.booleans())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_interrupted_jobs_end_like_an_uninterrupted_one(tmp_path_factory, kills, shard_tokens, limited):
    folder = tmp_path_factory.mktemp("resume")
    source = jsonl(folder / "a.jsonl.gz")
    kwargs = dict(tokenizer="byte", val_fraction=0.1, shard_tokens=shard_tokens, limit=777 if limited else None)
    wanted = [path.name for path in prepare(source, folder / "whole", **kwargs)]
    real = writing.TokenWriter.append
    for after in kills:
        calls = itertools.count(1)

        def append(self, *arguments, calls=calls, after=after):
            if next(calls) > after:
                raise Killed
            real(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing.TokenWriter, "append", append)
            try:
                prepare(source, folder / "parts", **kwargs)
            except Killed:
                assert not [name for name in os.listdir(folder / "parts") if "partial" in name]
    assert [path.name for path in prepare(source, folder / "parts", **kwargs)] == wanted
    assert contents(folder / "parts") == contents(folder / "whole")


def test_a_killed_process_is_continued(tmp_path):
    """kill -9 in the middle, twice: nothing is tidied up, and the files still come out the same."""
    documents = [f"{i} " + "some words to count " * 400 for i in range(500)]
    source = jsonl(tmp_path / "a.jsonl", documents)
    code = (
        "import sys, gnomon.data.conversion as job; job._BATCH = 1 << 14; from gnomon.data import prepare;"
        f"prepare({str(source)!r}, sys.argv[1], tokenizer='byte', shard_tokens=250_000)"
    )
    out = tmp_path / "out"
    for shards in (2, 7):
        process = subprocess.Popen([sys.executable, "-c", code, str(out)], stderr=subprocess.DEVNULL)
        while len(list(out.glob("*.bin"))) < shards and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    prepare(source, out, tokenizer="byte", shard_tokens=250_000)
    prepare(source, tmp_path / "whole", tokenizer="byte", shard_tokens=250_000)
    assert contents(out) == contents(tmp_path / "whole")
    assert 2 <= len(finished) < len(list(out.glob("*.bin")))
    known = list(finished)[:2]  # the last may have been finished without being noted; it is made again
    assert [(out / name).stat().st_mtime_ns for name in known] == [finished[name] for name in known]


def test_finished_work_is_not_done_again(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl")
    paths = prepare(source, tmp_path / "out", tokenizer="byte")
    monkeypatch.setattr(writing.TokenWriter, "__init__", lambda *a, **k: pytest.fail("written again"))
    assert prepare(source, tmp_path / "out", tokenizer="byte") == paths


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(shard_tokens=50), "shard_tokens was 100 and is now 50"),
        (dict(tokenizer="gpt2"), "tokenizer was .'byte', 'byte'. and is now .'gpt2'"),
        (dict(val_fraction=0.2), "val_fraction was 0.1 and is now 0.2"),
        (dict(limit=9), "limit was None and is now 9"),
    ],
)
def test_other_settings_are_refused_naming_the_difference(tmp_path, change, message):
    kwargs = dict(tokenizer="byte", val_fraction=0.1, shard_tokens=100)
    prepare(jsonl(tmp_path / "a.jsonl"), tmp_path / "out", **kwargs)
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match=f"other settings: {message}"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", **(kwargs | change))
    jsonl(tmp_path / "a.jsonl", [text.upper() for text in DOCUMENTS])  # of the same length
    with pytest.raises(UserError, match="other settings: source was"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", **kwargs)
    assert contents(tmp_path / "out") == before


def test_a_folder_with_other_files_or_lost_shards_is_refused(tmp_path):
    source = jsonl(tmp_path / "a.jsonl")
    paths = prepare(source, tmp_path / "out", tokenizer="byte", shard_tokens=100)
    paths[1].unlink()
    with pytest.raises(UserError, match=r"train_000002\.bin is gone"):
        prepare(source, tmp_path / "out", tokenizer="byte", shard_tokens=100)
    (tmp_path / "out" / "prepare.json").write_text("{")
    with pytest.raises(UserError, match=r"prepare\.json is damaged"):
        prepare(source, tmp_path / "out", tokenizer="byte", shard_tokens=100)
    (tmp_path / "out" / "prepare.json").unlink()
    with pytest.raises(UserError, match="is there already.*Choose a new folder"):
        prepare(source, tmp_path / "out", tokenizer="byte", shard_tokens=100)


BAD = {
    "not JSON": ("a.jsonl", b'{"text": "good"}\n\n{"text": bad}\n', r"a\.jsonl, line 3: not JSON"),
    "cut off": ("a.jsonl", b'{"text": "good"}\n{"text": "go', r"a\.jsonl, line 2: not JSON"),
    "no object": ("a.jsonl", b'["text"]\n', "line 1: a JSON list, not an object with a field 'text'"),
    "no field": (
        "a.jsonl",
        b'{"body": "x", "url": "y"}\n',
        "no field 'text'. Its fields: body, url. Name one with --field",
    ),
    "no text": ("a.jsonl", b'{"text": null}\n', "line 1: the field 'text' holds None, not a text"),
    "jsonl in latin-1": (
        "a.jsonl",
        b'{"text": "good"}\n{"text": "caf\xe9"}\n',
        "line 2: .*0xe9 at offset 30",
    ),
    "txt in latin-1": ("a.txt", b"line one\n" * 9 + b"caf\xe9\n", "not UTF-8: the byte 0xe9 at offset 84"),
    "cut off gzip": ("a.txt.gz", gzip.compress(b"text " * 9999)[:-9], "damaged gzip"),
    "no gzip": ("a.jsonl.gz", b'{"text": "good"}\n', "damaged gzip"),
    "no parquet": ("a.parquet", b"PAR1 but no more", "not a whole parquet file"),
    "empty": ("a.txt", b"", r"a\.txt is empty"),
    "nothing but blanks": ("a.jsonl", b"\n\n", "holds no text"),
    "another kind": ("a.docx", b"x", r"gnomon reads \.txt, \.jsonl, \.parquet"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_source_is_named_with_the_place(tmp_path, name):
    file, data, message = BAD[name]
    (tmp_path / file).write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        prepare(tmp_path / file, tmp_path / "out", tokenizer="byte")
    assert file in str(caught.value)
    assert not list((tmp_path / "out").glob("*.bin*"))


def test_a_bad_line_does_not_lose_the_shards_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr("gnomon.data.conversion._BATCH", 100)
    source = jsonl(tmp_path / "a.jsonl")
    source.write_bytes(source.read_bytes() + b"oops\n")
    with pytest.raises(UserError, match=r"a\.jsonl, line 41: not JSON.*'oops"):
        prepare(source, tmp_path / "out", tokenizer="byte", shard_tokens=100, val_fraction=0)
    tokens = open_tokens(tmp_path / "out")
    assert len(tokens) > 500 and tokens[:].tolist() == expected(DOCUMENTS)[: len(tokens)]


def test_a_bad_line_is_found_before_the_work_begins_and_can_be_mended(tmp_path):
    source = jsonl(tmp_path / "a.jsonl")
    good = source.read_bytes()
    source.write_bytes(good + b"oops\n")
    with pytest.raises(UserError, match="line 41"):  # while the validation documents are picked out
        prepare(source, tmp_path / "out", tokenizer="byte", shard_tokens=100)
    source.write_bytes(good)
    prepare(source, tmp_path / "out", tokenizer="byte", shard_tokens=100, val_fraction=0)
    assert open_tokens(tmp_path / "out")[:].tolist() == expected(DOCUMENTS)


def test_fields_of_parquet_are_checked(tmp_path):
    parquet(tmp_path / "a.parquet", ["x", None], number=[1, 2])
    for field, message in (
        ("body", "no field 'body'. Its fields: text, number"),
        ("number", "row 1: the field 'number' holds 1, not a text"),
        ("text", "row 2: the field 'text' holds None"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(tmp_path / "a.parquet", tmp_path / f"out-{field}", tokenizer="byte", field=field)
    parquet(tmp_path / "b.parquet", DOCUMENTS, body=DOCUMENTS[::-1])
    prepare(tmp_path / "b.parquet", tmp_path / "out", tokenizer="byte", field="body", val_fraction=0)
    assert open_tokens(tmp_path / "out")[:].tolist() == expected(DOCUMENTS[::-1])


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud83d b \\ud83d\\ude00"}\n')
    prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", val_fraction=0)
    assert open_tokens(tmp_path / "out")[:].tolist() == expected(["a\ufffd b 😀"])


def test_wrong_arguments_are_explained(tmp_path):
    with pytest.raises(UserError, match="openwebtxt: no such file.*openwebtext, fineweb-edu, wikitext-103"):
        prepare("openwebtxt", tmp_path / "out")
    for change in (dict(val_fraction=0.9), dict(shard_tokens=0), dict(limit=0)):
        with pytest.raises(UserError, match=next(iter(change))):
            prepare(jsonl(tmp_path / "a.jsonl"), tmp_path / "out", **change)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`datasets` reading a local file of the hub's format, by the same call."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    real, files, asked = datasets.load_dataset, {}, []

    def load(path, name=None, *, split, streaming):
        asked.append((path, name, split))
        return real("parquet", data_files=str(files[split]), split="train", streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return files, asked


@pytest.mark.parametrize(
    "name, path", [("openwebtext", "Skylion007/openwebtext"), ("fineweb-edu", "HuggingFaceFW/fineweb-edu")]
)
def test_sets_of_the_hub_are_streamed(tmp_path, hub, name, path):
    files, asked = hub
    files["train"] = parquet(tmp_path / "t.parquet")
    prepare(name, tmp_path / "out", tokenizer="byte", limit=600)
    assert asked[0][0] == path and asked[0][2] == "train"
    train, val = open_train_val(tmp_path / "out")
    assert val[:].tolist() == expected(DOCUMENTS[:1])[:6]  # with so small a limit, one document is held out
    assert train[:].tolist() == expected(DOCUMENTS[1:])[:594]
    assert json.loads((tmp_path / "out" / "train_000001.bin.json").read_text())["source"] == name


def test_wikitext_has_articles_and_a_validation_of_its_own(tmp_path, hub):
    files, asked = hub
    one = [
        "",
        " = One = \n",
        "",
        " Text of one . \n",
        "",
        " = = Section = = \n",
        "",
        " More . \n",
        " = a formula = \n",
        "",
    ]
    two = [" = Two ( song ) = \n", "", " Text of two . \n", ""]
    files["train"] = parquet(tmp_path / "t.parquet", one + two)
    files["validation"] = parquet(tmp_path / "v.parquet", two)
    prepare("wikitext-103", tmp_path / "out", tokenizer="byte")
    train, val = open_train_val(tmp_path / "out")
    assert train[:].tolist() == expected(["".join(one), "".join(two)])
    assert val[:].tolist() == expected(["".join(two)])
    assert asked == [("Salesforce/wikitext", "wikitext-103-raw-v1", split) for split in ("validation", "train")]


def test_the_articles_of_wikitext_are_found():
    folder = Path(__file__).parents[3] / "shared" / "data" / "wikitext2"
    if not folder.exists():
        pytest.skip("the development data is not there")
    for name in ("valid", "test"):
        with open(folder / f"{name}.txt", encoding="utf-8") as lines:
            assert len(list(split_articles(lines, after_blank=True))) == 60  # as its authors say (arXiv 1609.07843, table 1)


def test_a_failing_network_says_what_to_do(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def rows():
        yield from ({"text": text} for text in DOCUMENTS)
        raise ConnectionError("the line is down")

    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: rows())
    monkeypatch.setattr("gnomon.data.conversion._BATCH", 100)
    kwargs = dict(tokenizer="byte", val_fraction=0, shard_tokens=100)
    with pytest.raises(UserError, match="the line is down.*Finished shards are kept: run the same command again"):
        prepare("openwebtext", tmp_path / "out", **kwargs)
    assert len(open_tokens(tmp_path / "out")) >= 500
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: ({"text": text} for text in DOCUMENTS))
    prepare("openwebtext", tmp_path / "out", **kwargs)
    assert open_tokens(tmp_path / "out")[:].tolist() == expected(DOCUMENTS)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: iter([{"content": "x", "id": 1}]))
    with pytest.raises(UserError, match="row 1: there is no field 'text'. Its fields: content, id"):
        prepare("openwebtext", tmp_path / "other", **kwargs)


def test_a_worker_s_tokenizer_still_reads_marks_as_text():
    own = pickle.loads(pickle.dumps(train_bpe(DOCUMENTS, 300)))
    assert own.end_of_text not in own.encode("<|endoftext|>").tolist()
    assert own.name == "bpe" and own.vocab_size == train_bpe(DOCUMENTS, 300).vocab_size


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
def test_workers_change_nothing_even_when_a_job_is_killed_and_goes_on_with_others(tmp_path):
    """kill -9 of a job with three workers, which must not outlive it; then one goes on alone."""
    source = jsonl(tmp_path / "a.jsonl", [f"{i} " + "some words to count " * 400 for i in range(500)])
    code = (
        "import sys, gnomon.data.conversion as job; job._BATCH = 1 << 14; from gnomon.data import prepare;"
        f"prepare({str(source)!r}, sys.argv[1], tokenizer='byte', shard_tokens=250_000, workers=3)"
    )
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", code, str(out)], stderr=subprocess.DEVNULL)
    while len(list(out.glob("*.bin"))) < 3 and process.poll() is None:
        time.sleep(0.002)
    workers = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 2 <= len(list(out.glob("*.bin"))) < 16 and workers
    prepare(source, out, tokenizer="byte", shard_tokens=250_000)
    prepare(source, tmp_path / "whole", tokenizer="byte", shard_tokens=250_000)
    assert contents(out) == contents(tmp_path / "whole")
    deadline = time.monotonic() + 20
    while any(map(_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_alive, workers))


def _children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if f"\nPPid:\t{pid}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_killed_worker_is_told_and_loses_nothing(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", DOCUMENTS * 50)
    monkeypatch.setattr("gnomon.data.conversion._BATCH", 1 << 10)
    real = writing.TokenWriter.close
    # Processes that other tests share live on.
    before = set(multiprocessing.active_children())

    def close(self):
        path = real(self)
        for child in set(multiprocessing.active_children()) - before:
            os.kill(child.pid, signal.SIGKILL)
        return path

    with monkeypatch.context() as patch:
        patch.setattr(writing.TokenWriter, "close", close)
        with pytest.raises(UserError, match="fewer --workers"):
            prepare(source, tmp_path / "out", tokenizer="byte", shard_tokens=3000, val_fraction=0, workers=2)
    assert (tmp_path / "out" / "train_000001.bin").exists()
    prepare(source, tmp_path / "out", tokenizer="byte", shard_tokens=3000, val_fraction=0, workers=2)
    assert open_tokens(tmp_path / "out")[:].tolist() == expected(DOCUMENTS * 50)
    with pytest.raises(UserError, match="at least 1, not 0"):
        prepare(source, tmp_path / "x", workers=0)
