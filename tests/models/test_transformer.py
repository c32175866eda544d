"""The transformer against transformers' own GPT-2 and Llama, and the properties every dialect keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gnomon import residual
from gnomon.errors import UserError
from gnomon.models import ResidualMLP, Transformer, TransformerConfig, gpt2, llama_34m, tiny, variant
from gnomon.models.config import MODERN
from gnomon.models.mlp import ACTIVATIONS, activate
from gnomon.models.transformer import Attention, Cache

SMALL = dict(vocab_size=61, context=24, layers=3, heads=4, width=32, init_std=0.2)
DIALECTS = {
    "gpt2": dict(positions="learned", norm="layer", mlp="gelu", bias=True, tied=True),
    "gpt2-fused-no-bias": dict(norm="layer-no-bias", bias=False, qkv="fused"),
    "llama": dict(positions="rope", norm="rms", mlp="swiglu", bias=False, tied=False, kv_heads=2),
    "llama-fused-wide-heads": dict(
        positions="rope", norm="rms", mlp="swiglu", bias=False, qkv="fused", kv_heads=1, head_dim=10
    ),
    "qk-norm": dict(positions="rope", norm="rms", qk_norm=True),
    "modern": dict(positions="rope", norm="rms", **MODERN),
    "soft-caps": dict(attention_softcap=5.0, head_softcap=3.0, kv_heads=2),
    "sphere": dict(norm="rms", residual="sphere", residual_options={"p": 2.0}),
}


def build(name, seed=0):
    torch.manual_seed(seed)
    return Transformer(TransformerConfig(**SMALL | DIALECTS[name]))


def tokens(seed=0):
    return torch.randint(SMALL["vocab_size"], (2, SMALL["context"]), generator=torch.Generator().manual_seed(seed))


def randomise(model):
    """Move gains and biases off 1 and 0, so that a missing one shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@torch.no_grad()
@pytest.mark.parametrize("qkv", ["split", "fused"])
def test_equals_transformers_gpt2(qkv):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ours = randomise(Transformer(TransformerConfig(**SMALL | DIALECTS["gpt2"] | {"qkv": qkv})))
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61, n_positions=24, n_embd=32, n_layer=3, n_head=4, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
        )
    ).eval()
    body = theirs.transformer
    body.wte.weight.copy_(ours.embed.weight)
    body.wpe.weight.copy_(ours.positions.weight)
    body.ln_f.load_state_dict(ours.exit.state_dict())
    for block, a in zip(body.h, ours.blocks):
        block.ln_1.load_state_dict(a.join_attention.before.state_dict())
        block.ln_2.load_state_dict(a.join_mlp.before.state_dict())
        attention = a.attention
        linears = [attention.qkv] if qkv == "fused" else [attention.query, attention.key, attention.value]
        block.attn.c_attn.weight.copy_(torch.cat([x.weight for x in linears]).T)
        block.attn.c_attn.bias.copy_(torch.cat([x.bias for x in linears]))
        for conv, linear in (
            (block.attn.c_proj, attention.output),
            (block.mlp.c_fc, a.mlp.up),
            (block.mlp.c_proj, a.mlp.down),
        ):
            conv.weight.copy_(linear.weight.T)
            conv.bias.copy_(linear.bias)
    torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_equals_transformers_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = randomise(build("llama"))
    c = ours.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=c.d_mlp, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=24, rms_norm_eps=c.norm_eps, rope_theta=10000.0,
            tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    theirs.model.embed_tokens.weight.copy_(ours.embed.weight)
    theirs.model.norm.weight.copy_(ours.exit.weight)
    theirs.lm_head.weight.copy_(ours.head.weight)
    for block, a in zip(theirs.model.layers, ours.blocks):
        block.input_layernorm.weight.copy_(a.join_attention.before.weight)
        block.post_attention_layernorm.weight.copy_(a.join_mlp.before.weight)
        for name, linear in (
            ("q", a.attention.query),
            ("k", a.attention.key),
            ("v", a.attention.value),
            ("o", a.attention.output),
        ):
            getattr(block.self_attn, f"{name}_proj").weight.copy_(linear.weight)
        for name, linear in (("gate", a.mlp.gate), ("up", a.mlp.up), ("down", a.mlp.down)):
            getattr(block.mlp, f"{name}_proj").weight.copy_(linear.weight)
    torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", DIALECTS)
