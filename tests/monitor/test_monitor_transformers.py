"""What the monitor sees of transformers' models against what these return themselves, and ours alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hf_cases import build
from monitor_cases import MODELS, make, tokens

import gnomon
from gnomon.models.hf import GnomonForCausalLM
from gnomon.monitor import Places
from gnomon.monitor.places import find

NO_KERNEL = {"gemma2"}  # its soft cap is not in torch's kernel
OUR = ("gpt2-pre-norm", "llama-sphere", "llama-peri-norm", "gpt2-post-norm", "biased")


def ours(name: str, attention: str = "eager") -> torch.nn.Module:
    model = GnomonForCausalLM.from_transformer(build(name))
    model.set_attn_implementation(attention)
    return model.train()


def any_model(name: str, attention: str = "eager") -> torch.nn.Module:
    return make(name, attention) if name in MODELS else ours(name, attention)


def step(model, monitor, x, number=0, **more):
    """The record of one step that changes nothing."""
    out = model(input_ids=x, labels=x, **more)
    out.loss.backward()
    record = monitor.before_step(number) | monitor.after_step(number)
    model.zero_grad()
    return record, out


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def angle(a, b):
    return float(np.arccos(np.clip((unit(a) * unit(b)).sum(-1), -1, 1)).mean())


@pytest.mark.parametrize("name", [*MODELS, *OUR])
def test_states_are_those_that_transformers_returns(name):
    """At the end of every block but the last, whose state transformers gives after the final norm; and over whole blocks."""
    model, x = any_model(name), tokens()
    record, out = step(model, gnomon.Monitor(model, every=1), x, output_hidden_states=True)
    hidden = [h.detach().double().numpy() for h in out.hidden_states]
    layers = model.config.num_hidden_layers if name in MODELS else model.config.layers
    last = next(reversed(record["angle"])).rsplit(".", 1)[1]
    for i in range(layers - 1):
        h, at = hidden[i + 1], f"text.{i}.{last}"
        flat = h.reshape(-1, h.shape[-1])
        channel = (flat**2).mean(0)
        expected = {
            "stream_norm": np.sqrt((flat**2).sum(-1).mean()),
            "stream_coherence": np.linalg.norm(unit(flat).mean(0)),
            "input_cosine": (unit(h) * unit(hidden[0])).sum(-1).mean(),
            "massive": np.abs(h).max() / np.sort(np.abs(h).ravel())[(h.size - 1) // 2],
            "massive_channel": np.abs(h).reshape(-1, h.shape[-1]).max(0).argmax(),
            "kurtosis": (channel**2).mean() / channel.mean() ** 2,
        }
        for key, value in expected.items():
            assert record[key][at] == pytest.approx(float(value), rel=1e-5, abs=1e-6), (key, at)
    if name in OUR:
        return
    blocks = Places((), tuple(type(b)(b.stack, b.layer, b.module) for b in find(model, gnomon.anatomy.read(model)).blocks), ())
    record, _ = step(model, gnomon.Monitor(model, every=1, at=blocks), x)
    for i in range(layers - 1):
        assert record["angle"][f"text.{i}.block"] == pytest.approx(angle(hidden[i], hidden[i + 1]), rel=1e-5), i
        growth = np.sqrt((hidden[i + 1] ** 2).sum() / (hidden[i] ** 2).sum())
        assert record["stream_growth"][f"text.{i}.block"] == pytest.approx(growth, rel=1e-5), i


@pytest.mark.parametrize("name", [*MODELS, *OUR])
def test_attention_is_what_transformers_returns_and_the_kernel_stays_on(name):
    model, x = any_model(name), tokens(3, 13)
    record, out = step(model, gnomon.Monitor(model, every=1, rows=None), x, output_attentions=True)
    assert len(out.attentions) == len(record["attention_entropy"])
    for (place, entropy), p in zip(record["attention_entropy"].items(), out.attentions):
        p = p.detach().double().numpy()
        own = -(p * np.log(np.where(p > 0, p, 1))).sum(-1).mean((0, 2))
        assert entropy == pytest.approx(own, rel=1e-5), place
        assert record["attention_sink"][place] == pytest.approx(p[:, :, 6:, 0].mean((0, 2)), rel=1e-5), place
        assert record["attention_self"][place] == pytest.approx(np.diagonal(p, axis1=2, axis2=3)[:, :, 6:].mean((0, 2)), rel=1e-5)
    if name in NO_KERNEL | {"biased"}:
        return
    # The same from queries and keys, as torch's kernel gets them: another way to the same logits.
    model.set_attn_implementation("sdpa")
    other, _ = step(model, gnomon.Monitor(model, every=1, rows=None), x)
    for key in ("attention_logit_max", "attention_entropy", "attention_sink", "attention_self"):
        for place, values in record[key].items():
            assert other[key][place] == pytest.approx(values, rel=1e-5, abs=1e-7), (key, place)


def test_a_kernel_that_torch_does_not_know_is_seen(monkeypatch):
    """FlashAttention and the like: what transformers calls by name, with arguments of its own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def mine(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        groups = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scaling
        hidden = torch.ones(*logits.shape[-2:], dtype=torch.bool).triu(1)
        p = (logits.masked_fill(hidden, -torch.inf)).exp()
        p = p / p.sum(-1, keepdim=True)
        return (p @ value.repeat_interleave(groups, 1)).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "mine", mine)
    model, x = make("llama", "sdpa"), tokens()
    expected, _ = step(model, gnomon.Monitor(model, every=1, rows=None), x)
    model.config._attn_implementation = "mine"
    record, _ = step(model, gnomon.Monitor(model, every=1, rows=None), x)
    for place, values in expected["attention_logit_max"].items():
        assert record["attention_logit_max"][place] == pytest.approx(values, rel=1e-5)
        assert record["attention_entropy"][place] == pytest.approx(expected["attention_entropy"][place], rel=1e-4)
    assert ALL_ATTENTION_FUNCTIONS["mine"] is mine and not ALL_ATTENTION_FUNCTIONS._local_mapping


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_counts_for_nothing(name):
    model, x = make(name, "sdpa"), tokens(2, 12)
    plain, _ = step(model, gnomon.Monitor(model, every=1, rows=None), x)
    padded = torch.cat((x, torch.full((2, 5), 2)), dim=1)
    mask = torch.cat((torch.ones_like(x), torch.zeros(2, 5, dtype=torch.long)), dim=1)
    record, _ = step(model, gnomon.Monitor(model, every=1, rows=None), padded, attention_mask=mask)
    for key in ("stream_norm", "angle", "effective_rank", "massive", "attention_entropy", "attention_sink"):
        for place, value in plain[key].items():
            assert record[key][place] == pytest.approx(value, rel=1e-5), (key, place)


