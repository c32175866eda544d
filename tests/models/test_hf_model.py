"""`GnomonForCausalLM`: round trips, the traps of transformers' loader, the loss, and generation."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_cases import OWN, PLAIN, SMALL, build, config, tokens
from safetensors.torch import load_file, save_file

from gnomon.errors import UserError
from gnomon.models import Transformer
from gnomon.models.hf import remote_code

transformers = pytest.importorskip("transformers")

from gnomon.models.hf import GnomonConfig, GnomonForCausalLM, register  # noqa: E402

register()


def wrapped(name: str, seed: int = 0) -> GnomonForCausalLM:
    return GnomonForCausalLM.from_transformer(build(name, seed))


@torch.no_grad()
@pytest.mark.parametrize("name", [*PLAIN, *OWN])
def test_round_trip_to_the_bit(name, tmp_path):
    """Learnable steps, gains and a tied head come back: scalars are not reset, nothing depends on a buffer."""
    model = wrapped(name)
    model.save_pretrained(tmp_path)
    back, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(back) is GnomonForCausalLM and not any(report[key] for key in ("missing_keys", "unexpected_keys"))
    assert back.config.settings() == config(name)
    assert torch.equal(back(tokens()).logits, build(name)(tokens()))
    assert not list(back.named_buffers())


@torch.no_grad()
def test_a_missing_scalar_takes_the_value_of_a_new_model_and_no_other_is_touched(tmp_path):
    name = "llama-sphere"
    wrapped(name).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = ["model.blocks.1.join_mlp.a", "model.exit.gain"]
    for key in lost:
        del tensors[key]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    back = GnomonForCausalLM.from_pretrained(tmp_path)
    fresh = GnomonForCausalLM(back.config)
    for key, value in back.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[key] if key in lost else tensors[key]), key


def test_a_fused_matrix_of_a_deepnorm_is_drawn_anew_part_by_part(tmp_path):
    """The value's rows start smaller than the query's; transformers alone would give all rows one deviation."""
    torch.manual_seed(0)
    settings = SMALL | dict(width=256, residual="deepnorm", qkv="fused")
    model = GnomonForCausalLM(GnomonConfig(**settings))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.blocks.0.attention.qkv.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    back = GnomonForCausalLM.from_pretrained(tmp_path)
    query, _, value = back.model.blocks[0].attention.qkv.weight.std(dim=1).view(3, -1).mean(1).tolist()
    assert value / query == pytest.approx(back.model.blocks[0].join_attention.init_scale("value"), rel=0.05)
    assert torch.equal(back.model.blocks[1].attention.qkv.weight, model.model.blocks[1].attention.qkv.weight)


def test_a_new_model_has_the_init_of_ours():
    torch.manual_seed(3)
    model = GnomonForCausalLM(GnomonConfig(**dataclasses.asdict(config("gpt2-keel"))))
    torch.manual_seed(3)
    ours = Transformer(config("gpt2-keel"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ours.parameters(), strict=True))


def test_config_json_holds_every_setting_as_plain_json(tmp_path):
    given = config("gpt2-sphere")
    GnomonConfig(**dataclasses.asdict(given)).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text(), parse_constant=pytest.fail)
    assert values.keys() >= {field.name for field in dataclasses.fields(given)}
    assert values["residual_options"]["p"] == "inf" and values["model_type"] == "gnomon"
    assert transformers.AutoConfig.from_pretrained(tmp_path).settings() == given
    assert GnomonConfig(hidden_size=96, num_hidden_layers=3).settings().layers == 3
    with pytest.raises(UserError, match="Did you mean 'rope'"):
        GnomonConfig(positions="ropes")


@pytest.mark.parametrize("name", ["biased", "gpt2-proj-spheret"])
def test_loss_is_that_of_the_next_token(name):
    model, x = wrapped(name), tokens()
    labels = x.clone()
    labels[0, 5:9] = -100
    logits = build(name)(x)
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )
    torch.testing.assert_close(model(x, labels=labels).loss, expected.sum() / (labels[:, 1:] >= 0).sum())
    # Trainer gives the number of labels of all micro-batches.
    torch.testing.assert_close(model(x, labels=labels, num_items_in_batch=100).loss, expected.sum() / 100)
    loss, *_ = model(x, labels=labels, return_dict=False)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2-sphere", "biased", "llama-peri-norm"])
def test_generation(name):
    model, x = wrapped(name), tokens(length=12)
    greedy = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    found = model.generate(x, **greedy)
    ours, expected = build(name), x
    for _ in range(12):
        expected = torch.cat((expected, ours(expected)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(found, expected)
    assert torch.equal(model.generate(x, use_cache=False, **greedy), found)
    # A shorter prompt in the same batch, padded on the left, goes on as it does alone.
    padded = torch.cat((torch.zeros(2, 5, dtype=torch.long), x), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :5] = 0
    assert torch.equal(model.generate(padded, attention_mask=mask, **greedy)[:, 5:], found)
    assert model.generate(x, num_beams=3, **greedy).shape == (2, 24)


@torch.no_grad()
def test_what_forward_returns_on_request():
    model, x = wrapped("llama-geonorm"), tokens()
    out = model(x, output_hidden_states=True)
    assert len(out.hidden_states) == SMALL["layers"] + 1
    assert torch.equal(model.lm_head(model.model.exit(out.hidden_states[-1])), out.logits)
    padded, mask = torch.nn.functional.pad(x, (0, 5)), torch.nn.functional.pad(torch.ones_like(x), (0, 5))
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, :24], out.logits)
    places = torch.tensor([[0, 7], [3, 1]])
    chosen = torch.stack((out.logits[0, [0, 7]], out.logits[1, [3, 1]]))
    for keep, rows in (
        (2, out.logits[:, -2:]),
        (torch.tensor([0, 7]), out.logits[:, [0, 7]]),
        (places, chosen),
        (mask[:, :24].bool(), out.logits.flatten(0, 1)),
    ):
        torch.testing.assert_close(model(x, logits_to_keep=keep).logits, rows)


@torch.no_grad()
def test_what_it_cannot_do_is_refused():
    model, x = wrapped("llama-geonorm"), tokens()
    with pytest.raises(UserError, match="do not fit the context of 32"):
        model(tokens(length=33))
    for mask in (torch.ones(2, 20), torch.ones(2, 24, 24), torch.ones(2, 1, 20, 24)):
        with pytest.raises(UserError, match="0 for padding"):
            model(x, attention_mask=mask)
    with pytest.raises(UserError, match="cache that grows"):
        model(x, cache=transformers.StaticCache(config=model.config, max_cache_len=32))
    with pytest.raises(UserError, match="no argument 'token_type_ids'"):
        model(x, token_type_ids=torch.zeros_like(x))
    with pytest.raises(UserError, match="looks back only"):
        model(x, is_causal=False)
    with pytest.raises(UserError, match="33 tokens do not fit"):
        model(x, position_ids=torch.arange(9, 33)[None])
    for given in ({}, {"input_ids": x, "inputs_embeds": model.model.embed(x)}):
        with pytest.raises(UserError, match="either input_ids or inputs_embeds"):
            model(**given)
    with pytest.raises(ValueError, match="Flash"):
        GnomonForCausalLM._from_config(model.config, attn_implementation="flash_attention_2")


@torch.no_grad()
def test_a_larger_vocabulary():
    model, x = wrapped("biased"), tokens()
    before = model(x).logits
    model.resize_token_embeddings(300)
    assert model.config.vocab_size == 300
    torch.testing.assert_close(model(x).logits[..., :257], before)
    assert model(x).logits.shape[-1] == 300


@torch.no_grad()
def test_a_checkpoint_of_a_run_is_a_folder_of_transformers(tmp_path):
    from gnomon.train import to_dict

    ours = build("gpt2-cay-spheret")
    save_file(ours.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gnomon", **to_dict(ours.config)}))
    back, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and torch.equal(back(tokens()).logits, ours(tokens()))


def test_manifolds_are_assigned_through_the_wrapper():
    from gnomon import assign

    for name in ("gpt2-sphere", "biased"):
        through = {entry.part.name: entry.manifold for entry in assign(wrapped(name), "hetero")}
        alone = {f"model.{entry.part.name}": entry.manifold for entry in assign(build(name), "hetero")}
        assert through == {{"model.head_bias": "lm_head.bias"}.get(key, key): value for key, value in alone.items()}


def test_every_file_of_the_code_stands_alone():
    import ast

    files = remote_code.source_files()
    assert {f"{name.partition('.')[0]}.py" for name in remote_code.AUTO_MAP.values()} < files.keys()
    for name, source in files.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                assert all(not alias.name.startswith("gnomon") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                there = [node.module] if node.module else [alias.name for alias in node.names]
                assert all(f"{module}.py" in files for module in there) if node.level else "gnomon" not in there[0], (
                    name
                )


LOAD = """
import sys
class NoGnomon:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "gnomon":
            raise ImportError("there is no gnomon here")
