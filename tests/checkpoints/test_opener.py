"""Which files of a folder count, live modules, run folders, and hub names."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from safetensors.torch import save_file

from gnomon.checkpoints.opener import open_checkpoint
from gnomon.errors import UserError


def test_a_live_module_with_tied_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(3, 4))
    model[1].weight = model[0].weight
    checkpoint = open_checkpoint(model)
    assert set(checkpoint.entries) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(checkpoint.read("1.weight"), model[0].weight)
    assert not checkpoint.read("0.weight").requires_grad
    assert checkpoint.name == "Sequential"


def test_a_meta_module_has_no_numbers():
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="meta device"):
        open_checkpoint(model).read("weight")


def test_a_mapping_and_an_unknown_name():
    checkpoint = open_checkpoint({"layers.0.w": torch.ones(2)}, config={"model_type": "x"})
    assert checkpoint.config == {"model_type": "x"} and open_checkpoint(checkpoint) is checkpoint
    with pytest.raises(UserError, match="Did you mean 'layers.0.w'"):
        checkpoint.read("layer.0.w")


def test_config_is_read_and_checked(tmp_path):
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).config == {}
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert open_checkpoint(tmp_path).config == {"model_type": "llama"}
    assert open_checkpoint(tmp_path / "model.safetensors").config == {"model_type": "llama"}
    for text in ("[1]", "{", "\x00"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match="config.json is not"):
            open_checkpoint(tmp_path)


def test_safetensors_come_first(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    torch.save({"b": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    assert list(open_checkpoint(tmp_path).entries) == ["a"]


def test_several_files_without_a_usual_name(tmp_path):
    for name in ("x", "y"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match="x.safetensors, y.safetensors.*Pass the path of one"):
        open_checkpoint(tmp_path)
    assert list(open_checkpoint(tmp_path / "y.safetensors").entries) == ["y"]
    save_file({"m": torch.zeros(1)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.entries) == ["m"] and "x.safetensors stands beside" in checkpoint.notes[0]


def test_one_shard_alone_says_so(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00002-of-00009.safetensors")
    assert "one of 9 shards" in open_checkpoint(tmp_path / "model-00002-of-00009.safetensors").notes[0]


def test_optimizer_state_is_not_weights(tmp_path):
    torch.save({"w": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    torch.save([3], tmp_path / "training_args.bin")
    assert list(open_checkpoint(tmp_path).entries) == ["w"]


@pytest.mark.parametrize(
    "name, message",
    [("model.onnx", "ONNX"), ("tf_model.h5", "Keras"), ("flax_model.msgpack", "Flax"), ("a.txt", "a.txt")],
)
def test_nothing_readable(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path)
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path / name)


def test_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match="but nothing"):
        open_checkpoint(tmp_path)


def test_the_last_checkpoint_of_a_run(tmp_path):
    (tmp_path / "recipe.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="without a checkpoint yet"):
        open_checkpoint(tmp_path)
    for step in (90, 100):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir()
        save_file({"w": torch.full((1,), float(step))}, folder / "model.safetensors")
    assert float(open_checkpoint(tmp_path).read("w")) == 100


def test_a_path_that_does_not_exist(tmp_path):
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="does not exist.*holds model.safetensors"):
        open_checkpoint(tmp_path / "modle.safetensors")


def hub(monkeypatch, download):
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_hub_name_is_fetched_without_code(tmp_path, monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        return str(tmp_path)

    hub(monkeypatch, download)
    checkpoint = open_checkpoint("someone/some-model")
    assert checkpoint.name == "someone/some-model" and checkpoint.config["model_type"] == "gpt2"
    patterns = ["*.safetensors", "*.index.json", "config.json", "adapter_config.json"]
    assert asked == [("someone/some-model", patterns)]


def test_offline_says_so(monkeypatch):
    def download(name, allow_patterns):
        raise OSError("no connection\nlong story")

    hub(monkeypatch, download)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"could not be fetched \(HF_HUB_OFFLINE is set\): no connection"):
        open_checkpoint("someone/some-model")
