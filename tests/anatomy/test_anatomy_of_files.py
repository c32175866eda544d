"""`anatomy.read` of a folder or a file, and what can be wrong with them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from gnomon import anatomy
from gnomon.checkpoints import open_checkpoint
from gnomon.checkpoints.safetensors_files import read_header
from gnomon.errors import UserError


def layer(n: int) -> dict:
    return {f"h.{n}.attn.c_attn.weight": np.ones((8, 24), np.float32), f"h.{n}.attn.c_proj.weight": np.ones((8, 8))}


@pytest.fixture
def folder(tmp_path):
    """Two shards, an index, a config, and a stray file that the index does not name."""
    files = {}
    for n in range(2):
        save_file(layer(n), tmp_path / f"model-{n}.safetensors")
        files |= dict.fromkeys(layer(n), f"model-{n}.safetensors")
    save_file({"stray.weight": np.ones((3, 3))}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_head": 2}))
    return tmp_path


def test_a_sharded_folder(folder):
    found = anatomy.read(folder)
    assert {part.name for part in found} == {*layer(0), *layer(1)}
    assert found.family == "gpt2" and "by its config" in found.evidence[0]
    assert found.select("query")[0].heads == 2
    checkpoint = open_checkpoint(folder)
    entry = checkpoint.entries["h.1.attn.c_proj.weight"]
    assert entry[:2] == ((8, 8), "F64") and checkpoint.config["n_head"] == 2


def test_a_given_config_outranks_the_folder(folder):
    found = anatomy.read(str(folder), {"model_type": "gpt2", "n_head": 4})
    assert found.select("query")[0].heads == 4


def test_one_file_and_a_folder_with_one(tmp_path):
    save_file(layer(0), tmp_path / "model.safetensors")
    assert len(anatomy.read(tmp_path)) == len(anatomy.read(tmp_path / "model.safetensors")) == 4


def broken(folder, how: str):
    one, index = folder / "model-1.safetensors", folder / "model.safetensors.index.json"
    data = one.read_bytes()
    if how == "missing shard":
        one.unlink()
    elif how == "cut short":
        one.write_bytes(data[:-100])
    elif how == "trailing":
        one.write_bytes(data + b"more")
    elif how == "empty":
        one.write_bytes(b"")
    elif how == "pointer":
        one.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    elif how == "zip":
        one.write_bytes(b"PK\x03\x04" + bytes(100))
    elif how == "header":
        one.write_bytes(data[:8] + b"]" + data[9:])
    elif how == "other shard":
        save_file(layer(7), one)
    elif how == "index":
        index.write_text("{")
    elif how == "no map":
        index.write_text("{}")
    elif how == "outside":
        index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    elif how == "config":
        (folder / "config.json").write_text("[1]")


@pytest.mark.parametrize(
    "how, message",
    [
        ("missing shard", r"not there: model-1.safetensors"),
        ("cut short", r"model-1.safetensors is truncated"),
        ("trailing", "its tensors end at byte"),
        ("empty", "is empty"),
        ("pointer", "Git LFS pointer"),
        ("zip", "torch zip file"),
        ("header", "header is not JSON"),
        ("other shard", "does not hold it"),
        ("index", "is not an index"),
        ("no map", "weight_map"),
        ("outside", "points outside"),
        ("config", "JSON object"),
    ],
)
def test_what_is_wrong_is_named(folder, how, message):
    broken(folder, how)
    with pytest.raises(UserError, match=message):
        anatomy.read(folder)


def test_any_kind_of_checkpoint(tmp_path):
    tensors = {name: torch.from_numpy(array) for name, array in layer(0).items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    found = anatomy.read(tmp_path / "pytorch_model.bin", {"model_type": "gpt2", "n_head": 2})
    assert found.select("query")[0].heads == 2 and {part.name for part in found} == set(tensors)


def test_folders_that_do_not_say_what_to_read(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        anatomy.read(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no checkpoint"):
        anatomy.read(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save_file(layer(0), tmp_path / name)
    with pytest.raises(UserError, match="Pass the path of one"):
        anatomy.read(tmp_path)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=4)), max_size=4), keep=st.integers(0, 2000))
def test_fuzzed_headers_end_in_a_clean_message(tmp_path, changes, keep):
    data = bytearray(save(layer(0)))
    for at, put in changes:
        data[at : at + len(put)] = put
    path = tmp_path / "fuzzed.safetensors"
    path.write_bytes(data[:keep] if keep < 400 else data)
    try:
        assert all(min(header.shape, default=0) >= 0 for header in read_header(path).values())
    except UserError as error:
        assert "fuzzed.safetensors" in str(error)
