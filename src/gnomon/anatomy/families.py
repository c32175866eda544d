"""The table of families: what each weight inside a repeated layer is.

A row maps the module path inside one layer (numbers replaced by `#`) to a role, or to a `Weight` when the
tensor holds several matrices. Paths match whole, so `output.dense` never catches `attention.output.dense`.
To add a family, write its row beside a similar one (`PHI3` shows fused tensors, `OLMO2` changed norms) and
give tests/test_anatomy_families.py its names.

Facts: transformers 4.57 and 5.24 (names, shapes and splits; tests/test_anatomy_live.py checks the splits
against captured q, k and v), timm, gguf 0.19; ModelTC/lightllm for InternLM2 and ChatGLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

QKV = ("query", "key", "value")
GATE_UP = ("gate", "up")
CROSS = "cross_query cross_key cross_value cross_output"


@dataclass(frozen=True)
class Weight:
    """A weight that is more, or other, than one matrix stored out x in.

    Attributes:
        roles: what it holds, in stored order.
        layout: how the roles are packed, a name in `layouts.LAYOUTS`.
        reads: whether it multiplies the residual stream, where the role's habit does not hold.
        transposed: stored in x out; None to follow the family, or the shape for 3-D experts.
        experts: a leading axis counts experts.
    """

    roles: tuple[str, ...]
    layout: str = "whole"
    reads: bool | None = None
    transposed: bool | None = None
    experts: bool = False


Entry = str | Weight
Entries = dict[str, Entry]


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: also reported as the model's family when no config names a model type.
        types: the `model_type` values of config.json (or GGUF architectures) this row describes.
        roles: module path inside a layer -> role or `Weight`.
        before: role or sublayer -> the norm whose output it reads. Alternatives are separated by spaces and
            tried in order; `^` looks in the previous layer.
        after: sublayer -> the norm its output passes before it joins the stream.
        norm_offset: norms multiply by offset + gain (Gemma stores gain - 1).
        transposed: linear weights are stored in x out (GPT-2's Conv1D).
        stack: what the only stack of such a model is called.
        defaults: what its config.json may leave out.
    """

    name: str
    types: str = ""
    roles: Entries = field(default_factory=dict)
    before: Mapping[str, str] = field(default_factory=dict)
    after: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    transposed: bool = False
    stack: str = "text"
    defaults: Mapping[str, object] = field(default_factory=dict)


def attention(at: str, names: str, roles: str = "query key value output") -> Entries:
    """`attention("self_attn", "q_proj k_proj v_proj o_proj")`"""
    return {f"{at}.{name}".lstrip("."): role for name, role in zip(names.split(), roles.split(), strict=True)}


def fused_attention(at: str, names: str, layout: str = "stacked", roles: tuple[str, ...] = QKV) -> Entries:
    """`fused_attention("self_attn", "qkv_proj o_proj")`: Q, K and V in one tensor."""
    fused, output = names.split()
    return {f"{at}.{fused}": Weight(roles, layout), f"{at}.{output}": "output"}


def mlp(at: str, names: str, prefix: str = "") -> Entries:
    """`mlp("mlp", "up down")` or `mlp("mlp", "gate up down")`; `prefix="shared_"` for a shared expert."""
    paths = [f"{at}.{name}".lstrip(".") for name in names.split()]
    roles = ("gate", "up", "down")[-len(paths) :]
    return {path: prefix + role for path, role in zip(paths, roles, strict=True)}


def fused_mlp(at: str, names: str) -> Entries:
    """`fused_mlp("mlp", "gate_up_proj down_proj")`: gate first, then up."""
    fused, down = names.split()
    return {f"{at}.{fused}": Weight(GATE_UP, "stacked"), f"{at}.{down}": "down"}


def experts(at: str, names: str, layout: str = "stacked", transposed: bool | None = None) -> Entries:
    """Experts one by one (2-D, `names` = gate up down) and all in one (3-D, as transformers 5 holds them)."""
    return mlp(f"{at}.#", names) | {
        f"{at}.gate_up_proj": Weight(GATE_UP, layout, transposed=transposed, experts=True),
        f"{at}.down_proj": Weight(("down",), transposed=transposed, experts=True),
    }


