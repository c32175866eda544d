"""Whoever moves, shards, quantises or adapts weights works by modules: each weight is used in the call of the module that owns it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hf_cases import SMALL, build, tokens

from gnomon import residual
from gnomon.models import Transformer, TransformerConfig

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from gnomon.models.hf import GnomonForCausalLM  # noqa: E402

HEADS = {
    f"{'tied' if tied else 'untied'}{'-bias' if bias else ''}": dict(tied=tied, head_bias=bias)
    for tied, bias in itertools.product((True, False), repeat=2)
}
BODIES = {
    "gpt2": dict(positions="learned", norm="layer", bias=True, qkv="fused"),
    "llama": dict(positions="rope", norm="rms", mlp="swiglu", kv_heads=2, qk_norm=True),
}


def transformer(**settings) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**SMALL | settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter) * 0.5 + 0.1)
    return model


def hide(model: torch.nn.Module) -> set[str]:
    """Make every parameter NaN but while its module is called; returns the names of those not called yet."""
    waiting = set()
    for path, module in model.named_modules():
        real = dict(module.named_parameters(recurse=False))
        if not real:
            continue
        hidden = {name: torch.nn.Parameter(torch.full_like(p, torch.nan)) for name, p in real.items()}

        def show(module, arguments, path=path, real=real):
            waiting.discard(path)
            module._parameters.update(real)

        waiting.add(path)
        module._parameters.update(hidden)
        module.register_forward_pre_hook(show)
        module.register_forward_hook(lambda module, *_, hidden=hidden: module._parameters.update(hidden))
    return waiting


@torch.no_grad()
@pytest.mark.parametrize("name", residual.names())
@pytest.mark.parametrize("head", HEADS)
def test_every_weight_is_used_in_the_call_of_its_own_module(head, name):
    ours = transformer(residual=name, **HEADS[head], **BODIES["gpt2" if name < "l" else "llama"])
    theirs, expected = GnomonForCausalLM.from_transformer(ours), ours(tokens())
    for model, call in ((ours, lambda: ours(tokens())), (theirs, lambda: theirs(tokens()).logits)):
        waiting = hide(model)
        assert torch.equal(call(), expected) and not waiting


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("body", BODIES)
def test_offloaded_weights_give_the_same_logits(body, head, tmp_path):
    ours = transformer(residual="sphere", residual_options={"clamp": 1.5}, **HEADS[head], **BODIES[body])
    expected, prompt = ours(tokens()), tokens(length=6)
    whole = GnomonForCausalLM.from_transformer(ours)
    text = whole.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for place in ("cpu", "disk"):
        model, bare = GnomonForCausalLM.from_transformer(ours), transformer(**vars(ours.config))
        if place == "cpu":
            accelerate.cpu_offload(model), accelerate.cpu_offload(bare)
        else:
            accelerate.disk_offload(model, str(tmp_path / "model")), accelerate.disk_offload(bare, str(tmp_path / "bare"))
        assert model.model.blocks[0].mlp.up.weight.is_meta and bare.embed.weight.is_meta
        assert torch.equal(model(tokens()).logits, expected) and torch.equal(bare(tokens()), expected)
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0), text)


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_a_block_on_disk_by_device_map(head, tmp_path):
    """from_pretrained's own way: blocks whole, some in memory and some on disk."""
    ours = transformer(residual="geonorm", **HEADS[head], **BODIES["llama"])
    GnomonForCausalLM.from_transformer(ours).save_pretrained(tmp_path / "saved")
    device_map = {"model.embed": "cpu", "model.blocks.0": "cpu", "model.blocks.1": "disk", "model.entry": "cpu"}
    device_map |= {"model.exit": "cpu", "lm_head": "cpu" if ours.config.tied else "disk"}
    model = GnomonForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    assert model.model.blocks[1].mlp.up.weight.is_meta and not model.model.blocks[0].mlp.up.weight.is_meta
    assert torch.equal(model(tokens()).logits, ours(tokens()))


@torch.no_grad()
def test_hooks_on_the_base_model_fire():
    model, seen = GnomonForCausalLM.from_transformer(build("llama-geonorm")), []
    model.model.register_forward_hook(lambda module, inputs, output: seen.append(output.last_hidden_state))
    logits = model(tokens()).logits
    assert len(seen) == 1 and torch.equal(model.lm_head(seen[0]), logits)
