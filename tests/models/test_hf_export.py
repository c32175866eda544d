"""`gnomon export`: the folder, its proof, and that it is whole or not there."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hf_cases import GPT2, SMALL, tokens

from gnomon import cli, data, evaluation
from gnomon import export as exporting
from gnomon.errors import UserError
from gnomon.export import export
from gnomon.models.hf import gpt2_llama, register, remote_code
from gnomon.train import from_dict, preset, to_dict, train

transformers = pytest.importorskip("transformers")
register()

ORDINARY = GPT2 | dict(bias=False, norm="layer-no-bias", head_bias=False)
SPHERE = ORDINARY | dict(residual="sphere", residual_options={"p": float("inf")}, norm="rms", head_bias=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, model in (("ordinary", ORDINARY), ("sphere", SPHERE)):
        recipe = preset("tiny", "pre-norm", "adamw")
        recipe = dataclasses.replace(
            recipe,
            steps=2,
            model=dataclasses.replace(recipe.model, **SMALL | model),
            data=dataclasses.replace(recipe.data, batch=2),
            watch=dataclasses.replace(recipe.watch, eval_tokens=64, save_every=1),
        )
        train(recipe, folder / name)
    return folder


@torch.no_grad()
@pytest.mark.parametrize("name", ["ordinary", "sphere"])
def test_verified_in_a_fresh_process(runs, name, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    if name == "ordinary":  # the process is the same for both, and takes seconds to import
        monkeypatch.setattr(exporting, "in_fresh_process", in_this_process)
    assert cli.main(["export", str(runs / name), str(out), "--verify"]) == 0
    told = capsys.readouterr().out
    ours, tokenizer, recipe = evaluation.load(runs / name, "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    difference = float((model(tokens()).logits - ours(tokens())).abs().max())
    files = {path.name for path in out.iterdir()}
    if name == "ordinary":
        assert type(model) is transformers.GPT2LMHeadModel and difference < 1e-5
        assert "GPT2LMHeadModel" in told and "llama.cpp" in told and "of the largest" in told
        assert not any(file.endswith(".py") for file in files)
        assert model.config.eos_token_id == 256 and model.config.attn_pdrop == 0
    else:
        assert type(model).__name__ == "GnomonForCausalLM" and difference == 0
        assert "residual is sphere" in told and "head_bias is True" in told and "own to the bit" in told
        assert remote_code.source_files().keys() <= files
    assert files >= {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"}
    assert from_dict(json.loads((out / "recipe.json").read_text())) == recipe
    assert len({(out / file).stat().st_mode for file in files}) == 1
    assert not [path.name for path in tmp_path.iterdir() if path != out]
    tokenizer_there = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer_there("naïve\n影").input_ids == tokenizer.encode("naïve\n影").tolist()
    text = tokenizer_there.decode(model.generate(**tokenizer_there("The", return_tensors="pt"), max_new_tokens=5)[0])
    assert text.startswith("The")


def test_the_card_tells_recipe_and_results(runs, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    export(runs / "sphere", tmp_path / "my-model")
    card = hub.ModelCard.load(tmp_path / "my-model" / "README.md", ignore_metadata_errors=False)
    assert card.data.library_name == "transformers" and "gnomon" in card.data.tags
    record = json.loads((runs / "sphere" / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"| validation loss (nats a token) | {record['val_loss']:.6g} |" in card.text
    assert "| model.residual_options.p | inf |" in card.text and "residual is sphere" in card.text
    assert 'from_pretrained("my-model")' in card.text and "Verified" not in card.text
    for path in ("optim.lr", "schedule.warmup", "data.batch"):
        assert f"| {path} |" in card.text


def test_an_earlier_checkpoint_has_its_own_results(runs, tmp_path):
    export(runs / "ordinary" / "checkpoints" / "step-00000001", tmp_path / "out")
    assert "| steps | 1 |" in (tmp_path / "out" / "README.md").read_text()
    first = evaluation.load(runs / "ordinary" / "checkpoints" / "step-00000001", "cpu")[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.transformer.wte.weight, first.embed.weight)


@torch.no_grad()
def in_this_process(folder, work, tokens, text):
    """What the fresh process does, without the seconds it takes to import."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(text)
    found = {"ids": ids, "text": tokenizer.decode(ids), "class": type(model).__name__}
    return model(tokens, use_cache=False).logits, found


def test_a_class_that_computes_something_else_is_found_out(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "in_fresh_process", in_this_process)
    right = gpt2_llama.to_hf_config
    monkeypatch.setattr(gpt2_llama, "to_hf_config", lambda *given: right(*given) | {"layer_norm_epsilon": 0.1})
    with pytest.raises(UserError, match="is not the trained one.*Nothing was written"):
        export(runs / "ordinary", tmp_path / "out", verify=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda logits, found: (torch.nextafter(logits, logits + 1), found), "differ by up to"),
        (lambda logits, found: (torch.full_like(logits, torch.nan), found), "differ by up to nan"),
        (lambda logits, found: (logits, found | {"ids": [0, *found["ids"]]}), "reads a text otherwise"),
        (lambda logits, found: (logits, found | {"text": "?"}), "reads a text otherwise"),
    ],
)
@pytest.mark.parametrize("name", ["ordinary", "sphere"])
def test_the_last_bit_and_every_id_count(runs, name, change, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exporting, "in_fresh_process", lambda *given: change(*in_this_process(*given)))
    assert cli.main(["export", str(runs / name), str(tmp_path / "out"), "--verify"]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_fresh_process_that_fails_tells_why(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    (tmp_path / "work").mkdir()
    with pytest.raises(UserError, match="no-such-model"):
        exporting.in_fresh_process(tmp_path, tmp_path / "work", tokens())


def test_whole_or_not_at_all(runs, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        export(runs / "ordinary", tmp_path / "there")
    with pytest.raises(UserError, match="holds no checkpoint"):
        export(tmp_path / "nowhere", tmp_path / "out")

    def full_disk(*given, **named):
        raise OSError("No space left on device")

    monkeypatch.setattr(exporting, "model_card", full_disk)
    with pytest.raises(OSError, match="No space"):
        export(runs / "ordinary", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("name", ["byte", "gpt2", "trained"])
def test_tokenizers_open_again(name, tmp_path):
    ours = data.train_bpe(["some words and other words"] * 3, 300) if name == "trained" else data.tokenizer(name)
    exporting._fast_tokenizer(ours, 64).save_pretrained(tmp_path)
    there = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "  two  blanks ", "naïve “quotes”\n\t影 👩‍👩‍👧‍👦", exporting.TEXT):
        ids = ours.encode(text).tolist()
        assert there(text).input_ids == ids and there.decode(ids) == text
    assert there.eos_token_id == there.bos_token_id == ours.end_of_text and there.model_max_length == 64
    assert there("a<|endoftext|>").input_ids[-1] == ours.end_of_text
    assert there.decode([*ours.encode("a"), ours.end_of_text], skip_special_tokens=True) == "a"


def test_an_export_is_evaluated_like_its_run(runs, tmp_path):
    export(runs / "sphere", tmp_path / "out")
    there, here = (evaluation.perplexity(path, tokens=64, device="cpu") for path in (tmp_path / "out", runs / "sphere"))
    with pytest.raises(UserError, match="a Hugging Face folder already"):
        export(tmp_path / "out", tmp_path / "again")
    assert there["loss"] == here["loss"] and there["data"] == here["data"]
    recipe = from_dict(json.loads((tmp_path / "out" / "recipe.json").read_text()))
    assert to_dict(recipe)["model"]["residual_options"] == {"p": "inf"}
