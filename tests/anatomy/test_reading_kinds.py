"""Weights whose names or shapes once told the wrong story, and the layouts of families read by name."""

from __future__ import annotations

import pytest
import torch

from gnomon import anatomy
from gnomon.anatomy.unlisted_families import STRUCTURAL

D, F = 64, 96


def layers(inside: dict[str, tuple[int, ...]], prefix: str = "model.layers", count: int = 2) -> dict:
    return {f"{prefix}.{n}.{name}": shape for n in range(count) for name, shape in inside.items()}


def attention(at: str, names: str = "q_proj k_proj v_proj o_proj") -> dict:
    rows = (D, 32, 32, D)
    return {f"{at}.{name}.weight": (n, D) for name, n in zip(names.split(), rows)}


def mlp(at: str, names: str = "gate_proj up_proj down_proj", inner: int = F) -> dict:
    return {f"{at}.{name}.weight".lstrip("."): (D, inner) if i == len(names.split()) - 1 else (inner, D)
            for i, name in enumerate(names.split())}  # fmt: skip


def roles(shapes: dict, config=None, layer: int = 0) -> dict[str, str]:
    """Name inside layer 0 -> roles, "?" where there is a doubt."""
    found: dict[str, str] = {}
    for part in anatomy.read(shapes, config):
        if part.layer == layer and len(part.shape) > 1:
            name = part.name.split(f".{layer}.", 1)[1].removesuffix(".weight")
            found[name] = "+".join(filter(None, [found.get(name), part.role + "?" * bool(part.doubt)]))
    return found


# --------------------------------------------------------------------------------------- by words and shapes


@pytest.mark.parametrize("router", ["moe.gate", "moe.router", "moe.router.classifier", "moe.gate.wg"])
def test_a_router_is_no_gate_of_the_mlp(router):
    experts = {name: shape for e in range(4) for name, shape in mlp(f"moe.experts.{e}").items()}
    found = roles(layers(attention("attention") | {f"{router}.weight": (4, D)} | experts), {"model_type": "new"})
    assert found[router] == "router"
    assert [found[f"moe.experts.3.{x}_proj"] for x in ("gate", "up", "down")] == ["gate", "up", "down"]


def test_a_gate_whose_rows_do_not_close_is_unknown():
    found = roles(layers(attention("mixing.attn") | mlp("ff") | {"ff.gate.weight": (7, D)}))
    assert found["ff.gate"] == "unknown" and found["ff.gate_proj"] == "gate"


def test_shared_experts_are_told_from_a_dense_mlp():
    inside = attention("attn") | mlp("ffn.shared_experts") | {"ffn.gate.weight": (4, D)}
    found = roles(layers(inside | mlp("ffn.experts.0") | mlp("ffn.experts.1")), {"model_type": "new"})
    assert [found[f"ffn.shared_experts.{x}_proj"] for x in ("gate", "up", "down")] == [
        "shared_gate", "shared_up", "shared_down",
    ]  # fmt: skip
    assert found["ffn.gate"] == "router"


@pytest.mark.parametrize("config", [None, {"model_type": "switch_transformers", "d_model": D}])
def test_experts_by_name_and_an_mlp_that_ends_in_wo(config):
    """Switch Transformers."""
    inside = attention("layer.0.SelfAttention", "q k v o") | {"layer.1.mlp.router.classifier.weight": (4, D)}
    for e in range(4):
        inside |= mlp(f"layer.1.mlp.experts.expert_{e}", "wi wo")
    found = anatomy.read(layers(inside, "encoder.block") | {"shared.weight": (128, D)}, config)
    assert [part.name.split(".")[-2] for part in found.select("output")] == ["o", "o"]
    pairs = found.pairs("down")
    assert [(p.first.expert, p.second.expert, p.lag) for p in pairs] == [(e, e, 1) for e in range(4)]
    assert len(found.select("router")) == 2 and not found.unknown


def test_up_with_twice_the_rows_that_down_takes_holds_a_gate():
    found = roles(layers(attention("self_attn") | {"ff.up_proj.weight": (2 * F, D), "ff.down_proj.weight": (D, F)}))
    assert found["ff.up_proj"] == "gate+up?" and found["ff.down_proj"] == "down"


