"""A run folder stands alone, and can be gone on with: from elsewhere, by one process at a time, with more steps, as a branch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train import SMALL, recipe, same, weights

from gnomon import data, evaluation, studies
from gnomon.cli import main
from gnomon.data import prepare
from gnomon.data.tokenizers import train_bpe
from gnomon.errors import UserError
from gnomon.files import read_json
from gnomon.run_folder import checkpoint_folders, read_metrics
from gnomon.train import Recipe, replace, train
from gnomon.train.asking import recipe_for
from gnomon.train.run_data import fit_to_data
from gnomon.train.run_lock import LOCK, only_one
from gnomon.train.run_writer import load_recipe

pytestmark = pytest.mark.usefixtures("no_report")

SETTINGS = [f"{path}={json.dumps(value)}" for path, value in (SMALL | {"steps": 6}).items()]
TEXT = "All work and no play makes Jack a dull boy.\n" * 400


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, a BPE of one's own, and its tokens."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text.txt").write_text(TEXT)
    train_bpe([TEXT], 300).save(folder / "bpe.json")
    prepare(folder / "text.txt", folder / "tokens", tokenizer=str(folder / "bpe.json"))
    prepare(folder / "text.txt", folder / "gpt2", tokenizer="gpt2")
    return folder


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    """The same as the working directory, by itself."""
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_the_data_tell_tokenizer_and_vocabulary(here):
    """What `gnomon data` made, `gnomon train --data` takes."""
    own = recipe_for(changes={"data.train": "tokens"})
    bpe = data.open_tokens("tokens")
    assert (own.data.tokenizer, own.model.vocab_size) == (bpe.tokenizer, bpe.vocab_size) and bpe.vocab_size != 257
    gpt2 = recipe_for(changes={"data.train": "gpt2"})
    assert (gpt2.data.tokenizer, gpt2.model.vocab_size) == ("gpt2", 50257)
    padded = recipe_for("gpt2-small", changes={"data.train": "gpt2"})
    assert (padded.data.tokenizer, padded.model.vocab_size) == ("gpt2", 50304)
    text = recipe_for(changes={"data.train": "text.txt"})
    assert (text.data.tokenizer, text.model.vocab_size) == ("byte", 257)
    told = recipe_for(changes={"data.train": "tokens", "model.vocab_size": 512})
    assert told.model.vocab_size == 512 and told.data.tokenizer == bpe.tokenizer
    named = recipe_for(changes={"data.tokenizer": "bpe.json"})
    assert (named.data.train, named.model.vocab_size) == ("jargon", bpe.vocab_size)
    mixed = recipe_for(changes={"data.train": "0.5*tokens + 0.5*tokens"})
    assert mixed.model.vocab_size == bpe.vocab_size
    assert recipe_for(changes={"data.train": "gone"}).data.tokenizer == "byte"
    assert fit_to_data(recipe(**{"data.train": "tokens", "data.tokenizer": None})).data.tokenizer == bpe.tokenizer


def test_from_text_to_words_as_the_guide_has_it(here, capsys):
    assert main(["train", "tiny", "--data", "tokens", "--out", "run", "--set", *SETTINGS]) == 0
    assert "(here" not in capsys.readouterr().err and (here / "run" / "tokenizer.json").exists()
    assert main(["generate", "run", "--prompt", "All", "--tokens", "3"]) == 0


def test_a_run_is_read_from_anywhere_even_without_its_tokens_tokenizer(here, tmp_path, monkeypatch):
    assert main(["train", "tiny", "--data", "tokens", "--out", "run", "--set", *SETTINGS]) == 0
    expected = evaluation.perplexity("run")["loss"]
    monkeypatch.chdir(tmp_path)
    assert evaluation.perplexity(here / "run")["loss"] == expected
    shutil.move(here / "run", tmp_path / "moved")
    (here / "tokens" / "tokenizer.json").unlink()
    (here / "bpe.json").unlink()
    assert evaluation.perplexity(tmp_path / "moved")["loss"] == expected
    assert evaluation.perplexity(tmp_path / "moved" / "checkpoints" / "latest")["loss"] == expected
    assert main(["generate", "moved", "--prompt", "All", "--tokens", "3"]) == 0
    shutil.rmtree(here / "tokens")
    with pytest.raises(UserError) as error:
        evaluation.perplexity(tmp_path / "moved")
    assert f"Looked in {tmp_path}, and in {here}, where the run was started" in str(error.value)


def test_a_run_goes_on_from_another_folder(here, tmp_path, monkeypatch):
    settings = fit_to_data(recipe(steps=6, **{"data.train": "tokens", "data.tokenizer": None}))
    train(settings, here / "whole")
    train(settings, here / "run")
    shutil.rmtree(checkpoint_folders(here / "run")[-1])
    monkeypatch.chdir(tmp_path)
    train(load_recipe(here / "run"), here / "run")
    assert same(weights(here / "run"), weights(here / "whole"))
    assert read_json(here / "run" / "environment.json")["directory"] == str(here)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"data.train": "gone"}, "gone"),
        ({"data.tokenizer": "byte", "data.train": "tokens"}, "was made with tokenizer"),
        ({"model.vocab_size": 100}, "vocab_size=257"),
        ({"model.context": 10**7}, "context"),
        ({"compute.device": "cuda:99"}, "--device cpu"),
    ],
)
def test_dry_run_refuses_what_the_run_would(here, capsys, changes, words):
    pairs = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    assert main(["train", "tiny", "--dry-run", "--out", "run", "--set", *SETTINGS, *pairs]) == 2
    told = capsys.readouterr()
    assert words in told.err and "parameters" in told.out and not (here / "run").exists()
    assert main(["train", "tiny", "--out", "run", "--set", *SETTINGS, *pairs]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == told.err.splitlines()[-1]
    assert not (here / "run").exists()


def test_dry_run_refuses_a_folder_of_another_recipe(here, capsys):
    train(recipe(steps=2), here / "run")
    assert main(["train", "tiny", "--dry-run", "--out", "run", "--lr", "0.5", "--set", *SETTINGS]) == 2
    assert "another recipe" in capsys.readouterr().err


def test_a_typo_is_refused_before_the_folder_is_named(here, capsys):
    assert main(["train", "tiny", "--data", "gone", "--out", "run"]) == 2
    assert "run" not in capsys.readouterr().out


def test_preset_and_config_are_two_recipes(here, capsys):
    train(recipe(steps=2), here / "run")
    assert main(["train", "tiny", "--config", "run/recipe.json", "--out", "other"]) == 2
    assert "'tiny'" in capsys.readouterr().err


HOLD = """
import sys
from pathlib import Path
from gnomon.train.run_lock import only_one
with only_one(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path):
    train(recipe(steps=2), tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"in use by process {holder.pid} on {os.uname().nodename}, since 20"):
        train(recipe(steps=2), tmp_path)
    holder.kill()
    holder.wait()
    # Killed, it left its file behind, which holds nobody up.
    assert (tmp_path / LOCK).exists()
    train(recipe(steps=2), tmp_path)
    assert not (tmp_path / LOCK).exists()
    with only_one(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()}"):
        with only_one(tmp_path):
            pass