sys.meta_path.insert(0, NoGnomon())
import torch, transformers
transformers.set_seed(0)
for folder in sys.argv[1:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        torch.save(model(torch.load(folder + "/tokens.pt")).logits, folder + "/logits.pt")
    model.save_pretrained(folder + "/again")
assert "gnomon" not in sys.modules
"""


@torch.no_grad()
def test_the_code_beside_the_weights_needs_no_gnomon(tmp_path):
    """One process loads a model of every residual by `trust_remote_code`, where importing gnomon fails."""
    names = [name for name in OWN if name.startswith("gpt2")] + ["biased"]
    for name in names:
        folder = tmp_path / name
        wrapped(name).save_pretrained(folder)
        remote_code.write_source_files(folder)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | {"auto_map": remote_code.AUTO_MAP}))
        torch.save(tokens(), folder / "tokens.pt")
    done = python(LOAD, *(tmp_path / name for name in names), cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    for name in names:
        assert torch.equal(torch.load(tmp_path / name / "logits.pt"), build(name)(tokens())), name
        assert remote_code.source_files().keys() <= {p.name for p in (tmp_path / name / "again").iterdir()}


GNOMON = "import gnomon; gnomon.register()"
THEIRS = "from transformers import AutoModelForCausalLM"
ORDERS = {
    "gnomon-first": f"{GNOMON}; {THEIRS}",
    "transformers-first": f"{THEIRS}; {GNOMON}",
    # What is registered and how modules are found changes by `gnomon.register()` alone; twice is as good as once.
    "modeling-utils-first": "import sys; finders = list(sys.meta_path); import gnomon; assert sys.meta_path == finders"
    "; import transformers.modeling_utils; from transformers import CONFIG_MAPPING; assert 'gnomon' not in CONFIG_MAPPING"
    f"; {GNOMON}; assert 'gnomon' in CONFIG_MAPPING and sys.meta_path[: len(finders)] == finders; {THEIRS}; {GNOMON}",
}


@pytest.mark.parametrize(
    "order", [*(pytest.param(name, marks=pytest.mark.slow) for name in list(ORDERS)[:2]), "modeling-utils-first"]
)
def test_register_is_enough(order, tmp_path):
    wrapped("gpt2-sphere").save_pretrained(tmp_path)
    # Saved again, a folder does not name files it has not.
    remote_code.write_source_files(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"auto_map": remote_code.AUTO_MAP}))
    work = """
import sys
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model).__module__ == "gnomon.models.hf.modeling", type(model)
assert not any("gnomon" in type(finder).__module__ for finder in sys.meta_path)
model.save_pretrained(sys.argv[1] + "/again")
"""
    done = python(ORDERS[order] + work, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text())


def python(program: str, *arguments: Path, cache: Path | None = None) -> subprocess.CompletedProcess:
    import os

    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | ({"HF_HOME": str(cache)} if cache else {})
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, env=environment
    )
