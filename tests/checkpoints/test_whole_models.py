"""What training leaves beside weights, files that hold a part of a model, and folders of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from gnomon.checkpoints.opener import open_checkpoint
from gnomon.errors import UserError

SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}


def layer(names="q_proj k_proj o_proj gate_proj up_proj down_proj", cut=1, d=16, kv=8, wide=48):
    q, k, o, gate, up, down = names.split()
    shapes = {q: (d // cut, d), k: (kv // cut, d), o: (d, d // cut), gate: (wide // cut, d), up: (wide // cut, d), down: (d, wide // cut)}
    return {f"layers.{i}.{name}.weight": torch.randn(shape) for i in range(2) for name, shape in shapes.items()}


@pytest.mark.parametrize("config", [SIZES, {"text_config": SIZES}])
def test_a_tensor_parallel_part_is_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(layer(cut=2), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"one of 2 tensor-parallel parts.*down_proj.weight is 16 x 24, where the config tells of 48"):
        open_checkpoint(tmp_path)
    save_file(layer(), tmp_path / "model.safetensors")
    assert len(open_checkpoint(tmp_path).entries) == 12
    narrow = layer() | {f"layers.{i}.gate_proj.weight": torch.randn(24, 16) for i in range(2)}
    save_file(narrow, tmp_path / "model.safetensors")
    assert len(open_checkpoint(tmp_path).entries) == 12, "a pruned MLP is no part"


def test_metas_consolidated_files(tmp_path):
    params = {"dim": 16, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "multiple_of": 16, "vocab_size": -1}
    (tmp_path / "params.json").write_text(json.dumps(params))
    torch.save(layer("wq wk wo w1 w3 w2"), tmp_path / "consolidated.00.pth")
    assert dict(open_checkpoint(tmp_path).config) == SIZES
    torch.save(layer("wq wk wo w1 w3 w2", cut=2), tmp_path / "consolidated.00.pth")
    with pytest.raises(UserError, match="one of 2 tensor-parallel parts"):
        open_checkpoint(tmp_path)
    (tmp_path / "params.json").unlink()
    torch.save(layer("wq wk wo w1 w3 w2", cut=2), tmp_path / "consolidated.01.pth")
    for path in (tmp_path, tmp_path / "consolidated.01.pth"):
        with pytest.raises(UserError, match=r"one of 2 files \(consolidated.00.pth, consolidated.01.pth\)"):
            open_checkpoint(path)


@pytest.mark.parametrize("name", ["mp_rank_0{}_model_states.pt", "model_rank_{}.pt", "model.tp{}.bin"])
def test_files_of_one_process_each(tmp_path, name):
    for rank in range(2):
        torch.save({"module": layer()}, tmp_path / name.format(rank))
    with pytest.raises(UserError, match="one of 2 files"):
        open_checkpoint(tmp_path)
    (tmp_path / name.format(1)).unlink()
    assert len(open_checkpoint(tmp_path).entries) == 12


def test_what_training_leaves_is_told(tmp_path):
    tensors = layer() | {"optimizer.state.layers.0.q_proj.weight.exp_avg": torch.ones(3, 3), "empty.weight": torch.empty(0)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.entries) == set(layer())
    said = " ".join(checkpoint.notes)
    assert "1 tensors are training's (such as optimizer.state.layers.0" in said and "1 tensors hold nothing" in said
    save_file({"a.weight": torch.empty(0)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="holds no weights. 1 tensors hold nothing.*ZeRO-3"):
        open_checkpoint(tmp_path)
    with pytest.raises(UserError, match="FSDP's flat parameters .'layers.0._flat_param'"):
        open_checkpoint({"layers.0._flat_param": torch.ones(300)})


def test_models_beside_the_model_are_told(tmp_path):
    torch.save({"model": layer(), "model_ema": layer(), "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "step": 3},
               tmp_path / "model.pt")  # fmt: skip
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.entries) == set(layer())
    assert checkpoint.notes == ("model.pt holds model_ema, optimizer beside 'model', which was passed over",)


@pytest.mark.parametrize("old", [False, True])
def test_weight_norm_is_one_weight(old):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Conv1d(4, 3, 2))
    norm = torch.nn.utils.weight_norm if old else torch.nn.utils.parametrizations.weight_norm
    norm(module[0]), norm(module[1], dim=2)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    module(torch.randn(1, 4, 6)) if old else None  # the old one forms its weights when it is called
    checkpoint = open_checkpoint(dict(module.state_dict()))
    assert checkpoint.shapes["0.weight"] == (5, 6) and not any("original" in name or "_v" in name for name in checkpoint.entries)
    for i in (0, 1):
        assert torch.allclose(checkpoint.read(f"{i}.weight"), module[i].weight, atol=1e-6)


@pytest.fixture
def distributed(tmp_path):
    tensors = layer() | {"optimizer.state.a": torch.ones(2)}
    dcp.save({"model": layer(), **tensors, "step": 7}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.manual_seed(0)
    tensors = {"model": {name: torch.randn(t.shape) for name, t in layer().items()}, "optimizer": {"a": torch.ones(2)}, "step": 7}
    tensors["model"]["packed"] = torch.arange(24.0).reshape(2, 3, 4)
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp", tensors["model"]


def test_distributed_checkpoints(distributed):
    folder, tensors = distributed
    checkpoint = open_checkpoint(folder)
    assert checkpoint.shapes == {f"model.{name}": tuple(t.shape) for name, t in tensors.items()}
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(f"model.{name}"), tensor)
    assert torch.equal(checkpoint.read("model.packed", index=1), tensors["packed"][1])
    assert "1 tensors are training's" in checkpoint.notes[0]


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_distributed_checkpoints_run_no_code(distributed, tmp_path):
    folder, _ = distributed
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "marker")))
    with pytest.raises(UserError, match="ask to run 'posix.system'"):
        open_checkpoint(folder)
    assert not (tmp_path / "marker").exists()
    (folder / ".metadata").write_bytes(b"\x80\x04garbage")
    with pytest.raises(UserError, match=".metadata is damaged"):
        open_checkpoint(folder)


def test_a_distributed_checkpoint_cut_short(distributed):
    folder, tensors = distributed
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(UserError, match="cannot be read"):
        open_checkpoint(folder).read("model.packed")
    file.unlink()
    (folder / "x.distcp").touch()
    with pytest.raises(UserError, match="no file .*distcp"):
        open_checkpoint(folder)