def test_cache_equals_the_whole_sequence(name):
    model, x = build(name), tokens()
    whole, cache = model(x), Cache()
    parts = [model(part, cache) for part in x.split([9, 1, 1, 13], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", DIALECTS)
def test_padding_is_not_seen(name):
    """A sequence behind five padding tokens, read in one go or with a cache, gives the logits it gives alone."""
    model, x = build(name), tokens()[:, :17]
    padded = torch.cat((torch.full((2, 5), 7), x), dim=1)
    keep = torch.ones_like(padded, dtype=torch.bool)
    keep[:, :5] = False
    alone, cache = model(x), Cache()
    torch.testing.assert_close(model.logits(model.stream(padded, keep_BS=keep))[:, 5:], alone, rtol=1e-4, atol=1e-4)
    model.stream(padded[:, :20], cache, keep[:, :20])
    torch.testing.assert_close(
        model.logits(model.stream(padded[:, 20:], cache, keep)), alone[:, 15:], rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
@pytest.mark.parametrize("name", DIALECTS)
def test_causal_to_the_bit(name):
    model, x = build(name), tokens()
    changed = x.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 61
    assert torch.equal(model(x)[:, :15], model(changed)[:, :15])


@torch.no_grad()
@pytest.mark.parametrize("name", DIALECTS)
def test_explicit_logits_are_those_that_attend(name):
    """The logits by their formula, put through softmax, give what the fused kernel gives."""
    model = build(name)
    block = model.blocks[1].attention
    seen = {}
    attend = block.attend
    block.attend = lambda q, k, *more: (seen.update(q=q, k=k), attend(q, k, *more))[1]
    model(tokens())
    v = torch.randn(seen["k"].shape)
    weights = block.logits(seen["q"], seen["k"]).softmax(-1)
    expected = weights @ v.repeat_interleave(block.heads // block.kv_heads, dim=1)
    torch.testing.assert_close(block.attend(seen["q"], seen["k"], v), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DIALECTS)
def test_every_parameter_gets_a_gradient(name):
    model = build(name)
    model.loss(tokens(), tokens(1)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_sizes_are_the_papers():
    with torch.device("meta"):
        millions = {
            size: sum(p.numel() for p in Transformer(gpt2(size)).parameters()) / 1e6
            for size in ("small", "medium", "large")
        }
        llama = Transformer(llama_34m())
    assert millions == {
        "small": pytest.approx(124, abs=1),
        "medium": pytest.approx(354, abs=1),
        "large": pytest.approx(773, abs=1),
    }
    assert sum(p.numel() for p in llama.parameters()) / 1e6 == pytest.approx(34, abs=0.5)
    assert (gpt2("large").layers, gpt2("large").width) == (36, 1280)


@pytest.mark.parametrize("name", DIALECTS)
def test_counted_parameters_and_flops(name):
    model = build(name)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("blocks.")]
    assert model.config.matrix_parameters == sum(p.numel() for p in matrices)
    # PyTorch's own counter agrees up to the attention, of which it may count the causal half.
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model.loss(tokens(), tokens(1)).backward()
    counted = counter.get_total_flops() / tokens().numel()
    attention = 12 * model.config.layers * model.config.context * model.config.heads * model.config.d_head
    assert model.config.flops_per_token - attention <= counted * 1.001 and counted <= model.config.flops_per_token * 1.3


def test_init_follows_the_residual():
    torch.manual_seed(0)
    model = Transformer(tiny(layers=8, residual="pre-norm", qkv="fused", init_std=0.02))
    assert model.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert model.blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.03)
    deep = Transformer(tiny(layers=8, residual="deepnorm", qkv="fused", init_std=0.02)).blocks[0].attention.qkv.weight
    assert deep[:160].std().item() == pytest.approx(0.02, rel=0.03)
    assert deep[320:].std().item() == pytest.approx(0.02 * 64**-0.25, rel=0.03)


def test_the_off_switch_leaves_no_trace():
    """A model without a sphere has no sphere parameters."""
    assert not [n for n in Transformer(tiny()).state_dict() if n.split(".")[-1] == "a" or "gain" in n]


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(width=33), "multiple of heads"),
        (dict(kv_heads=3), "multiple of kv_heads"),
        (dict(positions="rope", head_dim=9), "even"),
        (dict(mlp="relu"), "gelu"),
        (dict(layers=0), r"layers must lie in \[1"),
    ],
)
def test_wrong_settings_are_told(changes, words):
    with pytest.raises(UserError, match=words):
        TransformerConfig(**SMALL | changes)


def test_too_long_is_told():
    with pytest.raises(UserError, match="context of 24"):
        build("gpt2")(torch.zeros(1, 25, dtype=torch.long))


