"""Assignment: every parameter exactly once, and no rule that does nothing."""

from __future__ import annotations

import copy
import warnings

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


@pytest.mark.parametrize("name", MODELS)
def test_auto_is_a_sphere_for_each_matrix_and_depends_on_shapes_alone(name):
    """Not on values: a model that was loaded gets what it had when it was fresh."""
    m, stated = MODELS[name](), {}
    a = assign(m, "auto")
    for p in m.parameters():
        nn.init.zeros_(p)
    assert list(a) == list(assign(m, "auto"))
    hetero = {e.part: e.manifold for e in assign(m, "hetero")}
    for e in a:
        assert (e.manifold is None) == (hetero[e.part] is None)
        if e.manifold is not None:
            stated.setdefault(e.part.stream, set()).add(e.manifold)
    one, half = gnomon.Sphere(least=1.0), gnomon.Sphere(least=0.5)  # two layers of two sublayers
    # A residual MLP of three layers whose matrices both read and write.
    assert stated == {"reads": {one}, "writes": {half}} if name != "mlp" else {"reads": {gnomon.Sphere(least=0.5774)}}


def test_auto_gives_way_to_what_is_said():
    a = assign(model(), "auto", mlp="stiefel", rules=[Rule("value", None), Rule("key", E)])
    roles = {e.part.role: e.manifold for e in a}
    assert (roles["up"], roles["value"], roles["key"], roles["query"]) == (S, None, E, gnomon.Sphere(least=1.0))


@pytest.mark.parametrize("name", ["ours", "ours-gqa", "llama", "gpt2"])
def test_the_qk_ball_bounds_the_logits_of_normed_inputs(name):
    """Whatever query and key are, once in their balls: 45 for inputs of root mean square 1."""
    for e in assign(MODELS[name](), "qk-ball"):
        if e.part.role not in ("query", "key"):
            assert e.manifold == (None if e.manifold is None else E)
            continue
        width, head = e.part.shape[1], e.part.head_dim
        assert e.manifold.radius**2 * width / head**0.5 == pytest.approx(45, rel=1e-3)
        W = e.manifold.retract(100 * torch.randn(e.part.shape))[:head]
        x = torch.linalg.svd(W)[2][0] * width**0.5
        assert (W @ x).square().sum() / head**0.5 <= 45 * 1.001


def test_auto_counts_each_stack_by_itself():
    import transformers as t

    m = t.T5ForConditionalGeneration(
        t.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=3, num_heads=2, decoder_start_token_id=0)
    )
    gains = {(e.part.stack, e.manifold.least) for e in assign(m, "auto") if e.manifold is not None and e.part.writes_stream}
    # One layer of two sublayers; three of three, since a decoder also looks across.
    assert gains == {("encoder", 0.7071), ("decoder", 0.3333)}


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
        (lambda: assign(model(), "outo"), "Did you mean 'auto'"),
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


@pytest.mark.parametrize("name", ["stiefel", "dgram", "oblique", "euclidean"])
def test_manifolds_by_their_names(name):
    from gnomon.geometry.manifolds import MANIFOLDS

    a = assign(model(), attention=name, rules=[Rule("up", name)])
    assert {e.manifold for e in a if e.part.role in ("query", "up")} == {MANIFOLDS[name]()}


def test_a_rate_of_zero_is_shown():
    a = assign(model(), "hetero", rules=[Rule("down", D, lr=0.0, weight_decay=0.0), Rule("embedding", None, lr=0.0)])
    rows = {row["role"]: row for row in a.rows(0.02, 6e-4)}
    assert (rows["down"]["lr"], rows["down"]["weight decay"], rows["embedding"]["lr"]) == (0.0, 0.0, 0.0)
    assert (rows["up"]["lr"], rows["up"]["weight decay"], rows["norm"]["lr"]) == (0.02, "default", 6e-4)


def test_parts_of_another_model_are_told():
    with pytest.raises(UserError, match="blocks.1.*: the anatomy's parts cover 0 of .* another model"):
        assign(model(), "hetero", parts=gnomon.anatomy.read(Transformer(tiny(layers=1, width=32, heads=4))))
    with pytest.raises(UserError, match="`parts` or `config`"):
        assign(model(), "hetero", parts=gnomon.anatomy.read(model()), config={})