def test_the_streams_width_is_not_the_commonest_length():
    inside = {"ff.up_proj.weight": (128, 64), "ff.down_proj.weight": (64, 128), "x.weight": (20, 128), "y.weight": (128, 20)}
    found = anatomy.read(layers(inside, "enc.layers"))
    assert found.family == STRUCTURAL
    assert found.select("up", layer=0)[0].shape == (128, 64) and found.select("down", layer=0)[0].shape == (64, 128)
    # An embedding or a norm outweighs the count as well, for families of the table too.
    inside = attention("self_attn") | mlp("mlp") | {f"adapter{i}.weight": (200, 33) for i in range(9)}
    found = anatomy.read(layers(inside) | {"model.embed_tokens.weight": (500, D)}, {"model_type": "new"})
    assert not [part for part in found.unknown if "adapter" not in part.name]


def test_a_weight_that_a_familys_row_lacks_is_read_by_its_word():
    inside = attention("self_attn") | mlp("mlp", "fc1 fc2")
    found = roles(layers(inside), {"model_type": "new"})
    assert found == {f"self_attn.{x}_proj": r for x, r in zip("qkvo", ("query", "key", "value", "output"))} | {
        "mlp.fc1": "up", "mlp.fc2": "down",
    }  # fmt: skip


def test_queries_alone_need_no_gate():
    """A LoRA folder alone, its targets q_proj and v_proj: rows no wider than the stream hold no gate of Qwen3-Next."""
    found = roles(layers({"self_attn.q_proj.weight": (D, D), "self_attn.v_proj.weight": (32, D)}))
    assert found == {"self_attn.q_proj": "query", "self_attn.v_proj": "value"}
    wide = roles(layers({"self_attn.q_proj.weight": (2 * D, D), "self_attn.v_proj.weight": (32, D)}))
    assert wide["self_attn.q_proj"].endswith("?")


# ------------------------------------------------------------------------------------------------- names


def test_a_layer_number_of_six_thousand_digits():
    shapes = {f"model.layers.{'9' * 6000}.self_attn.q_proj.weight": (D, D), "model.layers.0.self_attn.q_proj.weight": (D, D)}
    assert anatomy.read(shapes).layers() == (0,)
    anatomy.read({f"model.layers.0.mlp.experts.{'7' * 6000}.up_proj.weight": (D, D)})


def test_weights_that_are_kept_as_factors_or_integers_are_no_matrices():
    inside = attention("self_attn")
    for n, name in enumerate(("parametrizations.weight.original1", "weight_v", "W_q")):
        inside[f"mlp.{('gate', 'up', 'down')[n]}_proj.{name}"] = (F, D)
    inside |= {"mlp.gate_proj.parametrizations.weight.original0": (F, 1), "mlp.up_proj.weight_g": (F, 1)}
    found = anatomy.read(layers(inside))
    for role in ("gate", "up", "down"):
        (part, _) = found.select(role)
        assert not part.is_matrix and "packed" in part.doubt
    assert not any(part.role == "query" and "W_q" in part.name for part in found)
    assert {part.role for part in found if "original0" in part.name or "weight_g" in part.name} == {"norm"}


