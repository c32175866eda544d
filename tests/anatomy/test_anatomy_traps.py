"""Names and shapes that have fooled tools before: each must be read right, or doubted aloud."""

from __future__ import annotations

import numpy as np
import pytest

from gnomon import anatomy


def layer(prefix: str, width: int = 96, inner: int = 160, **changes) -> dict:
    """The weights of one Llama layer."""
    shapes = {f"self_attn.{x}_proj.weight": (width, width) for x in "qkvo"}
    shapes |= {"mlp.gate_proj.weight": (inner, width), "mlp.up_proj.weight": (inner, width)}
    shapes |= {"mlp.down_proj.weight": (width, inner), "input_layernorm.weight": (width,)}
    return {prefix + name: shape for name, shape in (shapes | changes).items()}


def stack(prefix: str, layers=range(3), **sizes) -> dict:
    return {k: v for n in layers for k, v in layer(f"{prefix}{n}.", **sizes).items()}


def test_gpt2_names_in_three_orientations():
    """c_attn and c_proj: GPT-2 stores in x out, GPT-BigCode out x in, GPT-Neo has the same MLP names out x in."""
    gpt2 = anatomy.read({"h.0.attn.c_attn.weight": (96, 288), "h.0.attn.c_proj.weight": (96, 96)})
    assert gpt2.family == "gpt2" and not gpt2.unknown
    assert [p.role for p in gpt2] == ["query", "key", "value", "output"]
    assert all(p.block.transposed and (p.in_axis, p.out_axis) == (0, 1) for p in gpt2)

    bigcode = {"h.0.attn.c_attn.weight": (128, 96), "h.0.attn.c_proj.weight": (96, 96)}
    bigcode |= {"h.0.mlp.c_fc.weight": (384, 96), "h.0.mlp.c_proj.weight": (96, 384)}
    found = anatomy.read(bigcode, {"model_type": "gpt_bigcode", "n_head": 6})
    assert [p.shape for p in found][:4] == [(96, 96), (16, 96), (16, 96), (96, 96)]
    assert not any(p.block.transposed for p in found)


def test_square_c_proj_alone_is_not_guessed():
    found = anatomy.read({"h.0.attn.c_proj.weight": (96, 96), "h.1.attn.c_proj.weight": (96, 96)})
    assert len(found.unknown) == 2 and found.confidence == 0
    for part in found.unknown:
        assert part.role == "output" and part.in_axis is None
        assert "gpt2" in part.doubt and "model_type" in part.doubt
    assert found.pairs("output") == ()
    for kind, transposed in (("gpt2", True), ("gpt_bigcode", False)):
        sure = anatomy.read({p.name: p.shape for p in found}, {"model_type": kind, "n_head": 6})
        assert not sure.unknown and {p.block.transposed for p in sure} == {transposed}


def test_out_by_in_c_attn_with_equal_heads_is_open_until_named():
    """nanoGPT stacks Q, K, V; GPT-BigCode without multi_query interleaves them by head: the shapes are equal."""
    names = {f"h.{n}.attn.c_attn.weight": (288, 96) for n in range(2)}
    names |= {f"h.{n}.attn.c_proj.weight": (96, 96) for n in range(2)}
    found = anatomy.read(names, {"n_head": 6})
    (fused, _) = found.select("query+key+value")
    assert fused.doubt and fused.shape == (288, 96) and not fused.block.transposed
    by_kind = {}
    for kind in ("nanogpt", "gpt_bigcode"):
        found = anatomy.read(names, {"n_head": 6, "multi_query": False, "model_type": kind})
        by_kind[kind] = found.select("key", layer=0)[0].block.take(np.arange(288)[:, None] * np.ones(96))[:, 0]
    np.testing.assert_array_equal(by_kind["nanogpt"], range(96, 192))
    np.testing.assert_array_equal(by_kind["gpt_bigcode"][:17], [*range(16, 32), 64])


