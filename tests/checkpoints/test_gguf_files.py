"""GGUF against files the package gguf writes itself, and llama's reordered rows."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from gnomon.checkpoints import gguf_files
from gnomon.checkpoints.opener import open_checkpoint
from gnomon.continuity import inspect
from gnomon.errors import UserError

gguf = pytest.importorskip("gguf")


def write(path, tensors, architecture="llama", heads=4, kv_heads=2, quantise=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_block_count(2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    for name, array in tensors.items():
        kind = quantise if quantise and array.ndim == 2 else None
        data = gguf.quants.quantize(array, kind) if kind else array
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(rows, heads):
    """What the converter to GGUF does to q and k, head by head: halves become neighbours."""
    width = len(rows) // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for pair in range(width // 2):
            out[head * width + 2 * pair] = rows[head * width + pair]
            out[head * width + 2 * pair + 1] = rows[head * width + width // 2 + pair]
    return out


def some(seed=0):
    random = np.random.default_rng(seed)
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "ffn_up": (96, 64), "ffn_down": (64, 96), "attn_norm": (64,)}
    return {
        f"blk.{layer}.{name}.weight": random.standard_normal(shape).astype(np.float32)
        for layer in range(2)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_dequantised_values(tmp_path, kind):
    tensors = some()
    quantise = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
    path = write(tmp_path / "m.gguf", tensors, "qwen2", quantise=quantise)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.entries) == set(tensors)
    assert checkpoint.config["general.architecture"] == "qwen2"
    assert not any(key.startswith("tokenizer") for key in checkpoint.config)
    tolerance = {"F32": 0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.03, "Q4_1": 0.5}[kind]
    for name, array in tensors.items():
        read = checkpoint.read(name)
        assert read.shape == array.shape and read.dtype == torch.float32
        np.testing.assert_allclose(read.numpy(), array, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("architecture", ["llama", "granite"])
def test_llama_rows_are_put_back(tmp_path, architecture):
    tensors = some()
    stored = dict(tensors)
    for name in tensors:
        if "attn_q" in name or "attn_k" in name:
            stored[name] = permute(tensors[name], 4 if "attn_q" in name else 2)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", stored, architecture))
    for name, array in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name).numpy(), array)


def test_inspected_as_the_same_model_from_safetensors(tmp_path):
    tensors = some()
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "ffn_up": "mlp.up_proj"}
    names["ffn_down"] = "mlp.down_proj"
    plain = {}
    for name, array in tensors.items():
        layer, kind = name.split(".")[1:3]
        if kind in names:
            plain[f"model.layers.{layer}.{names[kind]}.weight"] = torch.from_numpy(array)
    one = inspect(write(tmp_path / "m.gguf", tensors, "qwen2"), k=2)
    two = inspect(plain, k=2, config={"model_type": "qwen2"})
    assert {row["role"] for row in one.rows} == {"query", "key", "up", "down"}
    ours = {row["role"]: row for row in one.rows}
    for row in two.rows:
        for key in ("v1_cos", "u1_cos", "subspace_v"):
            assert row[key] == pytest.approx(ours[row["role"]][key], abs=1e-5)


def test_damaged_files(tmp_path):
    path = write(tmp_path / "m.gguf", some())
    whole = path.read_bytes()
    for data, message in (
        (whole[:-300], "truncated inside|damaged GGUF"),
        (b"", "is empty"),
        (b"PK\x03\x04" + whole, "torch zip"),
        (whole[:60], "damaged GGUF"),
        (b"nonsense", "not a GGUF file"),
    ):
        path.write_bytes(data)
        with pytest.raises(UserError, match=message):
            open_checkpoint(path)


def test_several_files_ask_which(tmp_path):
    write(tmp_path / "a.gguf", some())
    write(tmp_path / "b.gguf", some())
    with pytest.raises(UserError, match="several GGUF files"):
        open_checkpoint(tmp_path)


def test_the_missing_package_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf", some())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r'pip install "gnomon\[gguf\]"'):
        gguf_files.open_files([path])