def test_parallel_sublayers_join_as_one():
    model = make("neox")
    record, _ = step(model, gnomon.Monitor(model, every=1), tokens())
    assert list(record["angle"]) == ["text.0.block", "text.1.block", "text.2.block"]
    assert list(record["attention_entropy"]) == ["text.0.attention", "text.1.attention", "text.2.attention"]


def test_encoder_and_decoder_are_two_stacks():
    import transformers as tf

    torch.manual_seed(0)
    sizes = dict(num_layers=2, d_model=32, d_kv=8, num_heads=4, d_ff=64, vocab_size=64, decoder_start_token_id=0)
    model = tf.T5ForConditionalGeneration(tf.T5Config(**sizes)).train()
    record, _ = step(model, gnomon.Monitor(model, every=1), tokens())
    per_stack = {"encoder": ("attention", "mlp"), "decoder": ("attention", "cross_attention", "mlp")}
    assert list(record["angle"]) == [f"{s}.{i}.{name}" for s, names in per_stack.items() for i in range(2) for name in names]
    assert set(record["attention_entropy"]) == {place for place in record["angle"] if place.endswith("attention")}
    # Each stack starts from its own input.
    assert record["input_kept"]["decoder.0.attention"] == pytest.approx(np.cos(record["angle"]["decoder.0.attention"]), rel=1e-5)


def test_torch_s_own_attention_module():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers

        def forward(self, x):
            for block in self.layers:
                x = block(x)
            return x

    net, x = Net(), torch.randn(2, 7, 16)
    places = find(net, gnomon.anatomy.read(net))
    assert len(places.attentions) == 2
    monitor = gnomon.Monitor(net, every=1, rows=None)
    net(x).square().sum().backward()
    record = monitor.before_step(0)
    assert len(record["attention_entropy"]) == 2 and len(next(iter(record["attention_entropy"].values()))) == 4
    _, p = net.layers[0].self_attn(x, x, x, average_attn_weights=False)
    assert next(iter(record["attention_sink"].values())) == pytest.approx(p.detach()[:, :, 3:, 0].mean((0, 2)).tolist(), rel=1e-5)