def test_config_that_shapes_contradict():
    """A GPT-2 config over out x in weights: shapes win, and the evidence says so."""
    shapes = {"h.0.attn.c_attn.weight": (128, 96), "h.0.attn.c_proj.weight": (96, 96)}
    found = anatomy.read(shapes, {"model_type": "gpt2", "n_embd": 96, "n_head": 6})
    assert "contradict" in found.evidence[0]
    assert not any(p.block.transposed for p in found)


def test_interleaved_rows_without_a_config_stay_whole():
    shapes = {f"gpt_neox.layers.{n}.attention.query_key_value.weight": (288, 96) for n in range(2)}
    shapes |= {f"gpt_neox.layers.{n}.attention.dense.weight": (96, 96) for n in range(2)}
    found = anatomy.read(shapes)
    (fused, _) = found.select("query+key+value")
    assert "number of heads" in fused.doubt and "config" in fused.doubt
    assert len(anatomy.read(shapes, {"model_type": "gpt_neox", "num_attention_heads": 6}).select("key")) == 2


def test_config_of_another_model():
    shapes = {f"gpt_neox.layers.{n}.attention.query_key_value.weight": (288, 96) for n in range(2)}
    found = anatomy.read(shapes, {"model_type": "gpt_neox", "num_attention_heads": 7})
    assert all("do not divide" in part.doubt for part in found)


def test_anchored_names():
    """`output.dense` is a suffix of `attention.output.dense`."""
    shapes = {
        "encoder.layer.0.attention.output.dense.weight": (96, 96),
        "encoder.layer.0.output.dense.weight": (96, 160),
    }
    roles = {part.name: part.role for part in anatomy.read(shapes, {"model_type": "bert"})}
    assert list(roles.values()) == ["output", "down"]


@pytest.mark.parametrize(
    "prefix, name",
    [
        ("model.language_model.layers.", "text"),
        ("language_model.model.layers.", "text"),
        ("model.language_model.language_model.layers.", "text"),
        ("model.visual.layers.", "vision"),
        ("model.vision_tower.vision_model.encoder.layers.", "vision"),
        ("audio_tower.layers.", "audio"),
        ("mtp.layers.", "mtp"),
    ],
)
def test_towers_are_named_by_their_prefix(prefix, name):
    found = anatomy.read(stack(prefix) | stack("model.language_model.layers.") | {"lm_head.weight": (61, 96)})
    assert (
        name in found.stacks
        and len(found.stacks) == (1 if prefix == "model.language_model.layers." else 2)
        or (name == "text")
    )
    assert {part.stack for part in found if part.name.startswith(prefix)} <= {name, f"text[{prefix[:-1]}]"}
    assert found["lm_head.weight"][0].stack == "text"


def test_two_towers_are_never_paired_with_each_other():
    found = anatomy.read(
        stack("text_model.encoder.layers.", range(2)) | stack("vision_model.encoder.layers.", range(3))
    )
    assert set(found.stacks) == {"text", "vision"}
    assert len(found.pairs("query", stack="text")) == 1 and len(found.pairs("query")) == 3