def test_a_finished_run_is_extended_and_says_how(tmp_path, capsys):
    first = recipe(steps=8, **{"schedule.name": "constant"})
    train(first, tmp_path / "run")
    told: list[str] = []
    longer = replace(first, {"steps": 12})
    with pytest.raises(UserError, match="steps: 8 -> 12"):
        train(longer, tmp_path / "run")
    train(longer, tmp_path / "run", extend=True, tell=told.append)
    assert any("extended from 8 to 12 steps: schedule constant" in line for line in told) and "goes on after step 8" in told
    # The rate is constant, so nothing tells the two apart.
    train(longer, tmp_path / "whole")
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert [m["step"] for m in read_metrics(tmp_path / "run")] == list(range(13))
    assert load_recipe(tmp_path / "run").steps == 12 and read_json(tmp_path / "run" / "recipe-until-00000008.json")["steps"] == 8
    told.clear()
    train(longer, tmp_path / "run", extend=True, tell=told.append)
    assert told[-1] == "at its last step, 12, already; more --steps would extend it"


def test_only_a_finished_run_is_extended_and_only_by_steps(tmp_path):
    train(recipe(steps=12), tmp_path)
    shutil.rmtree(checkpoint_folders(tmp_path)[-1])
    with pytest.raises(UserError, match="Once it is finished"):
        train(recipe(steps=20), tmp_path, extend=True)
    train(recipe(steps=12), tmp_path)
    for changes in ({"optim.lr": 0.1}, {"seed": 3}):
        with pytest.raises(UserError, match="another recipe"):
            train(recipe(steps=20, **changes), tmp_path, extend=True)
    with pytest.raises(UserError, match="another recipe"):
        train(recipe(steps=8), tmp_path, extend=True)


