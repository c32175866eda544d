"""Reading safetensors: the bytes are right, and every damaged file is named with its fix."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from gnomon.checkpoints import safetensors_files
from gnomon.checkpoints.checkpoint import Buffer
from gnomon.checkpoints.opener import open_checkpoint
from gnomon.errors import UserError

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]


def some(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    make = {"b": (4, 6), "a": (3, 5), "c.weight": (7,), "empty": (0, 3), "scalar": ()}
    return {name: (torch.randn(shape, generator=g) * 10).to(dtype) for name, shape in make.items()}


def opened(path):
    """As stored: nothing is dequantised."""
    return safetensors_files.over(str(path), safetensors_files.read_header(path))


def sharded(folder, parts, index=None):
    """Write `parts` (a list of dicts) as shards with an index; returns the folder."""
    weight_map = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index or weight_map}))
    return folder


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.uint8])
def test_bytes_are_what_safetensors_wrote(tmp_path, dtype):
    tensors = some(dtype)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = opened(tmp_path / "model.safetensors")
    assert set(checkpoint.entries) == set(tensors)
    buffer = Buffer()
    for name, tensor in tensors.items():
        for read in (checkpoint.read(name), checkpoint.read(name, buffer)):
            assert read.dtype == dtype and read.shape == tensor.shape
            assert torch.equal(read.float(), tensor.float())


def test_entries_come_in_file_order_and_count_their_bytes(tmp_path):
    save_file(some(), tmp_path / "model.safetensors")
    entries = list(open_checkpoint(tmp_path).entries.values())
    assert [one.offset for one in entries] == sorted(one.offset for one in entries)
    assert sum(one.nbytes for one in entries) == 4 * (24 + 15 + 7 + 1)


def test_a_buffer_is_reused_and_grows():
    buffer = Buffer()
    first = buffer.take(10)
    assert buffer.take(4).data_ptr() == first.data_ptr()
    assert len(buffer.take(1000)) == 1000


def test_the_index_is_honoured(tmp_path):
    first = {"a": torch.zeros(2), "old": torch.zeros(1)}
    second = {"b": torch.ones(3), "a": torch.full((2,), 9.0)}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    sharded(tmp_path, [first, second], {"a": names[0], "b": names[1]})
    save_file({"a": torch.full((2,), 7.0)}, tmp_path / "model.safetensors")
    save_file({"layers.0": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.entries) == ["a", "b"]
    assert torch.equal(checkpoint.read("a"), torch.zeros(2))
    said = " ".join(checkpoint.notes)
    assert "consolidated.safetensors" in said and "model.safetensors is not in the index" in said
    assert "2 tensors" in said


def test_shards_without_their_index(tmp_path):
    sharded(tmp_path, [{"a": torch.zeros(2)}, {"b": torch.ones(3)}])
    (tmp_path / "model.safetensors.index.json").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.entries) == ["a", "b"] and "no index" in checkpoint.notes[0]
    save_file({"a": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(UserError, match="'a' is in model-00001-of-00002.safetensors and again in"):
        open_checkpoint(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").rename(tmp_path / "model-00003-of-00003.safetensors")
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "model-00001-of-00003.safetensors")
    with pytest.raises(UserError, match="2 of 3 shards; missing: number 2"):
        open_checkpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    sharded(tmp_path, [{"a": torch.zeros(2)}, {"b": torch.ones(3)}])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="not there: model-00002-of-00002.safetensors. Download"):
        open_checkpoint(tmp_path)


def test_a_tensor_the_shard_does_not_hold(tmp_path):
    sharded(tmp_path, [{"a": torch.zeros(2)}], dict.fromkeys("ab", "model-00001-of-00001.safetensors"))
    with pytest.raises(UserError, match="places 'b' in model-00001-of-00001.safetensors, which does not"):
        open_checkpoint(tmp_path)


NO_INDEX = ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100000, "\xff"]


@pytest.mark.parametrize("text", NO_INDEX, ids=range(len(NO_INDEX)))
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="is not an index"):
        open_checkpoint(tmp_path)


def test_an_index_that_points_outside(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(UserError, match="points outside"):
        open_checkpoint(inner)


def damage(path, kind):
    data = path.read_bytes()
    if kind == "truncated":
        data = data[:-100]
    elif kind == "trailing":
        data += b"\0" * 16
    elif kind == "cut header":
        data = data[:20]
    elif kind == "empty":
        data = b""
    elif kind == "pointer":
        data = b"version https://git-lfs.example/spec/v1\noid sha256:0\nsize 3\n"
    elif kind == "huge header":
        data = (1 << 62).to_bytes(8, "little") + data[8:]
    elif kind == "html":
        data = b"<!DOCTYPE html><html>404</html>"
    path.write_bytes(data)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("truncated", r"truncated: 'w' ends at byte 4000 of the data, and there are only 3900"),
        ("trailing", "its tensors end at byte"),
        ("cut header", "is cut off"),
        ("empty", "is empty"),
        ("pointer", "Git LFS pointer"),
        ("huge header", "announces a header of"),
        ("html", "HTML page"),
    ],
)
def test_damaged_files(tmp_path, kind, message):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1000)}, path)
    damage(path, kind)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(path) in str(caught.value)


def test_a_torch_file_under_the_wrong_name(tmp_path):
    torch.save({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="torch zip file. Rename it"):
        open_checkpoint(tmp_path)


def write(path, header, data=b"\0" * 64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


GOOD = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}


@pytest.mark.parametrize(
    "header, message",
    [
        ({"w": {**GOOD, "shape": [4, 5]}}, "'w' says F32"),
        ({"w": {**GOOD, "dtype": "F16"}}, "'w' says F16"),
        ({"w": {**GOOD, "shape": [-4, -4]}}, "'w' has no valid shape"),
        ({"w": {**GOOD, "shape": [4.0, 4]}}, "'w' has no valid shape"),
        ({"w": {**GOOD, "shape": [True, 16]}}, "'w' has no valid shape"),
        ({"w": {**GOOD, "data_offsets": [0]}}, "'w' has no valid data_offsets"),
        ({"w": {**GOOD, "data_offsets": [64, 0]}}, "'w' runs from byte 64 to 0"),
        ({"w": 3}, "'w' is not an object"),
        ({"w": {"shape": [1]}}, "'w' has no dtype"),
        ({"w": GOOD, "x": GOOD}, "'w' and 'x' overlap"),
        ({"w": {**GOOD, "shape": [2, 4], "data_offsets": [32, 64]}}, "leave a hole"),
        (b'{"w": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}, "w": {}}', "lists 'w' twice"),
        (b"[" * 5000, "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"w": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}", "is not JSON"),
    ],
)
def test_damaged_headers_name_the_tensor(tmp_path, header, message):
    with pytest.raises(UserError, match=message):
        opened(write(tmp_path / "x.safetensors", header))


def test_an_unknown_dtype_spoils_only_its_tensor(tmp_path):
    header = {"w": {**GOOD, "dtype": "F5_E9"}, "v": {"dtype": "F32", "shape": [1], "data_offsets": [64, 68]}}
    checkpoint = opened(write(tmp_path / "x.safetensors", header, b"\0" * 68))
    assert checkpoint.read("v").shape == (1,)
    with pytest.raises(UserError, match="'w' is stored as F5_E9"):
        checkpoint.read("w")


def test_a_header_whose_length_looks_like_a_pickle(tmp_path):
    # 0x280 bytes of header begin the file with the first bytes of a pickle.
    text = json.dumps({"w": GOOD}).ljust(0x280)
    assert opened(write(tmp_path / "x.safetensors", text.encode())).entries["w"].shape == (4, 4)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4", "I8", "", "\ud800"]) | JSON,
        "shape": st.lists(st.integers(-2, 6), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-4, 80), max_size=3) | JSON,
    },
)
OFFSETS = st.tuples(st.integers(0, 4), st.integers(0, 16)).map(
    lambda at: {"dtype": "F32", "shape": [at[1] - at[0]], "data_offsets": [4 * at[0], 4 * at[1]]}
)
FUZZ = settings(
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(header=st.dictionaries(st.text(max_size=8), ENTRY | OFFSETS | JSON, max_size=4) | JSON)
def test_any_header_reads_or_says_why_not(tmp_path, header):
    read_or_refuse(write(tmp_path / "x.safetensors", header))


@FUZZ
@given(data=st.data())
def test_any_flipped_bytes_read_or_say_why_not(tmp_path, data):
    path = tmp_path / "x.safetensors"
    raw = bytearray(save(some()))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, min(len(raw) - 1, 400)))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(len(raw) - 40, len(raw)))])
    read_or_refuse(path)


def read_or_refuse(path):
    try:
        checkpoint = opened(path)
    except UserError as error:
        assert len(str(error)) > 20
        return
    for name, entry in checkpoint.entries.items():
        try:
            assert checkpoint.read(name).numel() == math.prod(entry.shape)
        except UserError:
            assert entry.dtype not in ("F32", "BF16", "I8")


@pytest.mark.parametrize("size", [20_000, pytest.param(222_747, marks=pytest.mark.slow)])
def test_an_index_of_many_tensors(size, tmp_path):
    header = {
        f"layers.{i // 3000}.experts.{i}.w": {"dtype": "I8", "shape": [1], "data_offsets": [i, i + 1]}
        for i in range(size)
    }
    write(tmp_path / "a.safetensors", header, bytes(size))
    index = {"weight_map": dict.fromkeys(header, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.entries) == size
    assert checkpoint.nbytes(checkpoint.entries) == size


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1000)}, path)
    checkpoint = opened(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="ends inside the tensor 'w': 8 bytes are missing"):
        checkpoint.read("w")
