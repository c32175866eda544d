"""Live models of transformers: what the anatomy takes out of a tensor is what attention and MLP compute with."""

from __future__ import annotations

import copy

import pytest
import torch

from gnomon import anatomy

transformers = pytest.importorskip("transformers", reason='needs pip install "gnomon[hf]"')
from transformers import AttentionInterface  # noqa: E402

SMALL = dict(
    vocab_size=61, hidden_size=96, num_hidden_layers=2, num_attention_heads=6, intermediate_size=160, pad_token_id=0
)
GQA = SMALL | dict(num_key_value_heads=2)
GPT = dict(vocab_size=61, n_embd=96, n_layer=2, n_head=6, n_positions=64)
ROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
MOE = GQA | ROPE | dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40)
MLA = SMALL | dict(
    num_key_value_heads=6,
    q_lora_rank=32,
    kv_lora_rank=28,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=14,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=40,
    first_k_dense_replace=1,
)
CODEGEN = dict(vocab_size=61, n_embd=96, n_layer=2, n_head=8, n_positions=64, rotary_dim=4)
# CodeGen's four shards need a number of heads that four divides.

MODELS = {
    "gpt2": ("gpt2", GPT),
    "gpt_neox": ("gpt_neox", SMALL),
    "bloom": ("bloom", dict(vocab_size=61, hidden_size=96, n_layer=2, n_head=6)),
    "falcon-7b": ("falcon", SMALL | dict(multi_query=True, new_decoder_architecture=False)),
    "falcon-rw": ("falcon", SMALL | dict(multi_query=False, new_decoder_architecture=False, alibi=True)),
    "falcon-40b": ("falcon", SMALL | dict(new_decoder_architecture=True, num_kv_heads=2)),
    "phi3": ("phi3", GQA),
    "gpt_bigcode": ("gpt_bigcode", GPT | dict(multi_query=True)),
    "gpt_bigcode, a key each": ("gpt_bigcode", GPT | dict(multi_query=False)),
    "codegen": ("codegen", CODEGEN),
    "mpt": ("mpt", dict(vocab_size=61, d_model=96, n_heads=6, n_layers=2, max_seq_len=64)),
    "modernbert": ("modernbert", SMALL | dict(cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)),
    "llama": ("llama", GQA),
    "qwen3": ("qwen3", GQA | dict(head_dim=24)),
    "qwen3_next": ("qwen3_next", MOE | dict(head_dim=24, layer_types=["full_attention", "full_attention"])),
    "mixtral": ("mixtral", MOE),
    "gpt_oss": ("gpt_oss", MOE | dict(head_dim=24)),
    "llama4_text": (
        "llama4_text",
        MOE | dict(head_dim=24, interleave_moe_layer_step=1, num_experts_per_tok=1, use_qk_norm=False),
    ),
    "deepseek_v3": ("deepseek_v3", MLA),
    "gpt_neo": (
        "gpt_neo",
        dict(vocab_size=61, hidden_size=96, num_layers=2, num_heads=6, attention_types=[[["global"], 2]]),
    ),
}


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    return {name: build(*MODELS[name]) for name in MODELS}


def build(model_type, settings):
    config = transformers.AutoConfig.for_model(model_type, **settings)
    auto = transformers.AutoModel if model_type == "modernbert" else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.3)
        if name.endswith("bias"):
            parameter.data.zero_()
    return model


