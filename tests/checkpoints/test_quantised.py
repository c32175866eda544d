"""fp8, int8 and MXFP4 with their scales stand for the floats they were made from."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from gnomon.checkpoints.opener import open_checkpoint
from gnomon.errors import UserError


def matrix(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def opened(tmp_path, tensors, config="{}"):
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    return open_checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [(256, 384), (200, 300)])
def test_fp8_in_blocks_as_deepseek_stores_it(tmp_path, shape):
    W = matrix(*shape)
    rows, columns = (math.ceil(size / 128) for size in shape)
    scale = torch.empty(rows, columns)
    stored = torch.empty(shape)
    for i in range(rows):
        for j in range(columns):
            block = W[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            scale[i, j] = block.abs().max() / 448
            stored[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = block / scale[i, j]
    stored = stored.to(torch.float8_e4m3fn)
    config = '{"quantization_config": {"weight_block_size": [128, 128]}}'
    checkpoint = opened(tmp_path, {"x.weight": stored, "x.weight_scale_inv": scale}, config)
    assert list(checkpoint.entries) == ["x.weight"]
    assert checkpoint.entries["x.weight"].nbytes == stored.nbytes + scale.nbytes
    assert torch.allclose(checkpoint.read("x.weight"), W, rtol=0.07, atol=1e-2)
    last = stored.float()[-1, -1] * scale[-1, -1]
    assert float(checkpoint.read("x.weight")[-1, -1]) == pytest.approx(float(last))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    "kind, shape", [("tensor", ()), ("tensor", (1,)), ("row", (40,)), ("row", (40, 1)), ("column", (1, 30))]
)
def test_scales_of_every_reach(tmp_path, dtype, kind, shape):
    stored = matrix(40, 30).to(dtype)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    wide = scale.reshape({"tensor": (1, 1), "row": (-1, 1), "column": (1, -1)}[kind])
    read = opened(tmp_path, {"x.weight": stored, "x.weight_scale": scale}).read("x.weight")
    assert read.dtype == torch.float32 and torch.equal(read, stored.float() * wide)


@pytest.mark.parametrize("block, config", [((64, 32), [64, 32]), ((256, 128), None), ((64, 384), None)])
def test_blocks_of_other_sizes(tmp_path, block, config):
    rows, columns = 2, 3
    stored = matrix(rows * block[0], columns * block[1]).to(torch.float8_e4m3fn)
    scale = torch.rand(rows, columns) + 0.5
    text = json.dumps({"quantization_config": {"weight_block_size": config}})
    read = opened(tmp_path, {"x.weight": stored, "x.weight_scale_inv": scale}, text).read("x.weight")
    assert torch.equal(read, stored.float() * torch.kron(scale, torch.ones(block)))


def test_fp8_without_a_scale_is_what_it_says(tmp_path):
    stored = matrix(4, 4).to(torch.float8_e4m3fn)
    assert torch.equal(opened(tmp_path, {"x.weight": stored}).read("x.weight"), stored.float())


@pytest.mark.parametrize("names", [("x.weight", "x.weight_scale"), ("x.qweight", "x.scale"), ("x.weight", "x.SCB")])
def test_int8_with_scales(tmp_path, names):
    stored = (matrix(6, 5) * 40).to(torch.int8)
    scale = torch.rand(6) + 0.5
    checkpoint = opened(tmp_path, {names[0]: stored, names[1]: scale})
    unit = 127 if names[1].endswith("SCB") else 1
    assert list(checkpoint.entries) == ["x.weight"]
    assert torch.allclose(checkpoint.read("x.weight"), stored.float() * scale[:, None] / unit)


def test_int8_without_a_scale_is_refused_when_read(tmp_path):
    checkpoint = opened(tmp_path, {"x.weight": torch.ones(3, 3, dtype=torch.int8), "y": torch.ones(2)})
    assert checkpoint.read("y").sum() == 2
    with pytest.raises(UserError, match="'x.weight' is int8 and has no scale"):
        checkpoint.read("x.weight")


def test_a_scale_that_fits_nothing(tmp_path):
    tensors = {"x.weight": matrix(40, 30).to(torch.float8_e4m3fn), "x.weight_scale": torch.ones(7, 11)}
    with pytest.raises(UserError, match=r"40 x 30\) has a scale of shape 7 x 11"):
        opened(tmp_path, tensors).read("x.weight")


def test_experts_are_read_one_by_one(tmp_path):
    stored = matrix(3, 40, 30).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 1, 1) + 0.5
    checkpoint = opened(tmp_path, {"x": stored, "x_scale": scale})
    assert torch.equal(checkpoint.read("x"), stored.float() * scale)
    assert torch.equal(checkpoint.read("x", index=2), stored[2].float() * scale[2])


def test_mxfp4_as_gpt_oss_stores_it(tmp_path):
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (2, 8, 3, 32), generator=g)  # experts, rows, groups, entries
    scales = torch.randint(120, 134, (2, 8, 3), generator=g, dtype=torch.uint8)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    expected = torch.empty(2, 96, 8)
    for e in range(2):
        for row in range(8):
            for column in range(96):
                exponent = int(scales[e, row, column // 32]) - 127
                expected[e, column, row] = values[int(codes[e, row, column // 32, column % 32])] * 2.0**exponent
    name = "model.layers.0.mlp.experts.gate_up_proj"
    checkpoint = opened(tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": scales})
    assert checkpoint.shapes == {name: (2, 96, 8)}
    assert torch.equal(checkpoint.read(name), expected)
    assert torch.equal(checkpoint.read(name, index=1), expected[1])


def test_a_plain_checkpoint_is_left_alone(tmp_path):
    W = matrix(3, 3)
    checkpoint = opened(tmp_path, {"x.weight": W, "x.scale": torch.ones(3)})
    assert set(checkpoint.entries) == {"x.weight", "x.scale"} and torch.equal(checkpoint.read("x.weight"), W)
