"""What may be done to a model without changing its continuity, and what may not."""

from __future__ import annotations

import pytest
import torch
from continuity_cases import LLAMA, llama
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.continuity import inspect

KEYS = ("v1_cos", "u1_cos", "subspace_v", "subspace_u")
FULL = KEYS + ("weighted_v", "weighted_u", "gram_v", "gram_u")


def rows(tensors, full=False, config=LLAMA, **options):
    report = inspect(tensors, k=3, full=full, config=config, **options)
    return {(row["role"], row["layer"]): row for row in report.rows}


def same(one, two, keys=KEYS, roles=None, tolerance=1e-4):
    for place, row in one.items():
        if roles and place[0] not in roles:
            continue
        for key in keys:
            assert two[place][key] == pytest.approx(row[key], abs=tolerance), (place, key)


def orthogonal(n, seed=0):
    return torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed)))[0]


@settings(max_examples=8)
@given(st.lists(st.floats(1e-3, 1e3) | st.floats(-1e3, -1e-3), min_size=4, max_size=4))
def test_scale_and_sign_of_each_matrix(factors):
    tensors = llama()
    scaled = dict(tensors)
    for layer, factor in enumerate(factors):
        for name in tensors:
            if f"layers.{layer}." in name:
                scaled[name] = tensors[name] * factor
    same(rows(tensors), rows(scaled))


def test_a_common_rotation_of_the_stream():
    tensors, Q = llama(), orthogonal(32)
    turned = dict(tensors)
    for name, W in tensors.items():
        if "layers" in name:
            turned[name] = Q @ W if "o_proj" in name or "down_proj" in name else W @ Q.T
    same(rows(tensors, full=True), rows(turned, full=True), FULL)


def test_a_rotation_of_one_layer_is_seen():
    tensors, Q = llama(), orthogonal(32)
    turned = dict(tensors)
    turned["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"] @ Q.T
    one, two = rows(tensors)["up", 0], rows(turned)["up", 0]
    assert abs(one["v1_cos"] - two["v1_cos"]) > 1e-2 and one["u1_cos"] == pytest.approx(two["u1_cos"], abs=1e-4)


def test_renumbering_neurons_leaves_the_stream_side_alone():
    tensors, g = llama(), torch.Generator().manual_seed(5)
    moved = dict(tensors)
    for layer in range(4):
        order = torch.randperm(48, generator=g)
        for name in ("gate_proj", "up_proj"):
            key = f"model.layers.{layer}.mlp.{name}.weight"
            moved[key] = tensors[key][order]
        key = f"model.layers.{layer}.mlp.down_proj.weight"
        moved[key] = tensors[key][:, order]
    one, two = rows(tensors), rows(moved)
    same(one, two, ("v1_cos", "subspace_v"), {"gate", "up"})
    same(one, two, ("u1_cos", "subspace_u"), {"down"})
    assert any(abs(one["up", at]["u1_cos"] - two["up", at]["u1_cos"]) > 1e-2 for at in range(3))
    assert any(abs(one["down", at]["v1_cos"] - two["down", at]["v1_cos"]) > 1e-2 for at in range(3))


def test_gains_moved_between_norm_and_weight_change_only_raw_numbers():
    tensors = llama(norms=True)
    moved = dict(tensors)
    for layer in range(4):
        at = f"model.layers.{layer}."
        for norm, readers in (("input_layernorm", "qkv"), ("post_attention_layernorm", "gu")):
            gain = torch.rand(32, generator=torch.Generator().manual_seed(layer)) + 0.5
            moved[f"{at}{norm}.weight"] = tensors[f"{at}{norm}.weight"] * gain
            for letter in readers:
                name = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}.get(letter)
                name = name or {"g": "mlp.gate_proj", "u": "mlp.up_proj"}[letter]
                moved[f"{at}{name}.weight"] = tensors[f"{at}{name}.weight"] / gain
    raw, raw_moved = rows(tensors), rows(moved)
    assert any(abs(raw[place]["v1_cos"] - raw_moved[place]["v1_cos"]) > 1e-2 for place in raw)
    same(rows(tensors, fold_norms=True), rows(moved, fold_norms=True))
    # Writers have no norm after them in this family, so they are measured as they are.
    same(raw, rows(tensors, fold_norms=True), roles={"output", "down"})