def test_encoder_and_decoder():
    shapes = {
        f"{side}.block.0.layer.0.SelfAttention.{x}.weight": (96, 96) for side in ("encoder", "decoder") for x in "qkvo"
    }
    shapes["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (32, 6)
    shapes |= {f"decoder.block.0.layer.1.EncDecAttention.{x}.weight": (96, 96) for x in "qkvo"}
    found = anatomy.read(shapes, {"model_type": "t5", "num_heads": 6})
    assert set(found.stacks) == {"encoder", "decoder"}
    assert not found["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"][0].is_matrix
    assert all(not part.reads_stream for role in ("cross_key", "cross_value") for part in found.select(role))
    assert found.select("cross_query")[0].reads_stream and found.select("cross_output")[0].writes_stream


def test_the_extra_layer_for_many_token_prediction_stands_apart():
    """DeepSeek stores it as one more layer of the same prefix."""
    shapes = stack("model.layers.", range(3)) | {"model.layers.2.eh_proj.weight": (96, 192)}
    shapes |= {"model.layers.2.enorm.weight": (96,), "model.layers.2.embed_tokens.weight": (61, 96)}
    found = anatomy.read(shapes)
    assert found.layers("text") == (0, 1) and found.layers("mtp") == (2,)
    assert len(found.pairs("query")) == 1 and not found.unknown


def test_buffers_are_not_weights():
    shapes = {"h.0.attn.c_attn.weight": (96, 288), "h.0.attn.c_proj.weight": (96, 96)}
    buffers = {
        "h.0.attn.bias": (1, 1, 64, 64),
        "h.0.attn.masked_bias": (),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
        "embeddings.position_ids": (1, 512),
    }
    found = anatomy.read(shapes | buffers)
    assert {found[name][0].role for name in buffers} == {"buffer"}
    assert not any(found[name][0].is_matrix for name in buffers)


def test_lora_pairs_bear_the_role_of_their_base():
    at = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"
    shapes = {at.format(n, x, "A"): (8, 96) for n in range(2) for x in "qkvo"}
    shapes |= {at.format(n, x, "B"): (96, 8) for n in range(2) for x in "qkvo"}
    found = anatomy.read(shapes)
    a, b = (found[at.format(0, "q", letter)][0] for letter in "AB")
    assert (a.role, a.adapter, a.reads_stream, a.shape) == ("query", "A", True, (8, 96))
    assert (b.role, b.adapter, b.reads_stream, b.shape) == ("query", "B", False, (96, 8))
    assert found[at.format(0, "o", "B")][0].writes_stream and not found[at.format(0, "o", "A")][0].writes_stream
    assert {pair.first.adapter + pair.second.adapter for pair in found.pairs("query")} == {"AA", "BB"}


def test_lora_on_a_fused_weight():
    """A serves Q, K and V together; only B has their rows."""
    at = "base_model.model.model.layers.0.self_attn.{}.lora_{}.default.weight"
    shapes = {at.format("qkv_proj", "A"): (8, 96), at.format("qkv_proj", "B"): (160, 8)}
    shapes |= {at.format("o_proj", "A"): (8, 96), at.format("o_proj", "B"): (96, 8)}
    found = anatomy.read(shapes, {"model_type": "phi3", "num_attention_heads": 6, "num_key_value_heads": 2})
    assert [p.role for p in found[at.format("qkv_proj", "A")]] == ["query+key+value"]
    assert [(p.role, p.shape[0]) for p in found[at.format("qkv_proj", "B")]] == [
        ("query", 96),
        ("key", 32),
        ("value", 32),
    ]


def test_scales_belong_to_their_weights():
    """fp8 block scales, int8 column scales, bitsandbytes: the weight stays a matrix, the scale names it."""
    shapes = stack("model.layers.")
    weight = "model.layers.1.mlp.up_proj.weight"
    scales = {f"{weight}_scale_inv": (2, 1), f"{weight}_scale": (160, 1), "model.layers.1.mlp.up_proj.SCB": (160,)}
    found = anatomy.read(shapes | scales)
    assert {(found[name][0].role, found[name][0].belongs_to) for name in scales} == {("scale", weight)}
    assert found[weight][0].is_matrix and not found.unknown
    assert len(found.pairs("up")) == 2


def test_a_scale_without_a_quantised_weight_is_a_number_of_the_model():
    found = anatomy.read(stack("model.layers.") | {"logit_scale": (), "model.layers.0.norm.scale": (96,)})
    assert found["logit_scale"][0].role == "scalar" and found["model.layers.0.norm.scale"][0].role == "norm"


class Stored:
    """A shape with a dtype, as file headers give it."""

    def __init__(self, dtype, *shape):
        self.dtype, self.shape = dtype, shape


@pytest.mark.parametrize(
    "tensors, weight",
    [
        ({"qweight": Stored("I32", 12, 96), "scales": (1, 96), "qzeros": (1, 12), "g_idx": (96,)}, "qweight"),
        ({"weight_packed": Stored("I32", 96, 12), "weight_scale": (96, 1), "weight_shape": (2,)}, "weight_packed"),
        ({"weight": Stored("U8", 4608, 1), "weight.absmax": (144,), "weight.quant_map": (16,)}, "weight"),
    ],
)
def test_packed_integers_are_no_matrices(tensors, weight):
    at = "model.layers.0.self_attn.q_proj."
    shapes = stack("model.layers.")
    del shapes[f"{at}weight"]
    found = anatomy.read(shapes | {at + name: value for name, value in tensors.items()})
    (part,) = found[at + weight]
    assert part.role == "query" and not part.is_matrix and "packed" in part.doubt
    assert all(found[at + name][0].belongs_to == at + weight for name in tensors if name != weight)
    assert len(found.pairs("query")) == 1


def test_int8_qweight_with_a_scale_is_a_plain_matrix():
    at = "model.layers.0.self_attn.q_proj."
    shapes = stack("model.layers.")
    del shapes[f"{at}weight"]
    found = anatomy.read(shapes | {f"{at}qweight": Stored("I8", 96, 96), f"{at}scale": (96,)})
    assert found[f"{at}qweight"][0].is_matrix and not found.unknown
    at = "model.layers.0.self_attn."
    fused = anatomy.read({f"{at}qkv_proj.qweight": Stored("I8", 160, 96), f"{at}o_proj.qweight": Stored("I8", 96, 96)})
    assert [part.shape for part in fused] == [(96, 96), (32, 96), (32, 96), (96, 96)]


def test_mxfp4_experts_are_packed():
    at = "model.layers.0.mlp.experts.gate_up_proj"
    shapes = {f"model.layers.0.self_attn.{x}_proj.weight": (96, 96) for x in "qkvo"}
    shapes |= {f"{at}_blocks": Stored("U8", 4, 320, 3, 16), f"{at}_scales": Stored("U8", 4, 320, 3)}
    found = anatomy.read(shapes, {"model_type": "gpt_oss", "num_attention_heads": 6})
    assert found[f"{at}_blocks"][0].role == "gate+up" and "packed" in found[f"{at}_blocks"][0].doubt
    assert found[f"{at}_scales"][0].belongs_to == f"{at}_blocks"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inner", [40, 48, 96])
def test_fused_experts_lie_as_their_shapes_say(transposed, inner):
    """Qwen3-VL-MoE files are in x out, transformers 5 holds out x in: by shape, never by version."""
    up, down = (4, 2 * inner, 96), (4, 96, inner)
    shapes = {f"model.layers.{n}.self_attn.{x}_proj.weight": (96, 96) for n in range(2) for x in "qkvo"}
    for n in range(2):
        at = f"model.layers.{n}.mlp.experts."
        for name, (e, a, b) in {"gate_up_proj": up, "down_proj": down}.items():
            shapes[at + name] = (e, b, a) if transposed else (e, a, b)
    found = anatomy.read(shapes, {"model_type": "qwen3_moe", "num_attention_heads": 6})
    assert not found.unknown
    gate = found.select("gate", layer=0)
    assert len(gate) == 4 and {part.shape for part in gate} == {(inner, 96)}
    assert {part.block.transposed for part in found.select("down")} == {transposed}


def test_two_layouts_of_experts_in_one_checkpoint():
    shapes = {f"model.layers.{n}.self_attn.{x}_proj.weight": (96, 96) for n in range(2) for x in "qkvo"}
    shapes |= {
        "model.layers.0.mlp.experts.gate_up_proj": (4, 80, 96),
        "model.layers.0.mlp.experts.down_proj": (4, 96, 40),
    }
    for e in range(4):
        at = f"model.layers.1.mlp.experts.{e}."
        shapes |= {
            f"{at}gate_proj.weight": (40, 96),
            f"{at}up_proj.weight": (40, 96),
            f"{at}down_proj.weight": (96, 40),
        }
    found = anatomy.read(shapes, {"model_type": "qwen3_moe", "num_attention_heads": 6})
    assert [(p.first.expert, p.second.expert, p.lag) for p in found.pairs("up")] == [(e, e, 1) for e in range(4)]


def test_gguf_names():
    """Shapes as dequantised (out x in); fused tensors already in thirds; phi3 keeps gate and up in ffn_up."""
    shapes = {"token_embd.weight": (61, 96), "output_norm.weight": (96,), "output.weight": (61, 96)}
    for n in range(2):
        at = f"blk.{n}."
        shapes |= {
            f"{at}attn_qkv.weight": (160, 96),
            f"{at}attn_output.weight": (96, 96),
            f"{at}attn_norm.weight": (96,),
        }
        shapes |= {f"{at}ffn_up.weight": (320, 96), f"{at}ffn_down.weight": (96, 160), f"{at}ffn_norm.weight": (96,)}
    config = {"general.architecture": "phi3", "phi3.attention.head_count": 6, "phi3.attention.head_count_kv": 2}
    found = anatomy.read(shapes, config)
    assert [(p.role, p.shape) for p in found["blk.0.attn_qkv.weight"]] == [
        *(("query", (96, 96)), ("key", (32, 96)), ("value", (32, 96)))
    ]
    assert [p.role for p in found["blk.1.ffn_up.weight"]] == ["gate", "up"]
    assert found["blk.0.attn_qkv.weight"][0].heads == 6 and found["blk.0.attn_qkv.weight"][1].heads == 2
    assert (found["output.weight"][0].role, found["token_embd.weight"][0].role) == ("head", "embedding")
    assert not found.unknown and found.family == "gguf"
    assert found.select("gate", layer=0)[0].norm_before == "blk.0.ffn_norm.weight"

    experts = {f"blk.0.attn_{x}.weight": (96, 96) for x in ("q", "k", "v", "output")}
    experts |= {"blk.0.ffn_gate_exps.weight": (4, 40, 96), "blk.0.ffn_up_exps.weight": (4, 40, 96)}
    experts |= {"blk.0.ffn_down_exps.weight": (4, 96, 40), "blk.0.ffn_gate_inp.weight": (4, 96)}
    found = anatomy.read(experts)
    assert len(found.select("gate")) == 4 and found.select("down")[3].shape == (96, 40) and not found.unknown


def test_a_head_that_the_config_ties_is_an_alias_even_when_stored():
    shapes = stack("model.layers.") | {"model.embed_tokens.weight": (61, 96), "lm_head.weight": (61, 96)}
    (head,) = anatomy.read(shapes, {"model_type": "llama", "tie_word_embeddings": True}).select("head")
    assert head.tied_to == "model.embed_tokens.weight"
    (head,) = anatomy.read(shapes, {"model_type": "llama", "tie_word_embeddings": False}).select("head")
    assert head.tied_to is None


def test_stages_that_hold_blocks_are_stacks_of_their_own():
    """Swin: encoder.layers.{stage}.blocks.{block}, each stage twice as wide as the one before."""
    shapes = {}
    for stage, width in enumerate((96, 192)):
        for block in range(2):
            at = f"encoder.layers.{stage}.blocks.{block}."
            shapes |= {f"{at}attention.self.{x}.weight": (width, width) for x in ("query", "key", "value")}
            shapes |= {f"{at}attention.output.dense.weight": (width, width)}
            shapes |= {
                f"{at}intermediate.dense.weight": (4 * width, width),
                f"{at}output.dense.weight": (width, 4 * width),
            }
    found = anatomy.read(shapes)
    assert len(found.stacks) == 2 and not found.unknown
    assert {(pair.first.shape, pair.lag) for pair in found.pairs("up")} == {((384, 96), 1), ((768, 192), 1)}


def test_norm_gains_that_feed_or_follow_a_weight():
    after = {
        f"model.layers.{n}.{name}_layernorm.weight": (96,)
        for n in range(2)
        for name in ("post_attention", "pre_feedforward", "post_feedforward")
    }
    found = anatomy.read(stack("model.layers.", range(2)) | after, {"model_type": "gemma2", "num_attention_heads": 6})
    at = "model.layers.1."
    by = {part.role: part for part in found if part.layer == 1 and part.is_matrix}
    assert by["query"].norm_before == at + "input_layernorm.weight" and by["query"].norm_after is None
    assert by["output"].norm_after == at + "post_attention_layernorm.weight" and by["output"].norm_before is None
    assert by["up"].norm_before == at + "pre_feedforward_layernorm.weight"
    assert by["down"].norm_after == at + "post_feedforward_layernorm.weight"
    assert found.norm_offset == 1.0
    routed = stack("model.layers.") | {"model.layers.1.mlp.gate.weight": (4, 96)}
    routed |= {f"model.layers.{n}.post_attention_layernorm.weight": (96,) for n in range(3)}
    (router,) = anatomy.read(routed, {"model_type": "qwen3_moe"}).select("router")
    assert router.norm_before == "model.layers.1.post_attention_layernorm.weight"
    # The same names as Llama's: without a config nobody knows whether the gain is stored minus one.
    assert anatomy.read(stack("model.layers.")).norm_offset is None
    gpt2 = {"h.0.attn.c_attn.weight": (96, 288), "h.0.attn.c_proj.weight": (96, 96)}
    assert anatomy.read(gpt2).norm_offset == 0.0 and anatomy.read(gpt2, {"model_type": "new"}).norm_offset is None


def test_post_norm_models_read_the_norm_of_the_layer_before():
    shapes = {}
    for n in range(2):
        at = f"encoder.layer.{n}."
        shapes |= {f"{at}attention.self.query.weight": (96, 96), f"{at}intermediate.dense.weight": (160, 96)}
        shapes |= {f"{at}attention.output.LayerNorm.weight": (96,), f"{at}output.LayerNorm.weight": (96,)}
    found = anatomy.read(shapes, {"model_type": "bert"})
    first, second = found.select("query")
    assert first.norm_before is None and second.norm_before == "encoder.layer.0.output.LayerNorm.weight"
    assert found.select("up")[1].norm_before == "encoder.layer.1.attention.output.LayerNorm.weight"


@pytest.mark.parametrize("layers", [8, pytest.param(66, marks=pytest.mark.slow)])
def test_as_many_tensors_as_a_large_mixture_of_experts(layers):
    """The work per tensor is a look-up; 66 layers are two hundred thousand tensors."""
    shapes = {"model.embed_tokens.weight": (1000, 512)}
    for n in range(layers):
        at = f"model.layers.{n}."
        shapes |= {f"{at}self_attn.{x}_proj.weight": (512, 512) for x in "qkvo"}
        for e in range(512):
            for name, shape in (("gate", (128, 512)), ("up", (128, 512)), ("down", (512, 128))):
                shapes[f"{at}mlp.experts.{e}.{name}_proj.weight"] = shape
                shapes[f"{at}mlp.experts.{e}.{name}_proj.weight_scale_inv"] = (1, 4)
    assert len(shapes) > 3000 * layers
    found = anatomy.read(shapes)
    assert len(found) == len(shapes) and not found.unknown and found.family == "qwen2_moe"
    assert len(found.pairs("gate")) == (layers - 1) * 512
    assert len(found.table().splitlines()) < 20
