"""`gnomon train --init`: weights from GPT-2, Llama and gnomon's own folders, with any residual and any manifold."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hf_cases import PLAIN, SMALL, build, config, tokens
from safetensors.torch import save_file

from gnomon import cli, data, evaluation, residual
from gnomon.errors import UserError
from gnomon.models import Transformer, TransformerConfig
from gnomon.models.hf import GnomonConfig, GnomonForCausalLM, gpt2_llama
from gnomon.models.hf.pretrained import load_pretrained, read_settings
from gnomon.run_folder import checkpoint_folders
from gnomon.train import from_dict, preset, replace, to_dict, train
from gnomon.train.init_from import start_from

transformers = pytest.importorskip("transformers")


def published(name, folder):
    """A folder of transformers' own class with the weights of a case, and its model."""
    ours = build(name)
    family = gpt2_llama.family_of(ours.config)
    kind = {"gpt2": transformers.GPT2Config, "llama": transformers.LlamaConfig}[family]
    model = getattr(transformers, gpt2_llama.CLASSES[family])(kind(**gpt2_llama.to_hf_config(ours.config, family))).eval()
    model.load_state_dict(gpt2_llama.to_hf_tensors(ours.state_dict(), ours.config, family), strict=False)
    model.save_pretrained(folder)
    return model


def shaped(source, **changes) -> Transformer:
    """A new model of the checkpoint's shape."""
    torch.manual_seed(1)
    values = to_dict(TransformerConfig(**SMALL)) | read_settings(str(source)) | changes
    return Transformer(from_dict(values, TransformerConfig)).eval()