def test_stream_dtype_under_autocast():
    for stream, dtype in (("float32", torch.float32), ("compute", torch.bfloat16)):
        torch.manual_seed(0)
        model = Transformer(TransformerConfig(**SMALL, norm="rms", residual="sphere", stream=stream))
        seen = []
        model.blocks[1].join_mlp.register_forward_hook(lambda m, i, o, seen=seen: seen.append(o.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(tokens())
        assert seen == [dtype]


def test_relu2_is_the_square_of_relu():
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    expected = np.maximum(x.numpy(), 0) ** 2
    np.testing.assert_array_equal(activate("relu2", x).numpy(), expected)
    model = Transformer(TransformerConfig(**SMALL | dict(activation="relu2", bias=False)))
    mlp, h = model.blocks[0].mlp, torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(
        mlp(h).detach(), np.maximum((h @ mlp.up.weight.T).detach(), 0) ** 2 @ mlp.down.weight.T.detach().numpy(), rtol=1e-4, atol=1e-6
    )


CAN_BE_SILENT = {name: {} for name in residual.names() if name != "ngpt-step"} | {"sphere": {"clamp": 0.5, "gain": 1.0}}


@pytest.mark.parametrize("residual_name, options", CAN_BE_SILENT.items())
def test_a_model_whose_sublayers_start_at_zero_learns_and_only_they_are_changed(residual_name, options):
    """At first the blocks say nothing; every output projection has a gradient that is finite and not zero."""
    settings = SMALL | dict(residual=residual_name, residual_options=options, norm="rms")

    def made(zero):
        torch.manual_seed(0)
        return Transformer(TransformerConfig(**settings, zero_init=zero))

    usual, silent = made(False), made(True)
    writers = [f"blocks.{i}.{name}.weight" for i in range(3) for name in ("attention.output", "mlp.down")]
    for (name, a), b in zip(usual.named_parameters(), silent.parameters()):
        assert not b.any() if name in writers else torch.equal(a, b), name
    silent.loss(tokens(), tokens(1)).backward()
    gradients = {name: p.grad for name, p in silent.named_parameters() if name in writers}
    assert len(gradients) == 6 and all(g.isfinite().all() and g.any() for g in gradients.values())


@pytest.mark.parametrize("name, options", [("ngpt-step", {}), ("geonorm", {"listing": True})])
def test_a_residual_in_which_zero_stays_zero_refuses_it(name, options):
    with pytest.raises(UserError, match="stays zero"):
        Transformer(TransformerConfig(**SMALL, residual=name, residual_options=options, zero_init=True))


VARIANTS = [
    "Res+ReLU",
    "Res+GELU",
    "Res+SiLU",
    "Res+None",
    "Res+Radial",
    "NoRes+ReLU",
    "Res+ReLU+LN",
    "Res+None+LN",
    "Res+Radial+LN",
]


@pytest.mark.parametrize("name", VARIANTS)
def test_mlp_variants_by_their_equation(name):
    torch.manual_seed(0)
    model = ResidualMLP(variant(name, layers=3, width=16, inputs=20)).double()
    x = torch.randn(5, 20, dtype=torch.float64)
    h = model.input(x)
    for block in model.blocks:
        n = torch.nn.functional.layer_norm(h, (16,)) if name.endswith("+LN") else h
        f = activate(name.split("+")[1].lower(), n @ block.linear.weight.T)
        h = h + f if name.startswith("Res") else f
    torch.testing.assert_close(model(x), model.output(h))
    model.loss(x, torch.arange(5)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_radial_commutes_with_rotations_and_relu_does_not():
    Q = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name in ACTIVATIONS:
        commutes = torch.allclose(activate(name, x @ Q), activate(name, x) @ Q)
        assert commutes == (name in ("none", "radial"))


def test_mlp_init_scale_and_mistakes():
    torch.manual_seed(0)
    small = ResidualMLP(variant("Res+ReLU", init_scale=0.1)).blocks[0].linear.weight
    assert small.abs().max() <= 0.1 / 16 + 1e-9
    with pytest.raises(UserError, match="relu"):
        variant("Res+RelU3")
    with pytest.raises(UserError):
        variant("Res")


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_attention_logits_are_fp32_under_autocast(softcap):
    """Rounded to bf16 a logit of 100 is off by up to 0.25."""
    attention = Attention(tiny(kv_heads=2, attention_softcap=softcap))
    q, k = (7 * torch.randn(2, n, 6, attention.d_head) for n in (attention.heads, attention.kv_heads))
    with torch.autocast("cpu", torch.bfloat16):
        found = attention.logits(q, k)
    repeated = k.double().repeat_interleave(attention.heads // attention.kv_heads, dim=1)
    expected = q.double() @ repeated.transpose(-1, -2) / attention.d_head**0.5
    expected = expected if softcap is None else softcap * torch.tanh(expected / softcap)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    assert found.dtype == torch.float32 and expected[..., seen].abs().max() > 25
    torch.testing.assert_close(found.double()[..., seen], expected[..., seen], rtol=1e-5, atol=1e-5)