_GATED = "gate_proj up_proj down_proj"
_SELF_ATTN = attention("self_attn", "q_proj k_proj v_proj o_proj")
_LLAMA = _SELF_ATTN | mlp("mlp", _GATED)
_SHARED: Entries = {
    "mlp.shared_expert_gate": "shared_router",
    "mlp.shared_experts.gate_up_proj": Weight(("shared_gate", "shared_up"), "stacked"),
}
for _name in ("shared_expert", "shared_experts", "shared_mlp"):
    _SHARED |= mlp(f"mlp.{_name}", _GATED, "shared_")
_MAMBA: Entries = {
    "mamba.in_proj": "mixer_in",
    "mamba.out_proj": "mixer_out",
    "mamba.x_proj": "other",
    "mamba.dt_proj": "other",
}
_PRE = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
_SAME = {"attention": "input_layernorm", "mlp": "input_layernorm"}
_LN = {"attention": "ln_1", "mlp": "ln_2"}

LLAMA = Family(
    "llama",
    "llama mistral ministral3 qwen2 qwen3 qwen2_vl_text qwen2_5_vl_text qwen3_vl_text olmo smollm3 granite "
    "stablelm seed_oss helium ernie4_5 arcee",
    _LLAMA,
    before=_PRE,
)
GEMMA = replace(LLAMA, name="gemma", types="gemma", norm_offset=1.0)
GEMMA2 = replace(
    LLAMA,
    name="gemma2",
    types="gemma2 gemma3 gemma3_text vaultgemma",
    before={"attention": "input_layernorm", "mlp": "pre_feedforward_layernorm"},
    after={"attention": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"},
    norm_offset=1.0,
)
OLMO2 = replace(LLAMA, name="olmo2", types="olmo2 olmo3 exaone4", before={}, after=GEMMA2.after)
COHERE = replace(LLAMA, name="cohere", types="cohere cohere2", before=_SAME)
NEMOTRON = replace(
    LLAMA,
    name="nemotron",
    types="nemotron",
    roles=_SELF_ATTN | mlp("mlp", "up_proj down_proj"),
    norm_offset=1.0,
)
STARCODER2 = replace(LLAMA, name="starcoder2", types="starcoder2", roles=_SELF_ATTN | mlp("mlp", "c_fc c_proj"))
PHI = Family("phi", "phi", attention("self_attn", "q_proj k_proj v_proj dense") | mlp("mlp", "fc1 fc2"), before=_SAME)
PHI3 = Family(
    "phi3",
    "phi3",
    fused_attention("self_attn", "qkv_proj o_proj") | fused_mlp("mlp", "gate_up_proj down_proj"),
    before=_PRE,
)
GLM = Family("glm", "glm", _SELF_ATTN | fused_mlp("mlp", "gate_up_proj down_proj"), before=_PRE)
GLM4 = replace(
    GLM,
    name="glm4",
    types="glm4",
    after={"attention": "post_self_attn_layernorm", "mlp": "post_mlp_layernorm"},
)
QWEN_MOE = Family(
    "qwen2_moe",
    "qwen2_moe qwen3_moe qwen3_vl_moe_text olmoe glm4_moe dots1",
    _LLAMA | experts("mlp.experts", _GATED) | _SHARED | {"mlp.gate": "router", "mlp.gate.wg": "router"},
    before=_PRE,
)
BAICHUAN = replace(
    LLAMA, name="baichuan", types="baichuan", roles=fused_attention("self_attn", "W_pack o_proj") | mlp("mlp", _GATED)
)
# Even rows gate, odd rows up (gegelu).
PHI3_SMALL = Family(
    "phi3small",
    "phi3small",
    fused_attention("self_attn", "query_key_value dense", "by_group")
    | {"mlp.up_proj": Weight(GATE_UP, "alternating"), "mlp.down_proj": "down"},
    before=_PRE,
)
MOSHI = replace(LLAMA, name="moshi", types="moshi", roles=_SELF_ATTN | fused_mlp("mlp", "fc1 fc2"))
BAILING = replace(
    QWEN_MOE,
    name="bailing_moe",
    types="bailing_moe bailing_moe_v2 sarvam_moe",
    roles=fused_attention("attention", "query_key_value dense")
    | attention("attention", "q_proj k_proj v_proj dense")
    | {path: role for path, role in QWEN_MOE.roles.items() if path.startswith("mlp.")},
)
ARIA = replace(
    QWEN_MOE,
    name="aria",
    types="aria_text",
    roles=QWEN_MOE.roles
    | {
        "mlp.experts.fc1": Weight(GATE_UP, "stacked", transposed=True, experts=True),
        "mlp.experts.fc2": Weight(("down",), transposed=True, experts=True),
        "mlp.router": "router",
    },
)
MIXTRAL = Family(
    "mixtral",
    "mixtral phimoe",
    _SELF_ATTN
    | experts("block_sparse_moe.experts", "w1 w3 w2", transposed=False)
    | experts("mlp.experts", "w1 w3 w2", transposed=False)
    | {path: "router" for path in ("block_sparse_moe.gate", "block_sparse_moe.router", "mlp.gate", "mlp.router")},
    before=_PRE,
)
MINIMAX_M2 = replace(QWEN_MOE, name="minimax_m2", types="minimax_m2", roles=QWEN_MOE.roles | MIXTRAL.roles)
GRANITE_MOE = replace(
    MIXTRAL,
    name="granitemoe",
    types="granitemoe granitemoehybrid granitemoeshared granitemoe_swa",
    roles=MIXTRAL.roles
    | _MAMBA
    | {
        "block_sparse_moe.input_linear": Weight(GATE_UP, "stacked", transposed=False, experts=True),
        "block_sparse_moe.output_linear": Weight(("down",), transposed=False, experts=True),
        "block_sparse_moe.router.layer": "router",
        "shared_mlp.input_linear": Weight(("shared_gate", "shared_up"), "stacked"),
        "shared_mlp.output_linear": "shared_down",
    },
    before=_PRE | {"mixer": "input_layernorm"},
)
DEEPSEEK = replace(
    QWEN_MOE,
    name="deepseek_v3",
    types="deepseek_v2 deepseek_v3",
    roles=QWEN_MOE.roles
    | {
        "self_attn.q_a_proj": "latent_query",
        "self_attn.q_b_proj": Weight(("query",), reads=False),
        "self_attn.kv_a_proj_with_mqa": Weight(("latent_key_value", "key_rope"), "latent_rope"),
        "self_attn.kv_b_proj": Weight(("key", "value"), "nope_value", reads=False),
    },
    before=_PRE
    | {
        "query": "self_attn.q_a_layernorm input_layernorm",
        "key": "self_attn.kv_a_layernorm",
        "value": "self_attn.kv_a_layernorm",
    },
)
GPT_OSS = Family(
    "gpt_oss",
    "gpt_oss",
    _SELF_ATTN | experts("mlp.experts", _GATED, "alternating", transposed=True) | {"mlp.router": "router"},
    before=_PRE,
)
LLAMA4 = Family(
    "llama4",
    "llama4 llama4_text",
    _SELF_ATTN
    | mlp("feed_forward", _GATED)
    | mlp("feed_forward.shared_expert", _GATED, "shared_")
    | experts("feed_forward.experts", _GATED, transposed=True)
    | {"feed_forward.router": "router"},
    before=_PRE,
)
# The query rows of each head are followed by those of its output gate.
QWEN3_NEXT = replace(
    QWEN_MOE,
    name="qwen3_next",
    types="qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text",
    roles=QWEN_MOE.roles
    | {"self_attn.q_proj": Weight(("query", "query_gate"), "gated_by_head"), "linear_attn.out_proj": "mixer_out"}
    | {"linear_attn.in_proj_qkvz": "mixer_in", "linear_attn.in_proj_qkv": "mixer_in"}
    | {"linear_attn.in_proj_z": "mixer_gate"}
    | {f"linear_attn.in_proj_{part}": "mixer_rates" for part in ("ba", "b", "a")},
    before=_PRE | {"mixer": "input_layernorm"},
    norm_offset=1.0,
)
JAMBA = Family(
    "jamba",
    "jamba falcon_h1",
    _SELF_ATTN
    | mlp("feed_forward", _GATED)
    | experts("feed_forward.experts", _GATED)
    | _MAMBA
    | {"feed_forward.router": "router"},
    before={"attention": "input_layernorm", "mixer": "input_layernorm", "mlp": "pre_ff_layernorm"},
)
LFM2 = Family(
    "lfm2",
    "lfm2",
    attention("self_attn", "q_proj k_proj v_proj out_proj")
    | mlp("feed_forward", "w1 w3 w2")
    | {"conv.in_proj": "mixer_in", "conv.out_proj": "mixer_out"},
    before={"attention": "operator_norm", "mixer": "operator_norm", "mlp": "ffn_norm"},
)
NEMOTRON_H = Family(
    "nemotron_h",
    "nemotron_h",
    attention("mixer", "q_proj k_proj v_proj o_proj")
    | mlp("mixer", "up_proj down_proj")
    | mlp("mixer.experts.#", "up_proj down_proj")
    | mlp("mixer.shared_experts", "up_proj down_proj", "shared_")
    | {
        "mixer.experts.up_proj": Weight(("up",), experts=True),
        "mixer.experts.down_proj": Weight(("down",), experts=True),
        "mixer.gate": "router",
        "mixer.in_proj": "mixer_in",
        "mixer.out_proj": "mixer_out",
    },
    before={"attention": "norm", "mlp": "norm", "mixer": "norm"},
)
GPT2 = Family(
    "gpt2",
    "gpt2 openai-gpt",
    fused_attention("attn", "c_attn c_proj") | mlp("mlp", "c_fc c_proj"),
    before=_LN,
    transposed=True,
)
NANOGPT = replace(GPT2, name="nanogpt", types="nanogpt", transposed=False)
# The same names a third time: rows by group of queries, out x in.
GPT_BIGCODE = replace(
    GPT2,
    name="gpt_bigcode",
    types="gpt_bigcode",
    roles=fused_attention("attn", "c_attn c_proj", "by_group") | mlp("mlp", "c_fc c_proj"),
    transposed=False,
    defaults={"multi_query": True},
)
GPT_NEO = Family(
    "gpt_neo",
    "gpt_neo",
    attention("attn.attention", "q_proj k_proj v_proj out_proj") | mlp("mlp", "c_fc c_proj"),
    before=_LN,
)
EXAONE = replace(
    GPT_NEO,
    name="exaone",
    types="exaone",
    roles=attention("attn.attention", "q_proj k_proj v_proj out_proj") | mlp("mlp", "c_fc_0 c_fc_1 c_proj"),
)
# a = w1 x, b = w2 x, a silu(b): the second is the gate.
QWEN1 = Family(
    "qwen",
    "qwen",
    fused_attention("attn", "c_attn c_proj") | mlp("mlp", "w2 w1 c_proj"),
    before=_LN,
)
CTRL = Family(
    "ctrl",
    "ctrl",
    attention("multi_head_attention", "Wq Wk Wv dense"),
    before={"attention": "layernorm1"},
)
GPTJ = Family(
    "gptj",
    "gptj",
    attention("attn", "q_proj k_proj v_proj out_proj") | mlp("mlp", "fc_in fc_out"),
    before={"attention": "ln_1", "mlp": "ln_1"},
)
CODEGEN = replace(
    GPTJ,
    name="codegen",
    types="codegen",
    roles=fused_attention("attn", "qkv_proj out_proj", "shards", ("query", "value", "key"))
    | mlp("mlp", "fc_in fc_out"),
)
GPT_NEOX = Family(
    "gpt_neox",
    "gpt_neox",
    fused_attention("attention", "query_key_value dense", "by_head") | mlp("mlp", "dense_h_to_4h dense_4h_to_h"),
    before=_PRE,
)
BLOOM = replace(
    GPT_NEOX,
    name="bloom",
    types="bloom",
    roles=fused_attention("self_attention", "query_key_value dense", "by_head")
    | mlp("mlp", "dense_h_to_4h dense_4h_to_h"),
)
FALCON = replace(
    BLOOM,
    name="falcon",
    types="falcon RefinedWeb RefinedWebModel",
    roles=BLOOM.roles | fused_attention("self_attention", "query_key_value dense", "by_group"),
    before={
        "attention": "ln_attn input_layernorm",
        "mlp": "ln_mlp post_attention_layernorm input_layernorm",
    },
    defaults={"multi_query": True},
)
CHATGLM = replace(
    BLOOM,
    name="chatglm",
    types="chatglm",
    roles=fused_attention("self_attention", "query_key_value dense") | fused_mlp("mlp", "dense_h_to_4h dense_4h_to_h"),
)
PERSIMMON = replace(
    BLOOM,
    name="persimmon",
    types="persimmon",
    roles=fused_attention("self_attn", "query_key_value dense", "by_head") | mlp("mlp", "dense_h_to_4h dense_4h_to_h"),
)
MPT = Family(
    "mpt",
    "mpt",
    fused_attention("attn", "Wqkv out_proj") | mlp("ffn", "up_proj down_proj"),
    before={"attention": "norm_1", "mlp": "norm_2"},
)
OPENELM = Family(
    "openelm",
    "openelm",
    fused_attention("attn", "qkv_proj out_proj") | fused_mlp("ffn", "proj_1 proj_2"),
    before={"attention": "attn_norm", "mlp": "ffn_norm"},
)
# The experts' w1, v1 and w2 are one matrix each for all of them, and stay unknown.
DBRX = Family(
    "dbrx",
    "dbrx",
    fused_attention("norm_attn_norm.attn", "Wqkv out_proj") | {"ffn.router.layer": "router"},
    before={"attention": "norm_attn_norm.norm_1", "router": "norm_attn_norm.norm_2"},
)
INTERNLM2 = Family(
    "internlm2",
    "internlm2",
    fused_attention("attention", "wqkv wo", "by_group") | mlp("feed_forward", "w1 w3 w2"),
    before={"attention": "attention_norm", "mlp": "ffn_norm"},
)
LLAMA_ORIGINAL = Family(
    "llama (original)",
    "",
    attention("attention", "wq wk wv wo") | mlp("feed_forward", "w1 w3 w2"),
    before={"attention": "attention_norm", "mlp": "ffn_norm"},
)
_BART = (
    attention("self_attn", "q_proj k_proj v_proj out_proj")
    | attention("encoder_attn", "q_proj k_proj v_proj out_proj", CROSS)
    | mlp("", "fc1 fc2")
)
OPT = Family(
    "opt",
    "opt whisper xglm mbart m2m_100 pegasus speech_to_text biogpt",
    _BART,
    before={
        "attention": "self_attn_layer_norm",
        "cross_query": "encoder_attn_layer_norm",
        "mlp": "final_layer_norm",
    },
)
_POST_NORM = {
    "attention": "^final_layer_norm",
    "cross_query": "self_attn_layer_norm",
    "mlp": "encoder_attn_layer_norm self_attn_layer_norm",
}
# opt-350m
OPT_POST_NORM = replace(OPT, types="", before=_POST_NORM)
BART = Family(
    "bart",
    "bart blenderbot-small marian",
    _BART,
    before=_POST_NORM,
)
T5 = Family(
    "t5",
    "t5 mt5 umt5 switch_transformers",
    attention("layer.#.SelfAttention", "q k v o")
    | attention("layer.#.EncDecAttention", "q k v o", CROSS)
    | mlp("layer.#.DenseReluDense", "wi wo")
    | mlp("layer.#.DenseReluDense", "wi_0 wi_1 wo")
    | mlp("layer.#.mlp", "wi wo")
    | mlp("layer.#.mlp.experts.#", "wi wo")
    | {"layer.#.mlp.router.classifier": "router"},
    before={
        "attention": "layer.0.layer_norm",
        "cross_query": "layer.1.layer_norm",
        "mlp": "layer.2.layer_norm layer.1.layer_norm",
    },
)
_BERT = attention("attention", "self.query self.key self.value output.dense") | mlp(
    "", "intermediate.dense output.dense"
)
BERT = Family(
    "bert",
    "bert roberta xlm-roberta camembert electra ernie layoutlm",
    _BERT | attention("crossattention", "self.query self.key self.value output.dense", CROSS),
    before={"attention": "^output.LayerNorm", "mlp": "attention.output.LayerNorm"},
)
_DEBERTA_POSITIONS = ("pos_proj", "pos_q_proj", "pos_key_proj", "pos_query_proj")
DEBERTA = replace(
    BERT,
    name="deberta",
    types="deberta deberta-v2",
    roles=fused_attention("attention", "self.in_proj output.dense", "by_head")
    | attention("attention", "self.query_proj self.key_proj self.value_proj output.dense")
    | mlp("", "intermediate.dense output.dense")
    | {f"attention.self.{name}": "other" for name in _DEBERTA_POSITIONS},
)
MPNET = replace(
    BERT,
    name="mpnet",
    types="mpnet",
    roles=attention("attention.attn", "q k v o") | mlp("", "intermediate.dense output.dense"),
    before={"attention": "^output.LayerNorm", "mlp": "attention.LayerNorm"},
)
# up * act(gate)
NOMIC = Family("nomic_bert", "nomic_bert", fused_attention("attn", "Wqkv out_proj") | mlp("mlp", "fc12 fc11 fc2"))
GTE = Family(
    "gte",
    "gte new",
    fused_attention("attention", "qkv_proj o_proj")
    | {"mlp.up_gate_proj": Weight(("up", "gate"), "stacked"), "mlp.down_proj": "down"},
    before={"attention": "^mlp_ln", "mlp": "attn_ln"},
)
JINA = replace(
    BERT,
    name="jina_embeddings_v3",
    types="jina_embeddings_v3",
    roles=fused_attention("mixer", "Wqkv out_proj") | _SELF_ATTN | mlp("mlp", "fc1 fc2"),
    before={},
)
# Its time mixing is linear attention; channel mixing squares what "key" gives.
RWKV = Family(
    "rwkv",
    "rwkv",
    attention("attention", "key value output receptance", "key value output mixer_gate")
    | mlp("feed_forward", "key value")
    | {"feed_forward.receptance": "other"},
    before={"attention": "ln1", "mixer": "ln1", "mlp": "ln2"},
)
# do_stable_layer_norm decides whether these read before or after their norms.
WAV2VEC2 = Family(
    "wav2vec2",
    "wav2vec2 hubert wavlm data2vec-audio unispeech unispeech-sat sew",
    attention("attention", "q_proj k_proj v_proj out_proj")
    | mlp("feed_forward", "intermediate_dense output_dense")
    | {"attention.gru_rel_pos_linear": "other"},
    stack="audio",
)
# Attention and MLP layers in two lists beside each other.
XLM = Family("xlm", "xlm flaubert", attention("", "q_lin k_lin v_lin out_lin") | mlp("", "lin1 lin2"))
DISTILBERT = Family(
    "distilbert",
    "distilbert",
    attention("attention", "q_lin k_lin v_lin out_lin") | mlp("ffn", "lin1 lin2"),
    before={"attention": "^output_layer_norm", "mlp": "sa_layer_norm"},
)
ALBERT = Family(
    "albert",
    "albert",
    attention("albert_layers.#.attention", "query key value dense") | mlp("albert_layers.#", "ffn ffn_output"),
    before={"mlp": "albert_layers.0.attention.LayerNorm"},
)
# The half that passes through the activation comes first, whatever the code calls it.
MODERNBERT = Family(
    "modernbert",
    "modernbert modernbert-decoder",
    fused_attention("attn", "Wqkv Wo") | attention("attn", "q_proj k_proj v_proj Wo") | fused_mlp("mlp", "Wi Wo"),
    before={"attention": "attn_norm", "mlp": "mlp_norm"},
)
_VIT_NORMS = {"attention": "layernorm_before norm1", "mlp": "layernorm_after norm2"}
VIT = Family(
    "vit",
    "vit deit vit_mae vit_msn",
    attention("attention", "attention.query attention.key attention.value output.dense")
    | mlp("", "intermediate.dense output.dense")
    | attention("attention", "q_proj k_proj v_proj o_proj")
    | mlp("mlp", "fc1 fc2"),
    before=_VIT_NORMS,
    stack="vision",
)
DINOV2 = Family(
    "dinov2",
    "dinov2 dinov2_with_registers",
    attention("attention", "attention.query attention.key attention.value output.dense")
    | attention("attention", "q_proj k_proj v_proj o_proj")
    | mlp("mlp", "fc1 fc2")
    | fused_mlp("mlp", "weights_in weights_out"),
    before=_VIT_NORMS,
    stack="vision",
)
TIMM = Family(
    "timm",
    "timm qwen2_vl_vision qwen2_5_vl_vision qwen3_vl_vision qwen3_vl_moe_vision qwen3_5_vision",
    fused_attention("attn", "qkv proj")
    | mlp("mlp", "fc1 fc2")
    | mlp("mlp", "linear_fc1 linear_fc2")
    | mlp("mlp", _GATED),
    before={"attention": "norm1", "mlp": "norm2"},
    stack="vision",
)
CLIP = Family(
    "clip",
    "clip clip_text_model clip_vision_model siglip siglip_vision_model siglip2 siglip2_vision_model",
    attention("self_attn", "q_proj k_proj v_proj out_proj") | mlp("mlp", "fc1 fc2"),
    before={"attention": "layer_norm1", "mlp": "layer_norm2"},
)
OPENCLIP = Family(
    "open_clip",
    "",
    fused_attention("attn", "in_proj out_proj") | mlp("mlp", "c_fc c_proj"),
    before=_LN,
)
# norm_first decides whether these read before or after their norms; the weights do not tell.
TORCH = Family(
    "torch.nn.Transformer",
    "",
    fused_attention("self_attn", "in_proj out_proj")
    | fused_attention("multihead_attn", "in_proj out_proj", roles=("cross_query", "cross_key", "cross_value"))
    | mlp("", "linear1 linear2")
    | {"multihead_attn.out_proj": "cross_output"},
    stack="main",
)
NANOCHAT = Family(
    "nanochat",
    "",
    attention("attn", "c_q c_k c_v c_proj") | mlp("mlp", "c_fc c_proj") | {"attn.ve_gate": "other"},
)
# Converters store every architecture under these names, fused tensors already taken apart into thirds.
GGUF = Family(
    "gguf",
    "gguf",
    {"attn_q": "query", "attn_k": "key", "attn_v": "value", "attn_output": "output"}
    | mlp("", "ffn_gate ffn_up ffn_down")
    | mlp("", "ffn_gate_shexp ffn_up_shexp ffn_down_shexp", "shared_")
    | {
        "attn_qkv": Weight(QKV, "stacked"),
        "ffn_up": Weight(GATE_UP, "stacked_if_double"),
        "ffn_gate_exps": Weight(("gate",), transposed=False, experts=True),
        "ffn_up_exps": Weight(("up",), transposed=False, experts=True),
        "ffn_down_exps": Weight(("down",), transposed=False, experts=True),
        "ffn_gate_inp": "router",
        "ffn_gate_inp_shexp": "shared_router",
        "attn_q_a": "latent_query",
        "attn_q_b": Weight(("query",), reads=False),
        "attn_kv_a_mqa": Weight(("latent_key_value", "key_rope"), "latent_rope"),
        "attn_kv_b": Weight(("key", "value"), "nope_value", reads=False),
        "ssm_in": "mixer_in",
        "ssm_out": "mixer_out",
        "attn_o": "output",
        "attn_rel_b": "scalar",
    }
    | attention("", "cross_attn_q cross_attn_k cross_attn_v cross_attn_o", CROSS)
    | mlp("", "ffn_gate.# ffn_up.# ffn_down.#"),
    before={
        "attention": "attn_norm",
        "cross_query": "cross_attn_norm",
        "mlp": "ffn_norm",
        "query": "attn_q_a_norm attn_norm",
        "mixer": "attn_norm",
    },
    after={"attention": "post_attention_norm", "mlp": "post_ffw_norm"},
)
GGUF_QWEN3_NEXT = replace(
    GGUF,
    name="gguf qwen3next",
    types="gguf:qwen3next gguf:qwen35 gguf:qwen35moe",
    roles=GGUF.roles
    | {
        "attn_q": Weight(("query", "query_gate"), "gated_by_head"),
        "attn_qkv": "mixer_in",
        "attn_gate": "mixer_gate",
        "ssm_ba": "mixer_rates",
        "ssm_beta": "mixer_rates",
        "ssm_alpha": "mixer_rates",
    },
)
GNOMON = Family(
    "gnomon",
    "gnomon",
    attention("attention", "query key value output")
    | fused_attention("attention", "qkv output")
    | mlp("mlp", "gate up down")
    | fused_mlp("mlp", "gate_up down"),
    # What `after` normalises, branch or sum, depends on the residual, which names do not tell.
    before={"attention": "join_attention.before", "mlp": "join_mlp.before"},
)
GNOMON_MLP = Family("gnomon_mlp", "gnomon_mlp", {"linear": "linear"}, before={"mlp": "norm"}, stack="main")

# When names alone cannot tell two rows apart, the first is named and what they disagree on is left open.
FAMILIES: tuple[Family, ...] = (
    *(LLAMA, GEMMA, GEMMA2, OLMO2, COHERE, NEMOTRON, STARCODER2, PHI, PHI3, GLM, GLM4, BAICHUAN, PHI3_SMALL, MOSHI),
    *(QWEN_MOE, MIXTRAL, DEEPSEEK, GPT_OSS, LLAMA4, QWEN3_NEXT, JAMBA, LFM2, MINIMAX_M2, GRANITE_MOE),
    *(GPT2, NANOGPT, GPT_BIGCODE, GPT_NEO, GPTJ, CODEGEN, GPT_NEOX, BLOOM, FALCON, CHATGLM, PERSIMMON, MPT),
    *(INTERNLM2, LLAMA_ORIGINAL, OPT, BART, T5, BERT, DISTILBERT, ALBERT, MODERNBERT),
    *(NEMOTRON_H, EXAONE, QWEN1, CTRL, OPENELM, DBRX, DEBERTA, MPNET, NOMIC, GTE, JINA, RWKV, WAV2VEC2, XLM),
    *(VIT, DINOV2, TIMM, CLIP, OPENCLIP, TORCH, NANOCHAT, GGUF, GGUF_QWEN3_NEXT, GNOMON, GNOMON_MLP),
)
# Bailing has GPT-NeoX's names and Aria GPT-OSS's, in other orders of rows: read so only where the config says it.
_BY_TYPE: dict[str, Family] = {kind: family for family in (*FAMILIES, BAILING, ARIA) for kind in family.types.split()}


def family_of_type(model_type: str | None) -> Family | None:
    """The row of a config's `model_type`; GGUF architectures of which nothing special is known share one."""
    kind = str(model_type or "")
    return _BY_TYPE.get(kind) or (GGUF if kind.startswith("gguf:") else None)


# Weights that stand outside the repeated layers, by the end of their path; `^` anchors the beginning.
OUTSIDE: dict[str, Entry] = {
    path: role
    for role, paths in {
        "embedding": "embed_tokens wte word_embeddings embed_in tok_embeddings token_embd shared ^embed "
        "token_embedding token_type_embeddings token_types tokens_embed embed tok_emb "
        "cls_token class_token class_embedding mask_token dist_token distillation_token register_tokens",
        "positions": "wpe position_embeddings position_embedding embed_positions ^positions pos_embed "
        "position_embd positions_embed positional_embedding",
        "head": "lm_head embed_out proj_out ^output cls.predictions.decoder lm_head.decoder vocab_projector "
        "predictions.decoder ^head classifier score qa_outputs cls.seq_relationship shared_head.head "
        "^decoder output_layer output_projection generator_lm_head",
        "other": "lm_head.dense predictions.transform.dense vocab_transform predictions.dense pooler.dense "
        "pooler embedding_hidden_mapping_in project_in project_out multi_modal_projector.linear_1 "
        "multi_modal_projector.linear_2 text_projection visual_projection mtp.fc pre_classifier "
        "embeddings_project generator_predictions.dense",
    }.items()
    for path in paths.split()
} | {"^input": Weight(("embedding",), transposed=False)}

# The same for weights a multi-token-prediction layer keeps inside itself.
INSIDE: dict[str, Entry] = {"eh_proj": "other", "shared_head.head": "head", "embed_tokens": "embedding"}