@pytest.mark.parametrize("assignment", ["adamw", "muon", "hetero"])
def test_a_branch_goes_on_with_the_optimizers_state(tmp_path, assignment):
    settings = recipe(assignment=assignment, steps=8, **{"schedule.name": "constant", "watch.keep": 0})
    train(settings, tmp_path / "whole")
    told: list[str] = []
    half = str(tmp_path / "whole" / "checkpoints" / "step-00000004")
    train(replace(settings, {"branch": half}), tmp_path / "branch", tell=told.append)
    assert f"goes on after step 4 of {half}" in told
    assert same(weights(tmp_path / "branch"), weights(tmp_path / "whole"))
    assert [m["step"] for m in read_metrics(tmp_path / "branch")] == [5, 6, 7, 8]
    # Its settings are its own: at a rate of nothing, decay included, weights stay.
    still = replace(settings, {"branch": half, "optim.lr": 1e-30, **({"optim.adamw_lr": 0.0} if assignment != "adamw" else {})})
    train(still, tmp_path / "still")
    before = load_file(tmp_path / "whole" / "checkpoints" / "step-00000004" / "model.safetensors")
    for name, value in weights(tmp_path / "still").items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-5)
    assert not same(weights(tmp_path / "still"), weights(tmp_path / "whole"))


def test_a_branch_beyond_the_end_is_told(tmp_path):
    train(recipe(steps=8), tmp_path / "run")
    with pytest.raises(UserError, match="step 8, after the last of these 5"):
        train(recipe(steps=5, branch=str(tmp_path / "run")), tmp_path / "branch")
    with pytest.raises(UserError, match="two places to start from"):
        recipe(branch="a", init="b")


def test_resuming_tells_the_step(tmp_path, capsys):
    assert main(["train", "tiny", "--out", str(tmp_path / "run"), "--set", *SETTINGS]) == 0
    shutil.rmtree(checkpoint_folders(tmp_path / "run")[-1])
    capsys.readouterr()
    assert main(["train", "tiny", "--out", str(tmp_path / "run"), "--set", *SETTINGS]) == 0
    assert "goes on after step 4" in capsys.readouterr().out


def test_a_tokenizer_kept_in_a_run_is_that_of_what_starts_from_it(here):
    assert main(["train", "tiny", "--data", "tokens", "--out", "run", "--set", *SETTINGS]) == 0
    shutil.rmtree(here / "tokens")
    found = recipe_for(init="run", changes={"data.train": "text.txt"})
    assert Path(found.data.tokenizer) == Path("run/tokenizer.json") and found.model.vocab_size == load_recipe(here / "run").model.vocab_size


def test_a_study_takes_tokenizer_and_vocabulary_from_its_data(here):
    vocab_size = data.open_tokens("tokens").vocab_size
    for variant in studies.load("residuals", data="tokens").variants:
        assert (variant.recipe.data.train, variant.recipe.model.vocab_size) == ("tokens", vocab_size)
        assert Path(variant.recipe.data.tokenizer) == Path("tokens/tokenizer.json")
    mlps = [v.recipe for v in studies.load("continuity", data="tokens").variants if not isinstance(v.recipe, Recipe)]
    assert mlps
