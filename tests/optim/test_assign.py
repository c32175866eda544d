"""Assignment: every parameter exactly once, and no rule that does nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gnomon
from gnomon.errors import UserError
from gnomon.models import ResidualMLP, Transformer, tiny, variant
from gnomon.optim import NAMED, Rule, assign, retarget

S, D, E = gnomon.Stiefel(), gnomon.DGram(), gnomon.Euclidean()


def model(**changes):
    return Transformer(tiny(layers=2, width=32, heads=4, **changes))


def hf(name):
    import transformers as t

    small = dict(vocab_size=61, bos_token_id=0, eos_token_id=0)
    llama = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    build = {
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_positions=24, n_embd=32, n_layer=2, n_head=4, **small)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**llama, **small)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(head_dim=8, **llama, **small)),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(head_dim=8, **llama, **small)),
        "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**llama, pad_token_id=0, **small)),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(
            t.GPTNeoXConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **small)
        ),
    }
    return build[name]()


MODELS = {
    "ours": model,
    "ours-fused": lambda: model(
        qkv="fused", mlp="swiglu", bias=True, tied=False, positions="learned", residual="sphere"
    ),
    "ours-gqa": lambda: model(kv_heads=2, qk_norm=True),
    "mlp": lambda: ResidualMLP(variant("Res+ReLU", layers=3, width=32)),
    **{name: (lambda name=name: hf(name)) for name in ("gpt2", "llama", "qwen3", "gemma2", "phi3", "gpt_neox")},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("assignment", NAMED)
def test_every_number_exactly_once(name, assignment):
    m = MODELS[name]()
    covered = {n: torch.zeros_like(p) for n, p in m.named_parameters()}
    attention, mlp = NAMED[assignment]
    for entry in assign(m, assignment):
        block, target = entry.part.block, covered[entry.part.name]
        block.put(target, block.take(target) + 1)
        expected = {"attention": attention, "mlp": mlp}.get(entry.part.sublayer if entry.part.is_matrix else "", None)
        assert entry.manifold == expected, entry.part
    assert all((c == 1).all() for c in covered.values())


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_heads_norms_and_scalars_stay_with_adamw(name):
    for entry in assign(MODELS[name](), "hetero"):
        role = entry.part.role
        assert (entry.manifold is None) == (role in ("embedding", "positions", "head", "norm", "bias", "scalar")), role


def test_fused_qkv_equals_three_matrices():
    parts = [e for e in assign(hf("gpt2"), "stiefel") if e.part.name == "transformer.h.0.attn.c_attn.weight"]
    assert [(e.part.role, e.part.shape) for e in parts] == [(r, (32, 32)) for r in ("query", "key", "value")]
    weight = parts[0].parameter.detach()
    assert torch.equal(parts[1].part.block.take(weight), weight[:, 32:64].T)


def test_per_head():
    entries = [e for e in assign(model(), "hetero", per_head=True) if e.part.layer == 0]
    shapes = {role: [e.part.shape for e in entries if e.part.role == role] for role in ("query", "output", "up")}
    assert shapes == {"query": [(8, 32)] * 4, "output": [(32, 8)] * 4, "up": [(128, 32)]}


def test_user_rules_come_first_and_in_order():
    a = assign(model(), "hetero", rules=[Rule("blocks.0.*", None), Rule("value", E, lr=0.1), Rule("embedding", D)])
    of = {(e.part.name): e for e in a}
    assert of["blocks.0.attention.query.weight"].manifold is None
    assert of["blocks.1.attention.value.weight"].manifold == E and of["blocks.1.attention.value.weight"].lr == 0.1
    assert of["blocks.1.attention.query.weight"].manifold == S
    assert of["embed.weight"].manifold == D


def test_manifolds_by_keyword_and_by_name():
    a = assign(model(), attention=gnomon.DGram(cap=4.0), mlp="stiefel")
    roles = {e.part.role: e.manifold for e in a}
    assert roles["query"] == gnomon.DGram(cap=4.0) and roles["up"] == S and roles["embedding"] is None
    assert {e.part.role: e.manifold for e in assign(model(), attention=S)}["up"] == E


def test_table_names_everything():
    text = assign(model(residual="sphere"), "hetero", rules=[Rule("down", gnomon.DGram(cap=4.0), lr=0.5)]).table(
        0.02, 6e-4
    )
    for word in (
        "blocks.1.mlp.down.weight",
        "32 x 128",
        "Stiefel()",
        "DGram(cap=4.0)",
        "AdamW",
        "0.5000",
        "ManifoldMuon",
    ):
        assert word in text, word


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: assign(model(), "heteroo"), "Did you mean 'hetero'"),
        (lambda: assign(model(), "hetero", rules=[Rule("quary", S)]), "Did you mean 'query'"),
        (lambda: assign(model(), "hetero", rules=[Rule("blocks.7.*", S)]), "matches no parameter"),
        (lambda: assign(model(), "hetero", rules=[Rule("query", S), Rule("*.query.weight", D)]), "never reached"),
        (lambda: assign(model(), "hetero", rules=[Rule("norm", S)]), "holds matrices only"),
        (lambda: assign(model(), "hetero", rules=[Rule("blocks.0.*", S)]), "holds matrices only"),
        (lambda: assign(hf("gpt2"), "hetero", rules=[Rule("head", S)]), "tied to transformer.wte.weight"),
        (lambda: assign(model(qkv="fused"), "hetero", rules=[Rule("value", None)]), "cannot be split"),
        (lambda: assign(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "hetero"), "no attention or MLP"),
        (lambda: assign(model(), attention="stifel"), "stiefel"),
    ],
)
def test_mistakes_are_told(call, words):
    with pytest.raises(UserError, match=words):
        call()


def test_any_module_by_name():
    m = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    a = assign(m, rules=[Rule("0.weight", S)])
    assert {e.part.name: e.manifold for e in a} == {"0.weight": S, "0.bias": None, "2.weight": None, "2.bias": None}


def test_survives_a_copy_of_the_model():
    m = model()
    a = assign(m, "hetero")
    twin = copy.deepcopy(m)
    b = retarget(a, twin)
    assert [e.part for e in a] == [e.part for e in b]
    assert all(e.parameter is dict(twin.named_parameters())[e.part.name] for e in b)
    with pytest.raises(UserError, match="no parameter"):
        retarget(a, nn.Linear(2, 2))
