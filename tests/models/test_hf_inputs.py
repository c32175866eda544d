"""What trainers, collators and other people's programs give `GnomonForCausalLM` besides token ids, and what they ask of it."""

from __future__ import annotations

import json

import pytest
import torch
from hf_cases import GPT2, LLAMA, OWN, SMALL, build, config, tokens
from safetensors.torch import load_file, save_file

from gnomon.errors import UserError
from gnomon.models import Transformer, TransformerConfig

transformers = pytest.importorskip("transformers")

import gnomon  # noqa: E402
from gnomon.models.hf import GnomonConfig, GnomonForCausalLM, GnomonModel  # noqa: E402

gnomon.register()

NAMES = ["gpt2-sphere", "llama-geonorm", "biased", "gpt2-pre-norm"]


def wrapped(name: str, seed: int = 0) -> GnomonForCausalLM:
    return GnomonForCausalLM.from_transformer(build(name, seed))


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_embeddings_and_positions_in_place_of_the_usual(name):
    model, x = wrapped(name), tokens(length=12)
    logits = model(x).logits
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(x)).logits, logits)
    assert torch.equal(model(x, position_ids=torch.arange(12)[None]).logits, logits)
    # Rotary positions are relative, learned ones are not.
    moved = model(x, position_ids=torch.arange(5, 17)[None]).logits
    assert torch.allclose(moved, logits, rtol=1e-4, atol=1e-4) == (config(name).positions == "rope")
    prompt = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    found = model.generate(inputs_embeds=model.get_input_embeddings()(x), **prompt)
    assert torch.equal(found, model.generate(x, **prompt)[:, 12:])


PACKINGS = {
    "position_ids": lambda place, ends: dict(position_ids=place),
    "seq_idx": lambda place, ends: dict(seq_idx=torch.tensor([[0] * 9 + [1] * 14 + [2] * 7])),
    "cu_seq_lens": lambda place, ends: dict(
        cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=14, max_length_k=14
    ),
    "all": lambda place, ends: dict(position_ids=place, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=14),
}


@torch.no_grad()
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_do_not_see_one_another(name, packing):
    model, parts = wrapped(name), tokens(batch=1, length=30).split([9, 14, 7], dim=1)
    place = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    ends = torch.tensor([0, 9, 23, 30], dtype=torch.int32)
    found = model(torch.cat(parts, dim=1), use_cache=False, **PACKINGS[packing](place, ends)).logits
    torch.testing.assert_close(found, torch.cat([model(part).logits for part in parts], 1), rtol=1e-4, atol=1e-4)


def test_packing_has_no_padding_and_no_cache():
    model, x = wrapped("llama-geonorm"), tokens(batch=1, length=6)
    ends = torch.tensor([0, 4, 6])
    with pytest.raises(UserError, match="cu_seq_lens_q.*leave out attention_mask"):
        model(x, cu_seq_lens_q=ends, attention_mask=torch.ones_like(x))
    cache = model(x, use_cache=True)[1]
    with pytest.raises(UserError, match="no cache"):
        model(x, cu_seq_lens_q=ends, cache=cache)


def test_the_flattening_collator_trains_as_single_rows_do():
    """Longer in all than the context, which no sequence is; the loss of all is the mean over all labels."""
    model, lengths = wrapped("llama-sphere"), (20, 9, 28)
    rows = [{"input_ids": tokens(i, 1, n)[0].tolist()} for i, n in enumerate(lengths)]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    loss = model(**collator(rows)).loss
    single = [model(torch.tensor([row["input_ids"]]), labels=torch.tensor([row["input_ids"]])).loss for row in rows]
    weights = torch.tensor([n - 1.0 for n in lengths])
    torch.testing.assert_close(loss, (torch.stack(single) * weights).sum() / weights.sum())


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_of_four_dimensions(name, implementation):
    model, x = wrapped(name), tokens(length=10)
    model.set_attn_implementation(implementation)
    logits = model(x).logits
    causal = torch.ones(10, 10, dtype=torch.bool).tril()[None, None]
    added = torch.zeros(1, 1, 10, 10).masked_fill(~causal, torch.finfo(torch.float32).min)
    for mask in (causal, causal.long(), added):
        torch.testing.assert_close(model(x, attention_mask=mask).logits, logits, rtol=1e-4, atol=1e-4)
    # Two continuations of one beginning in one row (transformers' custom masks).
    row = torch.cat((x[:1, :6], x[:1, 6:8], x[1:, 6:8]), dim=1)
    place = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 6, 7]])
    mask = causal.clone()
    mask[..., 8:, 6:8] = False
    found = model(row, attention_mask=mask, position_ids=place).logits
    for part, rows in ((x[:1, :8], found[:, :8]), (torch.cat((x[:1, :6], x[1:, 6:8]), 1), found[:, [*range(6), 8, 9]])):
        torch.testing.assert_close(rows, model(part).logits, rtol=1e-4, atol=1e-4)
    # A row that may look at nothing is finite, and nobody else's affair.
    mask = causal.clone()
    mask[..., 9, :] = False
    assert model(x, attention_mask=mask).logits.isfinite().all()