def captured(model, model_type, monkeypatch):
    """layer -> (q, k, v) as attention receives them, each (tokens, heads, head_dim), all at position 0."""
    seen = {}

    def keep(module, query, key, value, *args, **kwargs):
        layer = getattr(module, "layer_idx", None)
        seen[len(seen) if layer is None else layer] = tuple(t[0].transpose(0, 1) for t in (query, key, value))
        groups = query.shape[1] // value.shape[1] if value.shape[1] < query.shape[1] else 1
        return value.repeat_interleave(groups, 1).transpose(1, 2), None

    AttentionInterface.register("keep", keep)
    ids = torch.tensor([[5, 7, 11]])
    extra = {"position_ids": torch.zeros_like(ids)} if model_type not in ("bloom", "mpt") else {}
    if model_type in ("bloom", "falcon"):  # no attention interface: look at what the split returns
        for module in model.modules():
            split = getattr(module, "_reshape", None) or getattr(module, "_split_heads", None)
            if split is not None and hasattr(module, "query_key_value"):
                monkeypatch.setattr(module, split.__name__, watch(split, seen, module), raising=True)
        model(ids, **extra)
    elif model_type == "mpt":
        multiply = torch.matmul
        products = []
        monkeypatch.setattr(torch, "matmul", lambda a, b: products.append((a, b)) or multiply(a, b))
        model(ids, **extra)
        pairs = zip(products[::2], products[1::2])
        for layer, ((query, key), (_, value)) in enumerate(pairs):
            seen[layer] = tuple(t[0].transpose(0, 1) for t in (query, key.transpose(-1, -2), value))
    else:
        model.config._attn_implementation = "keep"
        model(ids, **extra)
    return seen


