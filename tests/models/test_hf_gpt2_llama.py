"""Ordinary blocks as transformers' own GPT-2 and Llama, there and back."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hf_cases import PLAIN, build, tokens

from gnomon.errors import UserError
from gnomon.models import TransformerConfig, gpt2, llama_34m, tiny
from gnomon.models.hf import gpt2_llama

transformers = pytest.importorskip("transformers")


def theirs(config: TransformerConfig, family: str, dtype=torch.float64):
    kind = {"gpt2": transformers.GPT2Config, "llama": transformers.LlamaConfig}[family]
    settings = kind(**gpt2_llama.to_hf_config(config, family), attn_implementation="eager")
    return getattr(transformers, gpt2_llama.CLASSES[family])(settings).to(dtype).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", PLAIN)
def test_their_class_computes_our_function(name):
    ours = build(name).double()
    family = gpt2_llama.family_of(ours.config)
    model = theirs(ours.config, family)
    missing, unexpected = model.load_state_dict(gpt2_llama.to_hf_tensors(ours.state_dict(), ours.config, family), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    # Angles of rotary positions are fp32 on both sides.
    torch.testing.assert_close(model(tokens()).logits, ours(tokens()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_weights_there_and_back_to_the_bit(name):
    ours = build(name)
    family = gpt2_llama.family_of(ours.config)
    back = gpt2_llama.from_hf_tensors(gpt2_llama.to_hf_tensors(ours.state_dict(), ours.config, family), ours.config, family)
    state = ours.state_dict()
    assert state.keys() <= back.keys()
    for key in back:
        # Biases that the settings leave out come back as zeros.
        assert torch.equal(back[key], state.get(key, torch.zeros_like(back[key]))), key


@pytest.mark.parametrize("name", PLAIN)
def test_settings_there_and_back(name):
    config = build(name).config
    family = gpt2_llama.family_of(config)
    values = theirs(config, family).config.to_dict()
    found = dataclasses.replace(config, **gpt2_llama.from_hf_config(values))
    # GPT-2 has every bias, and what was worked out is now said.
    expected = dataclasses.replace(config, mlp_width=config.d_mlp)
    if family == "gpt2":
        expected = dataclasses.replace(expected, bias=True, norm="layer")
    else:
        expected = dataclasses.replace(expected, kv_heads=config.n_kv_heads, head_dim=config.d_head)
    assert found == expected


def test_which_models_are_plain():
    assert gpt2_llama.family_of(gpt2()) == "gpt2" and gpt2_llama.family_of(llama_34m()) == "llama"
    assert gpt2_llama.family_of(gpt2(residual="sphere")) is None
    assert gpt2_llama.family_of(llama_34m(head_bias=True)) is None
    assert gpt2_llama.family_of(gpt2(attention_softcap=30.0)) is None
    assert gpt2_llama.family_of(gpt2(activation="relu")) is None
    text = "\n".join(gpt2_llama.obstacles(tiny(), "llama"))
    assert "mlp is gelu, llama has swiglu" in text and "head_bias is True" in text


def test_a_setting_that_plain_does_not_know_is_an_obstacle():
    """A field added to the model later must not be left out of an export in silence."""
    later = dataclasses.make_dataclass("Later", [("twist", float, 0.0)], bases=(TransformerConfig,), frozen=True)
    values = dataclasses.asdict(gpt2())
    assert gpt2_llama.family_of(later(**values)) == "gpt2"
    assert gpt2_llama.obstacles(later(**values, twist=1.0), "gpt2") == ["twist is 1.0, gpt2 has no such setting"]


@pytest.mark.parametrize(
    "values, words",
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function is 'relu'"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "llama3", "factor": 8}}, "rope_type is 'llama3'"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_settings_that_would_compute_something_else_are_refused(values, words):
    with pytest.raises(UserError, match=words):
        gpt2_llama.from_hf_config(values)


def test_a_missing_tensor_is_named():
    ours = build("llama")
    tensors = gpt2_llama.to_hf_tensors(ours.state_dict(), ours.config, "llama")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(UserError, match="model.layers.1.mlp.up_proj.weight"):
        gpt2_llama.from_hf_tensors(tensors, ours.config, "llama")