def test_folding_is_what_it_says():
    tensors = llama(norms=True)
    folded = dict(tensors)
    for layer in range(4):
        at = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj"):
            folded[f"{at}self_attn.{name}.weight"] = (
                tensors[f"{at}self_attn.{name}.weight"] * tensors[f"{at}input_layernorm.weight"]
            )
        for name in ("gate_proj", "up_proj"):
            folded[f"{at}mlp.{name}.weight"] = (
                tensors[f"{at}mlp.{name}.weight"] * tensors[f"{at}post_attention_layernorm.weight"]
            )
    same(rows(tensors, fold_norms=True), rows(folded))
    report = inspect(tensors, k=2, fold_norms=True, config=LLAMA)
    one = next(row for row in report.matrices if row["role"] == "query" and row["layer"] == 2)
    assert one["folded"] == ["model.layers.2.input_layernorm.weight"]
    assert report.settings["fold_norms"] is True


def test_gemma_multiplies_by_one_plus_its_gain():
    tensors = llama(norms=True)
    gemma = {name: W - 1 if "norm" in name else W for name, W in tensors.items()}
    for layer in range(4):
        at = f"model.layers.{layer}."
        gemma[f"{at}pre_feedforward_layernorm.weight"] = gemma.pop(f"{at}post_attention_layernorm.weight")
        gemma[f"{at}post_attention_layernorm.weight"] = torch.zeros(32)
        gemma[f"{at}post_feedforward_layernorm.weight"] = torch.zeros(32)
    one = rows(tensors, fold_norms=True)
    same(one, rows(gemma, fold_norms=True, config=LLAMA | {"model_type": "gemma2"}))


def test_a_gain_that_is_zero_somewhere():
    tensors = llama(norms=True)
    for name in tensors:
        if "norm" in name:
            tensors[name][:3] = 0
    for full in (False, True):
        for row in rows(tensors, full=full, fold_norms=True).values():
            assert all(row[key] == row[key] and 0 <= row[key] <= 1.0001 for key in KEYS)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-5), (torch.bfloat16, 0.2), (torch.float16, 0.02)])
def test_dtype_of_storage(dtype, tolerance):
    tensors = {name: W.to(dtype) for name, W in llama().items()}
    # Rounding is part of the matrix: held against the rounded numbers in fp32, not against the originals.
    same(rows({name: W.float() for name, W in tensors.items()}), rows(tensors), tolerance=1e-4)
    same(rows(llama(), full=True), rows(tensors, full=True), ("gram_v", "gram_u"), tolerance=tolerance)


def test_fused_and_transposed_storage_is_the_same_model():
    """One model as Llama keeps it, as Phi-3 fuses it, and as GPT-2 fuses and transposes it."""
    plain = {name: W for name, W in llama().items() if "gate" not in name}
    for layer in range(4):
        for name in ("k_proj", "v_proj"):
            key = f"model.layers.{layer}.self_attn.{name}.weight"
            plain[key] = plain[key].repeat(2, 1) * torch.linspace(0.5, 1.5, 32)[:, None]
    phi3, gpt2 = {}, {}
    for layer in range(4):
        at = f"model.layers.{layer}."
        qkv = torch.cat([plain[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"])
        out, up, down = (plain[f"{at}{name}.weight"] for name in ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"))
        phi3[f"{at}self_attn.qkv_proj.weight"], phi3[f"{at}self_attn.o_proj.weight"] = qkv, out
        phi3[f"{at}mlp.gate_up_proj.weight"], phi3[f"{at}mlp.down_proj.weight"] = torch.cat([up, up]), down
        gpt2[f"h.{layer}.attn.c_attn.weight"], gpt2[f"h.{layer}.attn.c_proj.weight"] = qkv.T, out.T
        gpt2[f"h.{layer}.mlp.c_fc.weight"], gpt2[f"h.{layer}.mlp.c_proj.weight"] = up.T, down.T
    config = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32}
    one = rows(plain, config=config | {"model_type": "llama"})
    same(one, rows(phi3, config=config | {"model_type": "phi3"}))
    same(one, rows(gpt2, config=config | {"model_type": "gpt2"}))