@torch.no_grad()
@pytest.mark.parametrize("qkv", ["split", "fused"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_checkpoint_of_transformers_computes_here_what_it_computes_there(name, qkv, tmp_path):
    theirs = published(name, tmp_path)
    model = shaped(tmp_path, qkv=qkv)
    done = load_pretrained(model, str(tmp_path))
    assert not done["folded"] and not done["dropped"] and not done["fresh"]
    torch.testing.assert_close(model(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("other", residual.names())
def test_every_residual_takes_every_weight_it_has_a_place_for(name, other, tmp_path):
    published(name, tmp_path)
    model = shaped(tmp_path, residual=other)
    done = load_pretrained(model, str(tmp_path))
    # Matrices, embeddings and the bias of every matrix are always the checkpoint's.
    assert not [key for key in done["fresh"] if "attention." in key or "mlp." in key or key.startswith(("embed", "head"))
                if "join" not in key]  # fmt: skip
    assert set(done["dropped"]) <= {"exit.weight", "exit.bias"}
    before = "join_mlp.before.weight" in "".join(dict(model.named_parameters()))
    assert len(done["folded"]) == (0 if before else 2 * SMALL["layers"]) + ("exit" in done["folded"])
    assert model(tokens()).isfinite().all()


@torch.no_grad()
def test_a_norm_without_a_place_goes_into_the_matrices_behind_it(tmp_path):
    """With x the normalised stream: W (g x + b) + c = (W diag(g)) x + (W b + c)."""
    published("gpt2", tmp_path)
    source, model = build("gpt2"), shaped(tmp_path, residual="sphere")
    load_pretrained(model, str(tmp_path))
    x = torch.randn(5, 32)
    for old, new in zip(source.blocks, model.blocks):
        for role in ("query", "key", "value"):
            expected = getattr(old.attention, role)(
                x * old.join_attention.before.weight + old.join_attention.before.bias
            )
            torch.testing.assert_close(getattr(new.attention, role)(x), expected)
        up = old.mlp.up(x * old.join_mlp.before.weight + old.join_mlp.before.bias)
        torch.testing.assert_close(new.mlp.up(x), up)
        assert torch.equal(new.mlp.down.weight, old.mlp.down.weight)


@torch.no_grad()
@pytest.mark.parametrize("names", ["today's", "former"])
@pytest.mark.parametrize("name", ["llama-sphere", "gpt2-pre-dyt", "biased"])
def test_gnomons_own_folders(name, names, tmp_path):
    ours = build(name)
    GnomonForCausalLM.from_transformer(ours).save_pretrained(tmp_path)
    if names == "former":
        # The head lay inside the model.
        former = {f"model.{key}": tensor for key, tensor in ours.state_dict().items()}
        save_file(former, tmp_path / "model.safetensors", {"format": "pt"})
    model = shaped(tmp_path)
    assert model.config == config(name)
    done = load_pretrained(model, str(tmp_path))
    assert len(done["loaded"]) == len(list(ours.parameters())) and not done["fresh"]
    assert torch.equal(model(tokens()), ours(tokens()))


@torch.no_grad()
def test_context_may_shrink_and_vocabulary_grow(tmp_path):
    published("gpt2", tmp_path)
    model = shaped(tmp_path, context=16, vocab_size=300)
    load_pretrained(model, str(tmp_path))
    x = tokens(length=16)
    torch.testing.assert_close(model(x)[..., :257], build("gpt2")(x), rtol=1e-4, atol=1e-4)
    wrongs = [
        "vocab_size=200",
        "width=64",
        "context=64",
        "mlp_width=64",
        "heads=2",
        "layers=1",
        "layers=3",
        "kv_heads=2",
    ]
    for name, value in (wrong.split("=") for wrong in wrongs):
        with pytest.raises(UserError, match="Leave the model's shape to --init"):
            load_pretrained(shaped(tmp_path, **{name: int(value)}), str(tmp_path))


def recipe_of(source, **changes):
    small = {"steps": 2, "data.batch": 2, "watch.eval_tokens": 64, "schedule.warmup": 1, "optim.lr": 1e-9}
    asked = changes.pop("residual", None)
    start = start_from(
        preset("tiny", asked or "pre-norm", "hetero"), str(source), asked, changes.pop("tokenizer", None)
    )
    return replace(start, small | changes)


@pytest.mark.parametrize("asked, p", [(None, None), ("sphere", None), ("pre-norm", None), ("sphere", 2.0)])
def test_whose_residual(asked, p, tmp_path):
    """The one asked for; else that of a gnomon checkpoint, options included; else the preset's."""
    published("gpt2", tmp_path / "gpt2")
    GnomonConfig(**dataclasses.asdict(config("gpt2-sphere"))).save_pretrained(tmp_path / "own")
    save_file(build("gpt2-sphere").state_dict(), tmp_path / "own" / "model.safetensors")
    assert recipe_of(tmp_path / "gpt2", residual=asked, tokenizer="byte").model.residual == (asked or "pre-norm")
    found = recipe_of(tmp_path / "own", residual=asked, tokenizer="byte").model
    if asked == "pre-norm":
        assert found.residual == "pre-norm" and found.residual_options == {}
    else:
        assert found.residual == "sphere" and found.residual_options == {"p": float("inf"), "gain": 2.0}
    assert (found.width, found.layers, found.vocab_size, found.head_bias) == (32, 2, 257, False)


def test_whose_tokenizer(tmp_path):
    published("gpt2", tmp_path / "m")
    with pytest.raises(UserError, match="--set data.tokenizer="):
        recipe_of(tmp_path / "m")
    assert recipe_of(tmp_path / "m", tokenizer="byte").data.tokenizer == "byte"
    data.train_bpe(["a text"], 257).save(tmp_path / "m" / "tokenizer.json")
    assert recipe_of(tmp_path / "m").data.tokenizer == str(tmp_path / "m")
    (tmp_path / "m" / "recipe.json").write_text(json.dumps(to_dict(preset("tiny"))))
    assert recipe_of(tmp_path / "m").data.tokenizer == "byte"


def test_a_run_from_a_checkpoint_with_the_change_reported(tmp_path, capsys):
    theirs = published("gpt2", tmp_path / "gpt2")
    recipe = recipe_of(tmp_path / "gpt2", tokenizer="byte", residual="proj-spheret", **{"optim.adamw_lr": 0.0})
    train(recipe, tmp_path / "run")
    told = capsys.readouterr().out
    assert "started from" in told and "norms without a place here" in told
    assert "8 matrices put on Stiefel" in told.replace("stiefel", "Stiefel") and "of their norm (median)" in told
    report = json.loads((tmp_path / "run" / "init.json").read_text())
    assert len(report["placed"]) == 12 and all(row["change"] > 0 for row in report["placed"])
    # With no rate to speak of the embeddings are still the checkpoint's, and the matrices are on their manifolds.
    model = Transformer(recipe.model)
    from gnomon.train import checkpoint_layout

    checkpoint_layout.load_weights(model, checkpoint_folders(tmp_path / "run")[-1])
    assert torch.equal(model.embed.weight, theirs.transformer.wte.weight)
    query = model.blocks[0].attention.query.weight.detach()
    torch.testing.assert_close(query @ query.T, torch.eye(32), rtol=0, atol=1e-3)
    # The same recipe goes on without the checkpoint it began with.
    for file in (tmp_path / "gpt2").iterdir():
        file.unlink()
    capsys.readouterr()
    assert train(recipe, tmp_path / "run")["step"] == 2 and "started from" not in capsys.readouterr().out


def test_a_pretrained_model_starts_where_it_was(tmp_path):
    """At a rate of nothing the validation loss is that of transformers' model on the same windows."""
    theirs = published("llama", tmp_path / "llama")
    recipe = recipe_of(tmp_path / "llama", tokenizer="byte", **{"optim.name": "adamw", "optim.weight_decay": 0.0})
    assert recipe.name == "tiny-from-llama" and recipe.init == str(tmp_path / "llama")
    record = train(recipe, tmp_path / "run")
    from gnomon.train.run_data import open_data

    x, y = (torch.from_numpy(part) for part in data.slices(open_data(recipe)[1], context=32, count=2))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    assert record["val_loss"] == pytest.approx(expected.item(), rel=1e-4)


@torch.no_grad()
def test_a_folder_of_others_is_evaluated_like_a_run(tmp_path, capsys):
    theirs = published("llama", tmp_path / "llama")
    data.train_bpe([data.jargon()[:10_000]], 257).save(tmp_path / "llama" / "tokenizer.json")
    (tmp_path / "text.txt").write_text(data.jargon()[:4000])
    model, tokenizer, _ = evaluation.load(tmp_path / "llama", "cpu")
    torch.testing.assert_close(model(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)
    found = evaluation.perplexity(tmp_path / "llama", str(tmp_path / "text.txt"), tokens=64)
    text = data.open_tokens(tmp_path / "text.txt", tokenizer=str(tmp_path / "llama"))
    x, y = (torch.from_numpy(part) for part in data.slices(text, context=32, count=2))
    expected = torch.nn.functional.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten())
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert cli.main(["generate", str(tmp_path / "llama"), "--prompt", "The", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("The")


@pytest.mark.parametrize(
    "values, words",
    [({"model_type": "mamba"}, "gpt2 or llama"), ({"model_type": "gpt2", "n_layer": 2}, "n_embd|no tensor")],
)
def test_mistakes_exit_2(values, words, tmp_path, capsys):
    import re

    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    given = ["train", "tiny", "--init", str(tmp_path), "--out", str(tmp_path / "run"), "--set", "data.tokenizer=byte"]
    assert cli.main(given) == 2
    assert re.search(words, capsys.readouterr().err) and not (tmp_path / "run").exists()
    assert cli.main(["train", "--init", str(tmp_path / "nowhere")]) == 2


def test_the_command(tmp_path, capsys, no_report):
    published("llama", tmp_path / "llama")
    small = ["data.tokenizer=byte", "data.batch=2", "watch.eval_tokens=64", "optim.name=adamw"]
    given = ["train", "--init", str(tmp_path / "llama"), "--residual", "sphere", "--p", "2", "--steps", "1"]
    assert cli.main([*given, "--out", str(tmp_path / "run"), "--set", *small]) == 0
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert recipe["model"]["residual_options"] == {"p": 2} and recipe["model"]["mlp"] == "swiglu"
    assert recipe["init"].endswith("llama")
