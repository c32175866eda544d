"""LoRA folders: the update alone, or added to its base; what does not fit is named."""

from __future__ import annotations

import json
import math

import pytest
import torch
from continuity_cases import LLAMA, llama
from safetensors.torch import save_file

from gnomon.checkpoints.opener import open_checkpoint
from gnomon.continuity import inspect
from gnomon.errors import UserError

R, ALPHA = 4, 10


def adapter(folder, rank=R, prefix="base_model.model.", config=True, transposed=False, **options):
    g = torch.Generator().manual_seed(1)
    factors = {}
    for layer in range(4):
        for name, (out, inputs) in {"q_proj": (32, 32), "k_proj": (16, 32)}.items():
            module = f"{prefix}model.layers.{layer}.self_attn.{name}"
            factors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=g)
            factors[f"{module}.lora_B.weight"] = torch.randn(out, rank, generator=g)
    folder.mkdir(exist_ok=True)
    save_file(factors, folder / "adapter_model.safetensors")
    if config:
        text = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, **options})
        (folder / "adapter_config.json").write_text(text)
    return factors


NAME = "model.layers.2.self_attn.k_proj"


@pytest.mark.parametrize(
    "options, scale",
    [
        ({}, ALPHA / R),
        ({"use_rslora": True}, ALPHA / math.sqrt(R)),
        ({"alpha_pattern": {"k_proj": 6}}, 6 / R),
    ],
)
def test_the_update_alone(tmp_path, options, scale):
    factors = adapter(tmp_path / "lora", **options)
    checkpoint = open_checkpoint(tmp_path / "lora")
    assert len(checkpoint.entries) == 8
    key = f"base_model.model.{NAME}"
    expected = scale * factors[f"{key}.lora_B.weight"] @ factors[f"{key}.lora_A.weight"]
    assert checkpoint.entries[f"{NAME}.weight"].shape == (16, 32)
    assert torch.allclose(checkpoint.read(f"{NAME}.weight"), expected, atol=1e-4)
    assert any("update alone" in note for note in checkpoint.notes)


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_added_to_its_base(tmp_path, prefix):
    factors, base = adapter(tmp_path / "lora", prefix=prefix), llama()
    checkpoint = open_checkpoint(tmp_path / "lora", base=base)
    assert set(checkpoint.entries) == set(base)
    key = f"{prefix}{NAME}"
    expected = base[f"{NAME}.weight"] + ALPHA / R * factors[f"{key}.lora_B.weight"] @ factors[f"{key}.lora_A.weight"]
    assert torch.allclose(checkpoint.read(f"{NAME}.weight"), expected, atol=1e-5)
    assert torch.equal(checkpoint.read("model.embed_tokens.weight"), base["model.embed_tokens.weight"])


def test_conv1d_targets_are_stored_the_other_way(tmp_path):
    factors = adapter(tmp_path / "lora", fan_in_fan_out=True)
    read = open_checkpoint(tmp_path / "lora").read(f"{NAME}.weight")
    key = f"base_model.model.{NAME}"
    assert read.shape == (32, 16)
    expected = ALPHA / R * factors[f"{key}.lora_B.weight"] @ factors[f"{key}.lora_A.weight"]
    assert torch.allclose(read.T, expected, atol=1e-4)


def test_without_its_config_directions_are_the_same(tmp_path):
    adapter(tmp_path / "a")
    adapter(tmp_path / "b", config=False)
    one, two = (inspect(tmp_path / name, k=2, config=LLAMA) for name in "ab")
    assert one.rows and [row["v1_cos"] for row in one.rows] == pytest.approx(
        [row["v1_cos"] for row in two.rows], abs=1e-5
    )
    assert any("adapter_config.json is missing" in flag["message"] for flag in two.flags)
    assert all(row["gap"] and row["defined"] for row in one.rows)


def test_what_does_not_fit(tmp_path):
    factors = adapter(tmp_path / "lora")
    path = tmp_path / "lora" / "adapter_model.safetensors"
    with pytest.raises(UserError, match="has 0 tensors of that name"):
        open_checkpoint(tmp_path / "lora", base={"x.weight": torch.zeros(2, 2)})
    with pytest.raises(UserError, match="belongs to another base"):
        open_checkpoint(tmp_path / "lora", base=llama(d=16))
    with pytest.raises(UserError, match="holds no LoRA factors"):
        save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
        open_checkpoint(tmp_path / "x.safetensors", base=llama())
    key = f"base_model.model.{NAME}.lora_B.weight"
    save_file({**factors, key: torch.zeros(16, 3)}, path)
    with pytest.raises(UserError, match="do not fit"):
        open_checkpoint(tmp_path / "lora")
    del factors[key]
    save_file(factors, path)
    with pytest.raises(UserError, match="no partner lora_B"):
        open_checkpoint(tmp_path / "lora")