def test_bitsandbytes_bytes_are_no_column():
    names = ("absmax", "quant_map", "quant_state.bitsandbytes__nf4")
    inside = attention("self_attn") | {"self_attn.q_proj.weight": (D * D // 2, 1)}
    inside |= {f"self_attn.q_proj.weight.{name}": (8,) for name in names}
    (part, _) = anatomy.read(layers(inside), {"model_type": "llama"}).select("query")
    assert "packed" in part.doubt and not part.is_matrix


def test_what_is_not_square_is_not_called_so():
    found = anatomy.read(layers({"attn.q_proj.weight": (48, D), "attn.o_proj.weight": (D, 48)}, "units"))
    assert not any("square" in part.doubt for part in found)


# -------------------------------------------------------------------------------------- families by name

CASES = {
    "minimax_m2": (
        attention("self_attn") | {"block_sparse_moe.gate.weight": (2, D)}
        | {f"block_sparse_moe.experts.{e}.{n}": s for e in range(2) for n, s in mlp("", "w1 w3 w2").items()},
        {"block_sparse_moe.gate": "router", "block_sparse_moe.experts.1.w1": "gate", "block_sparse_moe.experts.1.w2": "down"},
    ),
    "granitemoehybrid": (
        attention("self_attn")
        | {"block_sparse_moe.input_linear.weight": (2, 2 * F, D), "block_sparse_moe.output_linear.weight": (2, D, F)}
        | {"block_sparse_moe.router.layer.weight": (2, D), "mamba.in_proj.weight": (300, D), "mamba.out_proj.weight": (D, 128)}
        | {"shared_mlp.input_linear.weight": (2 * F, D), "shared_mlp.output_linear.weight": (D, F)},
        {"block_sparse_moe.input_linear": "gate+up+gate+up", "block_sparse_moe.output_linear": "down+down",
         "block_sparse_moe.router.layer": "router", "shared_mlp.input_linear": "shared_gate+shared_up",
         "shared_mlp.output_linear": "shared_down", "mamba.in_proj": "mixer_in"},
    ),
    "hunyuan_v1_moe": (
        attention("self_attn") | mlp("mlp.shared_mlp") | mlp("mlp.experts.0") | {"mlp.gate.wg.weight": (1, D)},
        {"mlp.gate.wg": "router", "mlp.shared_mlp.up_proj": "shared_up", "mlp.experts.0.up_proj": "up"},
    ),
    "deberta": (
        {"attention.self.in_proj.weight": (3 * D, D), "attention.self.pos_proj.weight": (D, D),
         "attention.output.dense.weight": (D, D)} | mlp("", "intermediate.dense output.dense"),
        {"attention.self.in_proj": "query+key+value", "attention.self.pos_proj": "other", "output.dense": "down"},
    ),
    "deberta-v2": (
        attention("attention", "self.query_proj self.key_proj self.value_proj output.dense")
        | {"attention.self.pos_key_proj.weight": (D, D)} | mlp("", "intermediate.dense output.dense"),
        {"attention.self.key_proj": "key", "attention.self.pos_key_proj": "other", "intermediate.dense": "up"},
    ),
    "mpnet": (
        attention("attention.attn", "q k v o") | mlp("", "intermediate.dense output.dense"),
        {"attention.attn.o": "output", "output.dense": "down"},
    ),
    "wav2vec2": (
        attention("attention", "q_proj k_proj v_proj out_proj")
        | mlp("feed_forward", "intermediate_dense output_dense"),
        {"attention.out_proj": "output", "feed_forward.intermediate_dense": "up", "feed_forward.output_dense": "down"},
    ),
    "dbrx": (
        {"norm_attn_norm.attn.Wqkv.weight": (128, D), "norm_attn_norm.attn.out_proj.weight": (D, D),
         "ffn.router.layer.weight": (2, D), "ffn.experts.mlp.w1": (2 * F, D)},
        {"norm_attn_norm.attn.Wqkv": "query+key+value", "ffn.router.layer": "router", "ffn.experts.mlp.w1": "unknown"},
    ),
    "baichuan": (
        {"self_attn.W_pack.weight": (3 * D, D), "self_attn.o_proj.weight": (D, D)} | mlp("mlp"),
        {"self_attn.W_pack": "query+key+value", "mlp.down_proj": "down"},
    ),
    "qwen": (
        {"attn.c_attn.weight": (3 * D, D), "attn.c_proj.weight": (D, D)} | mlp("mlp", "w1 w2 c_proj"),
        {"attn.c_attn": "query+key+value", "mlp.w1": "up", "mlp.w2": "gate", "mlp.c_proj": "down"},
    ),
    "exaone": (
        attention("attn.attention", "q_proj k_proj v_proj out_proj") | mlp("mlp", "c_fc_0 c_fc_1 c_proj"),
        {"mlp.c_fc_0": "gate", "mlp.c_fc_1": "up", "attn.attention.out_proj": "output"},
    ),
    "nomic_bert": (
        {"attn.Wqkv.weight": (3 * D, D), "attn.out_proj.weight": (D, D)} | mlp("mlp", "fc11 fc12 fc2"),
        {"attn.Wqkv": "query+key+value", "mlp.fc11": "up", "mlp.fc12": "gate", "mlp.fc2": "down"},
    ),
    "gte": (
        {"attention.qkv_proj.weight": (3 * D, D), "attention.o_proj.weight": (D, D),
         "mlp.up_gate_proj.weight": (2 * F, D), "mlp.down_proj.weight": (D, F)},
        {"attention.qkv_proj": "query+key+value", "mlp.up_gate_proj": "up+gate"},
    ),
    "openelm": (
        {"attn.qkv_proj.weight": (D + 64, D), "attn.out_proj.weight": (D, D),
         "ffn.proj_1.weight": (2 * F, D), "ffn.proj_2.weight": (D, F)},
        {"attn.qkv_proj": "query+key+value", "ffn.proj_1": "gate+up", "ffn.proj_2": "down"},
    ),
    "bailing_moe": (
        {"attention.query_key_value.weight": (D + 64, D), "attention.dense.weight": (D, D), "mlp.gate.weight": (1, D)}
        | mlp("mlp.experts.0"),
        {"attention.query_key_value": "query+key+value", "mlp.gate": "router"},
    ),
    "nemotron_h": (
        attention("mixer") | mlp("mixer", "up_proj down_proj") | {"mixer.in_proj.weight": (300, D)},
        {"mixer.q_proj": "query", "mixer.up_proj": "up", "mixer.in_proj": "mixer_in"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CASES)
def test_families_by_name(family):
    inside, expected = CASES[family]
    prefix = "model.encoder.layers" if family == "wav2vec2" else "model.layers"
    found = roles(layers(inside, prefix), {"model_type": family, "num_attention_heads": 4, "hidden_size": D})
    assert {name: found[name] for name in expected} == expected
    assert not [name for name, role in found.items() if role.endswith("?")]


def test_interleaved_gate_and_up_of_phi3_small():
    rows = torch.arange(2 * F)[:, None].expand(-1, D)
    inside = {"self_attn.query_key_value.weight": (D + 64, D), "self_attn.dense.weight": (D, D),
              "mlp.up_proj.weight": (2 * F, D), "mlp.down_proj.weight": (D, F)}  # fmt: skip
    config = {"model_type": "phi3small", "num_attention_heads": 4, "num_key_value_heads": 2}
    found = anatomy.read(layers(inside), config)
    take = {part.role: part.block.take(rows)[:, 0].tolist() for part in found["model.layers.0.mlp.up_proj.weight"]}
    assert take == {"gate": list(range(0, 2 * F, 2)), "up": list(range(1, 2 * F, 2))}
    assert found.select("query", layer=0)[0].shape == (D, D)


# ------------------------------------------------------------------------------------------------- GGUF


def test_gguf_qwen3next_keeps_a_gate_beside_each_query():
    """attn_q: per head 16 rows of the query, then 16 of its gate; linear layers have mixers under attn_qkv and ssm_*."""
    inside = {"attn_q": (128, D), "attn_k": (32, D), "attn_v": (32, D), "attn_output": (D, 64)}
    linear = {"attn_qkv": (160, D), "attn_gate": (96, D), "ssm_ba": (8, D), "ssm_out": (D, 96)}
    shapes = {f"blk.{n}.{name}.weight": s for n in (1, 3) for name, s in inside.items()}
    shapes |= {f"blk.{n}.{name}.weight": s for n in (0, 2) for name, s in linear.items()}
    config = {"general.architecture": "qwen3next", "qwen3next.attention.head_count": 4, "qwen3next.embedding_length": D}
    found = anatomy.read(shapes, config)
    query, gate = found["blk.1.attn_q.weight"]
    rows = torch.arange(128)[:, None].expand(-1, D)
    assert query.role == "query" and gate.role == "query_gate"
    assert query.block.take(rows)[:, 0].tolist() == [r for h in range(4) for r in range(32 * h, 32 * h + 16)]
    assert roles(shapes, config) == {
        "attn_qkv": "mixer_in", "attn_gate": "mixer_gate", "ssm_ba": "mixer_rates", "ssm_out": "mixer_out",
    }  # fmt: skip


def test_gguf_t5_has_two_stacks():
    mine = {f"attn_{x}": (D, D) for x in "qkvo"} | {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    cross = {f"cross_attn_{x}": (D, D) for x in "qkvo"}
    shapes = {f"enc.blk.{n}.{name}.weight": s for n in range(2) for name, s in mine.items()}
    shapes |= {f"dec.blk.{n}.{name}.weight": s for n in range(2) for name, s in (mine | cross).items()}
    shapes |= {"enc.blk.0.attn_rel_b.weight": (4, 32), "token_embd.weight": (99, D)}
    found = anatomy.read(shapes, {"general.architecture": "t5"})
    assert set(found.stacks) == {"encoder", "decoder"} and not found.unknown
    assert len(found.select("output")) == 4 and len(found.select("cross_output")) == 2
    assert not any(part.reads_stream for part in found.select("cross_key"))


def test_gguf_experts_one_by_one():
    shapes = {f"blk.{n}.attn_{x}.weight": (D, D) for n in range(2) for x in ("q", "k", "v", "output")}
    for n in range(2):
        for e in range(3):
            shapes |= {f"blk.{n}.ffn_{x}.{e}.weight": s for x, s in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F)))}
    found = anatomy.read(shapes, {"general.architecture": "llama"})
    assert [(p.first.expert, p.second.expert) for p in found.pairs("down")] == [(0, 0), (1, 1), (2, 2)]
    assert not found.unknown


# ------------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("pre", [True, False])
def test_opt_reads_before_or_after_its_norms_as_its_config_says(pre):
    inside = attention("self_attn", "q_proj k_proj v_proj out_proj") | mlp("", "fc1 fc2")
    inside |= {f"{name}_layer_norm.weight": (D,) for name in ("self_attn", "final")}
    found = anatomy.read(layers(inside), {"model_type": "opt", "do_layer_norm_before": pre, "hidden_size": D})
    query, up = found.select("query", layer=1)[0], found.select("up", layer=1)[0]
    at = "model.layers.{}.{}_layer_norm.weight"
    assert query.norm_before == (at.format(1, "self_attn") if pre else at.format(0, "final"))
    assert up.norm_before == (at.format(1, "final") if pre else at.format(1, "self_attn"))


def test_barts_cross_query_reads_the_norm_after_self_attention():
    inside = attention("self_attn", "q_proj k_proj v_proj out_proj") | mlp("", "fc1 fc2")
    inside |= attention("encoder_attn", "q_proj k_proj v_proj out_proj")
    inside |= {f"{name}_layer_norm.weight": (D,) for name in ("self_attn", "encoder_attn", "final")}
    found = anatomy.read(layers(inside, "model.decoder.layers"), {"model_type": "bart", "d_model": D})
    by = {part.role: part for part in found if part.layer == 1 and part.is_matrix}
    at = "model.decoder.layers.1."
    assert by["cross_query"].norm_before == at + "self_attn_layer_norm.weight"
    assert by["up"].norm_before == at + "encoder_attn_layer_norm.weight"
    assert by["query"].norm_before == "model.decoder.layers.0.final_layer_norm.weight"
    assert by["cross_key"].norm_before is None and not by["cross_key"].reads_stream


# ------------------------------------------------------------------------------------------- live modules


def test_a_fused_linear_under_gpt2s_names_is_in_thirds():
    """nanoGPT, with its own config and with none: a Linear is no Conv1D, and only GPTBigCode groups its rows."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            linear = torch.nn.Linear
            self.ln_1, self.ln_2 = torch.nn.LayerNorm(D), torch.nn.LayerNorm(D)
            self.attn = torch.nn.ModuleDict({"c_attn": linear(D, 3 * D), "c_proj": linear(D, D)})
            self.mlp = torch.nn.ModuleDict({"c_fc": linear(D, 4 * D), "c_proj": linear(4 * D, D)})

    model = torch.nn.ModuleDict({"wte": torch.nn.Embedding(99, D), "h": torch.nn.ModuleList(Block() for _ in range(2))})
    weight = model["h"][0].attn["c_attn"].weight
    for config in (None, {"n_head": 4, "n_embd": D}):
        found = anatomy.read(model, config)
        assert not found.unknown
        for third, role in enumerate(("query", "key", "value")):
            (part, _) = found.select(role)
            torch.testing.assert_close(part.block.take(weight), weight[third * D : (third + 1) * D])
    assert anatomy.read(model, {"n_head": 4}).select("query")[0].heads == 4