@pytest.mark.parametrize("name", ["gpt2-proj-spheret", "biased"])
def test_labels_already_shifted(name):
    model, x = wrapped(name), tokens()
    shifted = torch.nn.functional.pad(x[:, 1:], (0, 1), value=-100)
    loss = model(x, labels=x).loss
    for labels in (None, torch.zeros_like(x)):
        assert torch.equal(model(x, labels=labels, shift_labels=shifted).loss, loss)
    counted = model(x, shift_labels=shifted, num_items_in_batch=torch.tensor(92)).loss
    torch.testing.assert_close(counted, loss * x[:, 1:].numel() / 92)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", [name for name in OWN if name.startswith("llama")] + ["gpt2-sphere", "biased"])
def test_gradients_of_recomputed_blocks_are_equal_to_the_bit(name, reentrant):
    model, x = wrapped(name).train(), tokens()
    model(x, labels=x).loss.backward()
    plain = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    calls = []
    model.model.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(x, labels=x).loss.backward()
    # Computed twice, the first time without keeping anything where that is how torch does it.
    assert calls == [not reentrant, True]
    assert all(torch.equal(p.grad, plain[key]) for key, p in model.named_parameters())
    with pytest.raises(UserError, match="use_cache=False"):
        model(x, cache=transformers.DynamicCache())
    model.gradient_checkpointing_disable()
    model(x)
    assert len(calls) == 3


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_attention_weights_where_there_are_any(name, caplog):
    model, x = wrapped(name), tokens()
    fused = model(x, output_attentions=True)
    assert fused.attentions is None
    model.set_attn_implementation("eager")
    out = model(x, output_attentions=True)
    torch.testing.assert_close(out.logits, fused.logits, rtol=1e-4, atol=1e-4)
    assert len(out.attentions) == SMALL["layers"] and model(x).attentions is None
    for weights in out.attentions:
        assert weights.shape == (2, 4, 24, 24) and not weights.triu(1).any()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 24))
    # They are the weights: with values all alike, attention gives that value whatever they are.
    attention = model.model.blocks[0].attention
    seen, attend = {}, attention.attend
    attention.attend = lambda q, k, *more: (seen.update(weights=attention.logits(q, k).softmax(-1)), attend(q, k, *more))[1]
    model(x)
    attention.attend = attend
    assert torch.equal(seen["weights"], out.attentions[0])


def test_a_config_says_the_usual_names():
    usual = dict(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=3, intermediate_size=100, num_hidden_layers=2,
        vocab_size=99, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.1, head_dim=10,
    )  # fmt: skip
    found = GnomonConfig(**usual)
    assert {name: getattr(found, name) for name in usual} == usual
    ours = found.settings()
    assert (ours.width, ours.heads, ours.kv_heads, ours.d_mlp, ours.head_dim) == (48, 6, 3, 100, 10)
    # What is left open reads as the number it means, and is stored as it was left.
    found = GnomonConfig(width=48, heads=6, mlp="swiglu")
    assert (found.head_dim, found.num_key_value_heads, found.intermediate_size) == (8, 6, 128)
    assert found.settings() == TransformerConfig(vocab_size=257, context=128, layers=1, width=48, heads=6, mlp="swiglu")
    assert found.to_dict()["head_dim"] is None
    found.width = 96
    assert found.head_dim == 16 and GnomonConfig.from_dict(found.to_dict()).head_dim == 16


@torch.no_grad()
def test_the_stack_alone(tmp_path):
    model = wrapped("biased")
    model.save_pretrained(tmp_path)
    base, report = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(base) is GnomonModel and not report["missing_keys"] and not report["unexpected_keys"]
    h_BTD = base(tokens()).last_hidden_state
    assert torch.equal(h_BTD, model.model(tokens())[0]) and h_BTD.shape == (2, 24, 32)
    # A base model's folder gives all but the head.
    base.save_pretrained(tmp_path / "base")
    again, report = GnomonForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert set(report["missing_keys"]) == {"lm_head.bias"} and torch.equal(again.model(tokens())[0], h_BTD)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["run", "export"])
