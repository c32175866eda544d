"""Torch files: weights only, never code; what is not a torch file is named."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
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


def views():
    g = torch.Generator().manual_seed(1)
    whole = torch.randn(4, 6, 8, generator=g)
    return {"experts": whole, "cut": whole[1:3, 2:5, ::2], "turned": whole.mT}


@pytest.mark.parametrize("how", ["in place", "mapped", "old format"])
def test_views_and_single_experts(tmp_path, monkeypatch, how):
    torch.save(views(), tmp_path / "model.pt", _use_new_zipfile_serialization=how != "old format")
    plain = torch.load

    def before_2_11(*args, **options):
        value = plain(*args, **options)
        for tensor in value.values() if options.get("map_location") == "meta" else ():
            tensor.untyped_storage()._checkpoint_offset = None
        return value

    if how == "mapped":
        monkeypatch.setattr(torch, "load", before_2_11)
    checkpoint = open_checkpoint(tmp_path)
    check(checkpoint, views())
    assert (checkpoint.entries["experts"].offset > 0) == (how == "in place")
    for name in ("experts", "cut", "turned"):
        assert torch.equal(checkpoint.read(name, index=1), views()[name][1])


def test_a_conjugate_keeps_its_sign(tmp_path):
    value = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    torch.save({"c": value.conj()}, tmp_path / "model.pt")
    assert torch.equal(open_checkpoint(tmp_path).read("c"), value.conj())


def test_compressed_members_are_refused_unopened(tmp_path):
    """A member of 50 MB packs to 50 kB; torch itself never packs them."""
    torch.save(some(), file := io.BytesIO())
    with zipfile.ZipFile(file) as whole, zipfile.ZipFile(tmp_path / "model.bin", "w", zipfile.ZIP_DEFLATED) as again:
        for name in whole.namelist():
            again.writestr(name, b"\x80\x02" + b"]" * 50_000_000 if name.endswith("data.pkl") else whole.read(name))
    with pytest.raises(UserError, match="data.pkl' is compressed, from 50000002 bytes"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "value, message",
    [
        (torch.eye(3).to_sparse(), "'w' is stored as sparse_coo. Save it with .to_dense"),
        (torch.empty(3, 3, device="meta"), "'w' is on the meta device and holds no numbers"),
        (torch.zeros(1).expand(10**6, 10**6), "'w' repeats 1 numbers up to a shape of"),
    ],
)
def test_tensors_without_plain_numbers(tmp_path, value, message):
    torch.save({"w": value, "b": torch.ones(2)}, tmp_path / "model.pt")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("b").sum() == 2
    with pytest.raises(UserError, match=message):
        checkpoint.read("w")


def test_a_state_dict_that_holds_itself(tmp_path):
    value: dict = dict(some())
    value["self"] = value
    torch.save(value, tmp_path / "model.pt")
    check(open_checkpoint(tmp_path))


def test_other_zip_files_are_named(tmp_path):
    path = tmp_path / "model.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    with pytest.raises(UserError, match="is a TorchScript program"):
        open_checkpoint(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", b"<xml/>")
    with pytest.raises(UserError, match="a zip file but no torch checkpoint"):
        open_checkpoint(path)
