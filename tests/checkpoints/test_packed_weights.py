"""Weights stored as small numbers: each layout packed and taken apart by plain loops over numbers, as its writer has it.

Checked once against the writers themselves: compressed-tensors 0.20.1 (2, 3, 4, 6 and 8 bits, with zero points; NVFP4), AutoAWQ 0.2.9,
bitsandbytes 0.50.2 (nf4 and fp4, nested).
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from gnomon.checkpoints.opener import open_checkpoint
from gnomon.errors import UserError

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
M, N = 16, 64


def integers(low, high, *shape, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape)


def words(numbers, bits):
    """Unsigned numbers along the last axis, one after another from the lowest bit up, in 32-bit words."""
    rows = []
    for row in numbers.reshape(-1, numbers.shape[-1]):
        long = sum(int(number) << (bits * place) for place, number in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([(long >> (32 * place)) & 0xFFFFFFFF for place in range(count)])
    return torch.from_numpy(np.array(rows, np.uint32).view(np.int32).reshape(*numbers.shape[:-1], -1).copy())


def pairs(codes, high_first=False):
    first, second = (codes[..., 1::2], codes[..., ::2]) if high_first else (codes[..., ::2], codes[..., 1::2])
    return torch.from_numpy((first | second << 4).astype(np.uint8))


def read(tensors, expected, quantised=None, name="x.weight"):
    """The one weight of these tensors is `expected`, and nothing else is left of them."""
    checkpoint = open_checkpoint(tensors, config={"quantization_config": quantised} if quantised else None)
    assert checkpoint.shapes == {name: tuple(expected.shape)}
    assert checkpoint.entries[name].nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
    np.testing.assert_allclose(checkpoint.read(name).numpy(), expected, rtol=1e-6)


def refused(tensors, message, config=None, name="x.weight"):
    checkpoint = open_checkpoint(tensors, config={"quantization_config": config} if config else None)
    with pytest.raises(UserError, match=message):
        checkpoint.read(name)
    return checkpoint


@pytest.mark.parametrize("reach", ["tensor", "row", "block"])
def test_int8_with_zero_points(reach):
    shape = {"tensor": (1,), "row": (M, 1), "block": (M // 8, N // 32)}[reach]
    q, zero = integers(-128, 128, M, N), integers(-20, 20, *shape, seed=1)
    scale = np.random.default_rng(2).random(shape, np.float32) + 0.5
    expected = np.empty((M, N), np.float32)
    for i in range(M):
        for j in range(N):
            at = {"tensor": 0, "row": (i, 0), "block": (i // 8, j // 32)}[reach]
            expected[i, j] = (float(q[i, j]) - float(zero[at])) * scale[at]
    tensors = {"x.weight": q, "x.weight_scale": scale, "x.weight_zero_point": zero.astype(np.int8)}
    tensors = {name: torch.from_numpy(array) for name, array in tensors.items()}
    tensors["x.weight"] = tensors["x.weight"].to(torch.int8)
    read(tensors, expected, {"weight_block_size": [8, 32]})


@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8_has_exponents_for_32_columns(scale_dtype):
    q = torch.randn(M, N, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    exponents = integers(118, 132, M, N // 32, seed=1)
    expected = q.float().numpy() * np.repeat(2.0 ** (exponents - 127.0), 32, axis=1)
    scale = torch.from_numpy(exponents.astype(np.uint8)).view(scale_dtype)
    read({"x.weight": q, "x.weight_scale": scale}, expected.astype(np.float32))


@pytest.mark.parametrize("name, scale", [("x.weight", "x.scale"), ("x.weight_packed", "x.weight_scale")])
@pytest.mark.parametrize("dtypes", [(torch.int8, torch.float8_e8m0fnu), (torch.uint8, torch.uint8)])
def test_mxfp4_in_pairs(name, scale, dtypes):
    codes, exponents = integers(0, 16, M, N), integers(120, 134, M, N // 32, seed=1)
    expected = np.array([[E2M1[codes[i, j]] * 2.0 ** (exponents[i, j // 32] - 127) for j in range(N)] for i in range(M)])
    packed, stored = pairs(codes).view(dtypes[0]), torch.from_numpy(exponents.astype(np.uint8)).view(dtypes[1])
    read({name: packed, scale: stored}, expected.astype(np.float32))


def nvfp4():
    codes = integers(0, 16, M, N)
    scale = (torch.rand(M, N // 16, generator=torch.Generator().manual_seed(0)) * 400 + 1).to(torch.float8_e4m3fn)
    expected = np.array([[E2M1[codes[i, j]] * float(scale[i, j // 16]) for j in range(N)] for i in range(M)])
    return pairs(codes), scale, expected / 5000


def test_nvfp4_with_a_factor_and_with_a_divisor():
    packed, scale, expected = nvfp4()
    factor, divisor = torch.tensor(1 / 5000), torch.tensor([5000.0])
    read({"x.weight": packed, "x.weight_scale": scale, "x.weight_scale_2": factor}, expected)
    read({"x.weight_packed": packed, "x.weight_scale": scale, "x.weight_global_scale": divisor}, expected)


def test_nvfp4_whose_second_scale_is_the_inverse_or_missing_is_not_guessed():
    packed, scale, _ = nvfp4()
    one = {"x.weight": packed, "x.weight_scale": scale}
    refused(one | {"x.weight_scale_2": torch.tensor(5000.0)}, "multiplies.*stored the inverse")
    refused(one | {"x.weight_global_scale": torch.tensor([1 / 5000])}, "divides.*stored the inverse")
    refused(one, "second scale .* is missing")


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_packed_integers_of_compressed_tensors(bits, asymmetric):
    middle = 1 << (bits - 1)
    q, zero = integers(-middle, middle, M, N), integers(-middle, middle, M, N // 32, seed=1) * asymmetric
    scale = np.random.default_rng(2).random((M, N // 32), np.float32)
    expected = (q - np.repeat(zero, 32, 1)) * np.repeat(scale, 32, 1)
    tensors = {"x.weight_packed": words(q + middle, bits), "x.weight_scale": torch.from_numpy(scale)}
    tensors |= {"x.weight_shape": torch.tensor([M, N])}
    if asymmetric:
        tensors["x.weight_zero_point"] = words((zero + middle).T, bits).T.contiguous()
    read(tensors, expected, {"config_groups": {"group_0": {"weights": {"num_bits": bits}}}})


def gptq(bits, zero, order=None, seed=0):
    q = integers(0, 1 << bits, N, M, seed=seed)  # inputs by outputs
    scale = np.random.default_rng(1).random((N // 32, M), np.float32)
    group = np.arange(N) // 32 if order is None else order
    expected = np.array([[(q[i, o] - zero[group[i], o]) * scale[group[i], o] for i in range(N)] for o in range(M)])
    return words(q.T, bits).T.contiguous(), torch.from_numpy(scale), expected


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_of_both_versions(bits, version):
    zero = integers(1, 1 << bits, N // 32, 32)[:, :M] if bits != 3 else integers(1, 8, N // 32, M)
    order = np.random.default_rng(3).permutation(N) // 32
    packed, scale, expected = gptq(bits, zero, order)
    # 16 numbers of 3 bits fill one word and a half: such layers have a multiple of 32 outputs.
    zeros = words(np.pad(zero - (version == 1), ((0, 0), (0, 16 if bits == 3 else 0))), bits)
    tensors = {"x.qweight": packed, "x.qzeros": zeros, "x.scales": scale, "x.g_idx": torch.from_numpy(order.astype(np.int32))}
    if bits == 3:
        tensors = {key: torch.cat([t, t], 1) if key in ("x.qweight", "x.scales") else t for key, t in tensors.items()}
        both = np.pad(zero - (version == 1), ((0, 0), (0, 0)))
        tensors["x.qzeros"] = words(np.concatenate([both, both], 1), bits)
        expected = np.concatenate([expected, expected])
    read(tensors, expected, {"quant_method": "gptq", "checkpoint_format": "gptq" if version == 1 else "gptq_v2"})


@pytest.mark.parametrize("stored", [7, 8])
def test_gptq_with_symmetric_zero_points_tells_its_version_itself(stored):
    packed, scale, expected = gptq(4, np.full((N // 32, M), 8))
    tensors = {"x.qweight": packed, "x.qzeros": words(np.full((N // 32, M), stored), 4), "x.scales": scale}
    read(tensors, expected)
    read(tensors, expected, {"quant_method": "gptq"})
    mixed = tensors | {"x.qzeros": words(integers(0, 16, N // 32, M), 4)}
    refused(mixed, "nothing tells by which version")


def test_awq_has_an_order_of_its_own():
    q, zero = integers(0, 16, N, M), integers(0, 16, N // 32, M, seed=1)
    scale = np.random.default_rng(2).random((N // 32, M), np.float32)

    def packed(numbers):
        # Nibble i of a word holds column order[i] of its eight.
        order, out = [0, 2, 4, 6, 1, 3, 5, 7], np.empty_like(numbers)
        for column in range(0, numbers.shape[1], 8):
            for nibble in range(8):
                out[:, column + nibble] = numbers[:, column + order[nibble]]
        return words(out, 4)

    expected = ((q - np.repeat(zero, 32, 0)) * np.repeat(scale, 32, 0)).T
    tensors = {"x.qweight": packed(q), "x.qzeros": packed(zero), "x.scales": torch.from_numpy(scale)}
    read(tensors, expected, {"quant_method": "awq", "version": "gemm"})
    refused(tensors, "stored by awq", {"quant_method": "awq", "version": "gemv"})


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_mlx_has_scales_and_biases(bits):
    q = integers(0, 1 << bits, M, N)
    scale, bias = (np.random.default_rng(seed).standard_normal((M, N // 32)).astype(np.float32) for seed in (1, 2))
    tensors = {"x.weight": words(q, bits).view(torch.uint32), "x.scales": torch.from_numpy(scale)}
    tensors["x.biases"] = torch.from_numpy(bias)
    expected = q * np.repeat(scale, 32, 1) + np.repeat(bias, 32, 1)
    checkpoint = open_checkpoint(tensors, config={"quantization": {"group_size": 32, "bits": bits}})
    assert checkpoint.shapes == {"x.weight": (M, N)}
    np.testing.assert_allclose(checkpoint.read("x.weight").numpy(), expected, rtol=1e-5, atol=1e-5)


def test_mlx_matrices_with_settings_of_their_own():
    q = integers(0, 256, M, N)
    tensors = {"x.weight": words(q, 8).view(torch.uint32), "x.scales": torch.ones(M, 2), "x.biases": torch.zeros(M, 2)}
    settings = {"group_size": 64, "bits": 4, "x": {"group_size": 32, "bits": 8}}
    checkpoint = open_checkpoint(tensors, config={"quantization": settings})
    np.testing.assert_allclose(checkpoint.read("x.weight").numpy(), q)
    contradiction = open_checkpoint(tensors, config={"quantization": {"group_size": 64, "bits": 8}})
    with pytest.raises(UserError, match="its shape is not that of 8 bits in groups of 64"):
        contradiction.read("x.weight")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_four_bits(kind, nested):
    random = np.random.default_rng(0)
    codes, table = integers(0, 16, M * N), np.sort(random.standard_normal(16)).astype(np.float32)
    absmax = random.random(M * N // 64).astype(np.float32) + 1
    told = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [M, N]}
    tensors = {"": pairs(codes, high_first=True)[:, None], ".quant_map": table, ".absmax": absmax}
    if nested:
        inner, largest = random.standard_normal(256).astype(np.float32), random.random(4).astype(np.float32)
        stored = integers(0, 256, M * N // 64, seed=1).astype(np.uint8)
        absmax = np.array([inner[byte] * largest[place // 4] + 0.25 for place, byte in enumerate(stored)])
        tensors |= {".absmax": stored, ".nested_quant_map": inner, ".nested_absmax": largest}
        told |= {"nested_blocksize": 4, "nested_offset": 0.25, "nested_dtype": "float32"}
    tensors[f".quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(told).encode(), np.uint8).copy()
    expected = np.array([table[code] * absmax[place // 64] for place, code in enumerate(codes)]).reshape(M, N)
    tensors = {f"x.weight{end}": torch.as_tensor(value) for end, value in tensors.items()}
    read(tensors, expected)
    refused({name: t for name, t in tensors.items() if "quant_map" not in name}, "is missing")


def test_fp8_whose_config_announces_scales_that_are_not_there():
    q = torch.randn(4, 4).to(torch.float8_e4m3fn)
    announced = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    refused({"x.weight": q}, "'x.weight' is fp8 and has no scale beside it though the config", announced)


def test_what_is_not_decoded_is_named_and_gives_no_numbers():
    hqq = {"W_q": torch.ones(8, 4, dtype=torch.uint8), "scale": torch.ones(4), "zero": torch.ones(4), "shape": torch.tensor([8, 8])}
    hqq = {f"model.layers.0.self_attn.k_proj.{name}": value for name, value in hqq.items()}
    checkpoint = refused(hqq, "is stored by HQQ", name="model.layers.0.self_attn.k_proj.weight")
    assert checkpoint.shapes == {"model.layers.0.self_attn.k_proj.weight": (8, 8)} and "HQQ" in checkpoint.notes[0]
    for name, dtype, config, message in (
        ("x.weight", torch.uint8, {"quant_method": "bitnet"}, "by bitnet"),
        ("x.weight", torch.uint8, None, "stored as U8"),
        ("x.weight_packed", torch.uint8, {"format": "mxfp6-pack-quantized", "quant_method": "compressed-tensors"}, "by compr"),
        ("x.qweight", torch.int32, {"quant_method": "new"}, "by new"),
        ("x.q_weight", torch.int32, {"quant_method": "exl2"}, "by EXL2"),
    ):
        refused({name: torch.ones(8, 6, dtype=dtype)}, message, config)
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "ids": torch.arange(4)[None]}
    assert open_checkpoint(masks).read("h.0.attn.bias").sum() == 16, "masks and positions are no weights"


def test_experts_of_packed_weights_are_read_one_by_one():
    codes, exponents = integers(0, 16, 3, M, N), integers(120, 134, 3, M, N // 32, seed=1)
    tensors = {"experts.up": pairs(codes), "experts.up_scale": torch.from_numpy(exponents.astype(np.uint8))}
    checkpoint = open_checkpoint(tensors)
    assert checkpoint.shapes == {"experts.up": (3, M, N)}
    assert torch.equal(checkpoint.read("experts.up", index=2), checkpoint.read("experts.up")[2])