@pytest.mark.parametrize("head", [dict(tied=False, head_bias=True), dict(tied=True, head_bias=True), dict(tied=False)])
def test_folders_of_the_time_when_the_head_lay_in_the_model(head, kind, tmp_path):
    """Names as in checkpoints of runs, and as exports had them with `model.` in front."""
    torch.manual_seed(0)
    ours = Transformer(TransformerConfig(**SMALL | LLAMA | dict(residual="sphere") | head)).eval()
    if ours.head_bias is not None:
        ours.head_bias.normal_()
    former = {("model." if kind == "export" else "") + name: tensor for name, tensor in ours.state_dict().items()}
    assert ("model." if kind == "export" else "") + ("head_bias" if "head_bias" in head else "head.weight") in former
    save_file(former, tmp_path / "model.safetensors", {"format": "pt"})
    GnomonForCausalLM.from_transformer(ours).config.save_pretrained(tmp_path)
    back, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))
    assert torch.equal(back(tokens()).logits, ours(tokens()))
    base, report = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))
    assert torch.equal(base(tokens())[0], back.model(tokens())[0])
    # Saved again, they have today's names.
    back.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == {
        name for name in back.state_dict() if not (ours.config.tied and name == "lm_head.weight")
    }


@torch.no_grad()
def test_a_lost_embedding_of_a_tied_model_is_missing(tmp_path):
    model = wrapped("gpt2-sphere")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.embed.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    back, report = GnomonForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert "model.embed.weight" in report["missing_keys"]
    assert back.lm_head.weight is back.model.embed.weight and back.model.embed.weight.std().item() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("name", ["biased", "llama-sphere", "gpt2-sphere"])
def test_more_and_fewer_tokens(name, tmp_path):
    model, x = wrapped(name), tokens() % 200
    before = model(x).logits
    model.resize_token_embeddings(300)
    torch.testing.assert_close(model(x).logits[..., :257], before)
    model.save_pretrained(tmp_path)
    back = GnomonForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(back(x).logits, model(x).logits) and back.config.vocab_size == 300
    model.resize_token_embeddings(200)
    torch.testing.assert_close(model(x).logits, before[..., :200])


@pytest.mark.parametrize("name", ["gpt2-sphere", "llama-geonorm"])
def test_adapters_go_on_and_merge(name):
    peft = pytest.importorskip("peft")
    model, x = wrapped(name), tokens()
    before = model(x).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=True))
    assert torch.equal(adapted(x).logits, before)
    assert not any("lm_head" in key for key in peft.get_peft_model_state_dict(adapted))
    adapted(x, labels=x).loss.backward()
    with torch.no_grad():
        for key, p in adapted.named_parameters():
            if "lora_B" in key:
                assert p.grad is not None and p.grad.any()
                p.normal_(std=0.1)
    trained = adapted(x).logits
    merged = adapted.merge_and_unload()
    assert not torch.allclose(trained, before, atol=1e-2)
    torch.testing.assert_close(merged(x).logits, trained, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("target", ["lm_head", "embed"])
def test_an_adapter_on_the_head_or_the_embedding_counts(target):
    peft = pytest.importorskip("peft")
    model, x = wrapped("llama-geonorm"), tokens()
    before = model(x).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False))
    assert not torch.allclose(adapted(x).logits, before, atol=1e-3)
    trained = adapted(x).logits
    torch.testing.assert_close(adapted.merge_and_unload()(x).logits, trained, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_quantised_linears_are_called():
    """torch's own dynamic int8, which replaces modules by others without a `weight`: the head takes part."""
    model, x = wrapped("llama-geonorm"), tokens()
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    assert "quantized" in type(quantised.lm_head).__module__
    error = (quantised(x).logits - model(x).logits).norm() / model(x).logits.norm()
    assert 0 < error < 0.2


@pytest.mark.parametrize("name", ["llama-sphere", "gpt2-pre-norm"])
def test_compiled_whole(name):
    model, x = wrapped(name), tokens(length=8)
    expected = model(x, labels=x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    out = compiled(x, labels=x, position_ids=torch.arange(8)[None], use_cache=False)
    torch.testing.assert_close(out.logits, expected.logits, rtol=1e-4, atol=1e-4)
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected.loss)


def test_json_of_a_config_stays_plain(tmp_path):
    GnomonConfig(**SMALL | GPT2).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["head_dim"] is None and transformers.AutoConfig.from_pretrained(tmp_path).head_dim == 8