class Lora(nn.Module):
    """The modules peft makes of a linear layer."""

    def __init__(self, base, r=4):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def by_hand(m):
    """get_peft_model(m, LoraConfig(target_modules="all-linear"))"""
    for parent in list(m.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(parent, name, Lora(child))
    for name, p in m.named_parameters():
        p.requires_grad_("lora_" in name)
    return m


def by_peft(m):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(m, peft.LoraConfig(r=4, target_modules="all-linear"))


@pytest.mark.parametrize("wrap", [by_hand, by_peft])
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_adapters_stay_off_manifolds(wrap, name):
    """B starts at zero: placed, it would turn a silent adapter into noise before any step."""
    torch.manual_seed(0)
    m = wrap(hf(name))
    tokens = torch.arange(8)[None]
    before = m(tokens).logits
    with pytest.warns(UserWarning, match="lora_A.* more left to AdamW: adapters start at zero"):
        a = assign(m, "hetero")
    optimizer = gnomon.ManifoldMuon(a)
    assert torch.equal(m(tokens).logits, before) and optimizer.placed == []
    adapters = [e for e in a if "lora_" in e.part.name]
    assert {e.part.name for e in adapters} == {n for n, _ in m.named_parameters() if "lora_" in n}
    assert all(e.manifold is None for e in adapters)
    m(tokens).logits.square().sum().backward()
    optimizer.step()
    assert any(e.parameter.any() for e in adapters if "lora_B" in e.part.name)


def test_a_rule_names_adapters_by_their_names_only():
    m = by_hand(hf("llama"))
    with pytest.warns(UserWarning, match="adapters"):
        a = assign(m, "hetero", rules=[Rule("query", S), Rule("*lora_A*", D), Rule("key", None, lr=0.5)])
    of = {e.part.name: e for e in a}
    base = "model.layers.0.self_attn.{}_proj.lora_{}.default.weight"
    assert of[base.format("q", "A")].manifold == D and of[base.format("q", "B")].manifold is None
    assert of[base.format("k", "B")].manifold is None and of[base.format("k", "B")].lr == 0.5


class NanoGPT(nn.Module):
    """GPT-2's names over nn.Linear, as nanoGPT has them, without a config."""

    def __init__(self, width=32):
        super().__init__()

        def linear(into, out):
            return nn.Linear(into, out, bias=False)

        def block():
            attention = {"c_attn": linear(width, 3 * width), "c_proj": linear(width, width)}
            mlp = {"c_fc": linear(width, 4 * width), "c_proj": linear(4 * width, width)}
            return nn.ModuleDict({"attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp)})

        table = nn.Embedding(61, width)
        self.transformer = nn.ModuleDict({"wte": table, "h": nn.ModuleList([block(), block()])})
        self.lm_head = linear(width, 61)


def test_a_config_tells_what_names_leave_open():
    m = NanoGPT()
    a = assign(m, "hetero", config={"model_type": "nanogpt"})
    parts = [e for e in a if e.part.name == "transformer.h.0.attn.c_attn.weight"]
    assert [(e.part.role, e.manifold) for e in parts] == [("query", S), ("key", S), ("value", S)]


def test_doubt_that_costs_a_manifold_is_warned_of():
    """A fused qkv whose rows lie by head cannot be taken apart without a config."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.ModuleDict({"query_key_value": nn.Linear(32, 96), "dense": nn.Linear(32, 32)})
            self.mlp = nn.ModuleDict({"dense_h_to_4h": nn.Linear(32, 128), "dense_4h_to_h": nn.Linear(128, 32)})

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gpt_neox = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])})

    m = Model()
    with pytest.warns(UserWarning, match=r"query_key_value.weight \(query\+key\+value\) and 1 more left to AdamW: .*config"):
        assign(m, "hetero")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assign(m, "hetero", rules=[Rule("*query_key_value*", None)])
        a = assign(m, "hetero", config={"model_type": "gpt_neox", "num_attention_heads": 4, "hidden_size": 32})
    assert sum(e.manifold == S for e in a) == 8