def watch(split, seen, module):
    def watched(fused):
        parts = split(fused)
        # Bloom returns (batch, heads, tokens, channels), Falcon (batch, tokens, heads, channels).
        axis = 0 if split.__name__ == "_split_heads" else 1
        seen[module.layer_idx] = tuple(t[0].transpose(0, 1) if axis else t[0] for t in parts)
        return parts

    return watched


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt_neo"])  # it has no seam
def test_parts_reproduce_the_queries_keys_and_values_of_attention(name, models, monkeypatch):
    model, model_type = copy.deepcopy(models[name]), MODELS[name][0]
    for module in model.modules():
        for norm in ("q_norm", "k_norm"):  # some families normalise q and k before attention
            if hasattr(module, norm):
                setattr(module, norm, torch.nn.Identity())
    inputs = {}
    hooks = [
        module.register_forward_pre_hook(lambda module, args, n=n: inputs.__setitem__(n, args[0]))
        for n, module in model.named_modules()
        if n and hasattr(module, "weight") and "norm" not in n
    ]
    seen = captured(model, model_type, monkeypatch)
    for hook in hooks:
        hook.remove()
    found = anatomy.read(models[name])
    assert found.family == model_type and not found.unknown
    checked = 0
    for layer, truth in seen.items():
        for role, expected in zip(("query", "key", "value"), truth):
            (part,) = found.select(role, layer=layer)
            weight = part.block.take(model.get_parameter(part.name))
            x = inputs[part.name.removesuffix(".weight")]
            got = (x.flatten(0, -2) @ weight.T).unflatten(-1, (part.heads, part.head_dim))
            if model_type == "deepseek_v3" and role != "value":  # the rest of each head is rotated, and reordered
                expected, got = expected[..., :12], got[..., :12]
            if expected.shape[1] > got.shape[1]:  # keys and values already repeated for each query
                got = got.repeat_interleave(expected.shape[1] // got.shape[1], 1)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            checked += 1
    assert checked == 6


@torch.no_grad()
@pytest.mark.parametrize("name", ["phi3", "modernbert", "llama", "gpt2", "gpt_bigcode", "codegen"])
def test_gate_and_up_reproduce_the_input_of_down(name, models):
    model = models[name]
    found = anatomy.read(model)
    gated = "gate" in found.by_role
    (down,) = found.select("down", layer=0)
    (up,) = found.select("up", layer=0)
    inputs = {}
    hooks = [
        model.get_submodule(part.name.removesuffix(".weight")).register_forward_pre_hook(
            lambda module, args, role=part.role: inputs.__setitem__(role, args[0])
        )
        for part in (up, down)
    ]
    model(torch.tensor([[5, 7, 11]]))
    for hook in hooks:
        hook.remove()
    act = getattr(model.config, "hidden_activation", None) or getattr(model.config, "hidden_act", None)
    act = transformers.activations.ACT2FN[act or model.config.activation_function]

    def times(part):
        return inputs["up"] @ part.block.take(model.get_parameter(part.name)).T

    expected = act(times(*found.select("gate", layer=0))) * times(up) if gated else act(times(up))
    torch.testing.assert_close(expected, inputs["down"], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4_text", "qwen3_next"])
def test_each_expert_of_a_fused_tensor(name, models):
    """transformers 5 keeps experts in one 3-D tensor, out x in or in x out, halved or interleaved."""
    model = models[name]
    found = anatomy.read(model)
    (first, *_) = [part for part in found if part.role == "gate" and part.layer == 0]
    experts = model.get_submodule(first.name.rpartition(".")[0])
    x = torch.randn(5, 96) / 10
    for expert in (0, 3):
        gate, up, down = (
            part.block.take(model.get_parameter(part.name))
            for role in ("gate", "up", "down")
            for part in found.select(role, layer=0)
            if part.expert == expert
        )
        if name == "llama4_text":
            got = experts(x.repeat(4, 1)).view(4, 5, 96)[expert]
        else:
            chosen = torch.full((5, 1), expert)
            got = experts(x, chosen, torch.ones(5, 1))
        g, u = x @ gate.T, x @ up.T
        inner = g * torch.sigmoid(1.702 * g) * (u + 1) if name == "gpt_oss" else torch.nn.functional.silu(g) * u
        torch.testing.assert_close(got, inner @ down.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_covered_exactly_once(name, models):
    model = models[name]
    found = anatomy.read(model)
    owned = [part for part in found if part.tied_to is None]
    assert {part.name for part in owned} == dict(model.named_parameters()).keys()
    for parameter_name, parameter in model.named_parameters():
        count = torch.zeros_like(parameter)
        for part in found[parameter_name]:
            block = part.block.take(count)
            part.block.put(count, block + 1)
        assert (count == 1).all(), parameter_name


def test_tied_parameters_are_told_by_identity():
    tied, untied = (build("gpt2", GPT | dict(tie_word_embeddings=tie)) for tie in (True, False))
    (head,) = anatomy.read(tied).select("head")
    assert head.name == "lm_head.weight" and head.tied_to == "transformer.wte.weight"
    (head,) = anatomy.read(untied).select("head")
    assert head.tied_to is None and head.reads_stream and head.shape == (61, 96)


def test_module_types_outrank_names():
    """GPT-2's names on nn.Linear modules (nanoGPT, CLIP) are out x in; on Conv1D they are in x out."""

    class Block(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.attn = torch.nn.ModuleDict({"c_attn": linear(96, 288), "c_proj": linear(96, 96)})
            self.mlp = torch.nn.ModuleDict({"c_fc": linear(96, 96), "c_proj": linear(96, 96)})

    conv1d = transformers.pytorch_utils.Conv1D
    for linear, transposed in (
        (lambda i, o: conv1d(o, i), True),
        (lambda i, o: torch.nn.Linear(i, o, bias=False), False),
    ):
        model = torch.nn.ModuleDict({"h": torch.nn.ModuleList(Block(linear) for _ in range(2))})
        found = anatomy.read(model, {"n_head": 6, "model_type": "gpt2" if transposed else "nanogpt"})
        assert {part.block.transposed for part in found if part.is_matrix} == {transposed}
        assert len(found.select("query")) == 2 and not found.unknown
        for block in model["h"]:
            del block.attn["c_attn"]
        square = anatomy.read(model)  # neither a config nor a shape tells, the modules do
        assert {part.block.transposed for part in square if part.is_matrix} == {transposed}
        assert len(square.select("output")) == 2 and not square.unknown


def test_wrapped_models_read_the_same(models):
    plain = anatomy.read(models["llama"])
    for wrap in (torch.nn.DataParallel, lambda m: torch.compile(m, backend="eager")):
        wrapped = anatomy.read(wrap(models["llama"]), models["llama"].config)
        assert [(p.role, p.layer, p.block) for p in wrapped] == [(p.role, p.layer, p.block) for p in plain]


def test_a_model_on_meta_is_enough():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **GQA))
    assert len(anatomy.read(model).select("query")) == 2
