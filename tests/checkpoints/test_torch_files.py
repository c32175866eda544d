"""Torch files: weights only, never code; what is not a torch file is named."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict

import pytest
import torch

from gnomon.checkpoints.opener import open_checkpoint
from gnomon.errors import UserError


def some():
    g = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(40, 30, generator=g),
        "b.weight": torch.randn(3, 50, generator=g).bfloat16(),
        "t.weight": torch.randn(20, 10, generator=g).T,
        "n": torch.tensor(3),
    }


def check(checkpoint, tensors=None):
    tensors = tensors or some()
    assert set(checkpoint.entries) == set(tensors)
    for _ in range(2):  # a page that was given back is read again
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read(name), tensor)
            assert checkpoint.entries[name].shape == tuple(tensor.shape)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_a_state_dict(tmp_path, name):
    torch.save(some(), tmp_path / name)
    check(open_checkpoint(tmp_path))
    check(open_checkpoint(tmp_path / name))


@pytest.mark.parametrize("wrap", ["state_dict", "model_state_dict", "model"])
def test_wrapped_as_training_scripts_do(tmp_path, wrap):
    torch.save({wrap: OrderedDict(some()), "epoch": 3, "lr": [0.1]}, tmp_path / "model.pt")
    check(open_checkpoint(tmp_path))


def test_the_old_format(tmp_path):
    torch.save(some(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    checkpoint = open_checkpoint(tmp_path)
    check(checkpoint)
    assert "before 1.6" in checkpoint.notes[0]


def test_shards_and_their_index(tmp_path):
    first, second = {"a": torch.zeros(3), "b": torch.full((2,), 9.0)}, {"b": torch.ones(2)}
    torch.save(first, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save(second, tmp_path / "pytorch_model-00002-of-00002.bin")
    names = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    check(open_checkpoint(tmp_path), {"a": first["a"], "b": second["b"]})
    names["c"] = names["a"]
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UserError, match="places 'c' in pytorch_model-00001-of-00002.bin, which does not"):
        open_checkpoint(tmp_path)


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("save", ["zip", "legacy", "plain pickle"])
def test_code_in_a_file_is_never_run(tmp_path, save):
    marker, path = tmp_path / "marker", tmp_path / "pytorch_model.bin"
    value = {"a": torch.zeros(2), "b": Malicious(marker)}
    if save == "plain pickle":
        path.write_bytes(pickle.dumps(Malicious(marker)))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=save == "zip")
    with pytest.raises(UserError, match="not only weights|damaged or is not") as caught:
        open_checkpoint(tmp_path)
    assert not marker.exists()
    assert str(path) in str(caught.value)
    if save == "zip":
        assert "system" in str(caught.value)


@pytest.mark.parametrize(
    "data, message",
    [
        (b"\x06\x00\x00\x00\x0c\x00WhisperSpec\x00" + bytes(50), "CTranslate2"),
        (b"", "is empty"),
        (b"version https://git-lfs.example/spec/v1\noid", "Git LFS pointer"),
        (b"GGUF" + bytes(40), "GGUF file. Rename"),
        (b"\x89HDF\r\n" + bytes(40), "HDF5"),
        (b"hello, I am a text file", "neither a zip file nor a pickle"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{}              ", "not a torch file but a safetensors file. Rename it"),
        (b"\x80\x02garbage", "damaged or is not a torch checkpoint"),
    ],
)
def test_files_that_are_something_else(tmp_path, data, message):
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_a_truncated_file(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save(some(), path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match="cut short: it begins as a torch file"):
        open_checkpoint(path)


def test_no_tensors_inside(tmp_path):
    torch.save([1, 2], tmp_path / "model.pt")
    with pytest.raises(UserError, match="no tensors but a list"):
        open_checkpoint(tmp_path)
