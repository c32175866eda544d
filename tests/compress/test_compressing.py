"""Compressed models over families: plain transformers, in a process of its own, gets the logits of the model as it was made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from hf_cases import build
from running_cases import FAMILIES, make, write_tokens
from safetensors.torch import load_file, save_file

from gnomon import cli
from gnomon.compress import METHODS, compress, folder_check
from gnomon.compress import compressing as ours
from gnomon.compress.budget import budget_of
from gnomon.compress.in_place import visiting
from gnomon.compress.replacements import numel
from gnomon.compress.work_folder import WorkFolder
from gnomon.errors import UserError
from gnomon.running import open_streamed, read_rows

transformers = pytest.importorskip("transformers")
IDS_N = np.random.default_rng(0).integers(3, 128, 480)
TOKENS_BT = torch.from_numpy(IDS_N[:96]).view(3, 32)  # gnomon's small models have a context of 32
KINDS = [kind for kind in FAMILIES if kind != "bert"] + ["gnomon"]
# "shared" has every kind of term but pivots: products, one A or one B for several layers, parts of fused tensors.
MADE = [(kind, "shared") for kind in KINDS]
MADE += [("gpt_neox", "pivoted"), ("gemma2", "private")]
MADE += [(kind, method) for kind in ("gpt2", "gpt_neox", "gemma2") for method in METHODS if method not in ("shared", "pivoted", "private")]
KEEP = dict.fromkeys(KINDS, 0.75) | {"mixtral": 0.95}  # most of it are experts, which stay

OPEN = """
import sys, json, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
root = Path(sys.argv[1])
tokens = load_file(root / "tokens.safetensors")["tokens"]
logits = {}
for folder in sorted(root.glob("*/made")):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        logits[folder.parent.name] = model(tokens, use_cache=False).logits.contiguous()
    model.save_pretrained(folder.parent / "again")
    again = type(model).from_pretrained(folder.parent / "again").eval()  # its class is known by now
    with torch.no_grad():
        assert torch.equal(again(tokens, use_cache=False).logits, logits[folder.parent.name]), folder
        torch.testing.assert_close(again(tokens).logits, logits[folder.parent.name], rtol=1e-4, atol=1e-4)
        assert again.generate(tokens[:1, :9], max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 12), folder
    if not (folder / "modeling_compressed.py").exists():
        continue
    try:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        assert "trust_remote_code" in str(error), error
    else:
        raise AssertionError(f"{folder} opened without its code")
save_file(logits, root / "logits.safetensors")
assert "gnomon" not in sys.modules
"""


def save_whole(kind, folder):
    if kind == "gnomon":
        from gnomon.models.hf import GnomonForCausalLM

        GnomonForCausalLM.from_transformer(build("llama-sphere")).save_pretrained(folder)
    else:
        make(kind).save_pretrained(folder)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "t.bin", IDS_N)


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokens):
    """Every family by every method, with the logits as it was made, and those that a fresh process gets."""
    root = tmp_path_factory.mktemp("made")
    results, expected = {}, {}
    for kind in KINDS:
        save_whole(kind, root / f"{kind}-whole")
    for kind, method in MADE:
        place = root / f"{kind}-{method}"
        seen = {}

        def keeping(streamed, load, rows, folder, seen=seen):
            seen["logits"] = streamed.run(TOKENS_BT, visiting(streamed, load)).logits
            return 0.0

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ours, "check_folder", keeping)
            given = dict(method=method, length=32, verify=True)
            results[place.name] = compress(root / f"{kind}-whole", place / "made", tokens, KEEP[kind], **given)
        expected[place.name] = seen["logits"]
    save_file({"tokens": TOKENS_BT}, root / "tokens.safetensors")
    done = subprocess.run(
        [sys.executable, "-P", "-c", OPEN, str(root)], capture_output=True, text=True,
        env=os.environ | {"HF_MODULES_CACHE": str(root / "code"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return root, results, expected, load_file(root / "logits.safetensors")


@pytest.mark.parametrize(("kind", "method"), MADE)
def test_a_stranger_gets_the_logits_of_the_model_as_it_was_made(kind, method, made):
    root, results, expected, fresh = made
    result = results[f"{kind}-{method}"]
    torch.testing.assert_close(fresh[f"{kind}-{method}"], expected[f"{kind}-{method}"], rtol=1e-5, atol=1e-5)
    assert result.plain is (method == "mlp")  # narrower, and the same in every block
    assert 0.9 * KEEP[kind] < result.parameters / result.parameters_before <= KEEP[kind]
    assert not list((root / f"{kind}-{method}").glob(".made*"))


@pytest.mark.parametrize(("kind", "method"), MADE)
def test_gnomon_reads_what_it_wrote(kind, method, made):
    root, _, expected, _ = made
    found = open_streamed(root / f"{kind}-{method}" / "made").run(TOKENS_BT).logits
    torch.testing.assert_close(found, expected[f"{kind}-{method}"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_all_keeps_the_logits(kind, tmp_path, tokens, made):
    root, *_ = made
    result = compress(root / f"{kind}-whole", tmp_path / "same", tokens, 1.0, length=32)
    assert result.plain and result.loss == result.loss_before and result.parameters == result.parameters_before
    before, after = open_streamed(root / f"{kind}-whole"), open_streamed(tmp_path / "same")
    assert torch.equal(before.run(TOKENS_BT).logits, after.run(TOKENS_BT).logits)
    if kind != "gnomon":  # which needs gnomon, or its code
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "same").eval()
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS_BT).logits, after.run(TOKENS_BT).logits, rtol=1e-5, atol=1e-5)


def test_verify_opens_a_fresh_process(tmp_path, tokens, made):
    root, *_ = made
    assert compress(root / "llama-whole", tmp_path / "small", tokens, 0.75, method="shared", length=48, verify=True).difference < 1e-6


def test_a_folder_that_is_another_model_is_found_out(tmp_path, tokens, made, monkeypatch):
    root, *_ = made
    right = ours.compressed_folder.write

    def wrong(streamed, load, folder):
        plain = right(streamed, load, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] *= 1.01
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return plain

    monkeypatch.setattr(ours.compressed_folder, "write", wrong)
    in_this_process = lambda folder, work, tokens_BT: (open_streamed(folder).run(tokens_BT).logits, {})  # noqa: E731
    monkeypatch.setattr(folder_check, "in_fresh_process", in_this_process)
    with pytest.raises(UserError, match="is not the model that was made"):
        compress(root / "llama-whole", tmp_path / "small", tokens, 0.75, length=48, verify=True)
    assert not (tmp_path / "small").exists()


def test_a_compression_that_was_stopped_goes_on(tmp_path, tokens, made, monkeypatch):
    root, *_ = made
    given = dict(method="shared", group=2, length=32)
    save, finished = WorkFolder.save, []

    def dying(self, group, found):
        save(self, group, found)
        finished.append(list(group))
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkFolder, "save", dying)
    with pytest.raises(KeyboardInterrupt):
        compress(root / "llama-whole", tmp_path / "small", tokens, 0.75, **given)
    assert not (tmp_path / "small").exists() and finished == [[0, 1]]
    monkeypatch.setattr(WorkFolder, "save", lambda self, group, found: (save(self, group, found), finished.append(list(group))))
    with pytest.raises(UserError, match=r"beginnings of another compression .* \(other: keep\)"):
        compress(root / "llama-whole", tmp_path / "small", tokens, 0.7, **given)
    compress(root / "llama-whole", tmp_path / "small", tokens, 0.75, **given)
    assert finished == [[0, 1], [2]]
    ours_, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "small", root / "llama-shared" / "made"))
    assert ours_.keys() == theirs.keys() and all(torch.equal(ours_[key], theirs[key]) for key in ours_)


def test_the_input_is_not_touched(tmp_path, tokens, made):
    root, *_ = made
    shutil.copytree(root / "llama-whole", tmp_path / "whole")
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in (tmp_path / "whole").iterdir()}
    compress(tmp_path / "whole", tmp_path / "small", tokens, 0.75, length=48)
    assert before == {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in (tmp_path / "whole").iterdir()}


def test_later_blocks_are_fitted_to_what_earlier_ones_became(tmp_path, tokens, made):
    """Moments of the second block are those of the stream behind the first as it was made."""
    root, *_ = made
    streamed = open_streamed(root / "llama-whole")
    rows = read_rows(streamed, tokens, 480, 48)
    given = []

    def method(blocks, keep):
        given.extend(blocks)
        return METHODS["private"](blocks, keep)

    work = WorkFolder(tmp_path / "x", {})
    ours.make(streamed, rows, method, budget_of(streamed, 0.75).of_linears, [[0], [1], [2]], work, lambda *_: None)
    model = make("llama")
    for name, one in work.load(0).items():
        model.model.layers[0].get_submodule(name).weight.data = one.W_MN
    seen = []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, x: seen.append(x[0].detach().double().flatten(0, 1)))
    with torch.no_grad():
        model(rows.tokens_BT)
    torch.testing.assert_close(given[1].moments["mlp.down_proj"], seen[0].T @ seen[0] / len(seen[0]), rtol=1e-3, atol=1e-3)
    assert given[1].tokens == 480 and given[1].moments["self_attn.q_proj"] is given[1].moments["self_attn.k_proj"]


def test_weights_keep_the_numbers_they_are_stored_in(tmp_path, tokens):
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path / "whole")
    compress(tmp_path / "whole", tmp_path / "small", tokens, 0.75, length=48)
    assert {tensor.dtype for tensor in load_file(tmp_path / "small" / "model.safetensors").values()} == {torch.bfloat16}


def test_the_budget_counts_what_no_method_replaces(made):
    root, *_ = made
    streamed = open_streamed(root / "mixtral-whole")
    found = budget_of(streamed, 0.95)
    assert found.replaceable == 3 * (2 * 64 * 64 + 2 * 32 * 64)  # attention; experts stay
    assert found.total - found.replaceable + found.of_linears * found.replaceable == pytest.approx(0.95 * found.total)
    with pytest.raises(UserError, match="can be replaced .* Keep more than 0.8"):
        budget_of(streamed, 0.5)


def test_blocks_without_a_matrix_to_replace_are_told(made, monkeypatch):
    from gnomon.compress import budget

    root, *_ = made
    monkeypatch.setattr(budget, "linears_of", lambda *_: {})
    with pytest.raises(UserError, match="the blocks of LlamaForCausalLM have no matrix .* --method depth"):
        budget_of(open_streamed(root / "llama-whole"), 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(keep=0.0), "above 0 and at most 1"),
        (dict(keep=0.02), "block 0, query .* pay for no rank"),
        (dict(method="privat"), "Did you mean 'private'"),
        (dict(tokens=64), "48 tokens for matrices with up to 96 inputs .* 960 or so"),
        (dict(method="shared", group=9), "from 1 to 3"),
        (dict(method="shared", groups="continuty"), "Did you mean 'continuity'"),
        (dict(method="shared", groups=[[0, 2], [1]]), "neighbouring blocks in order"),
        (dict(method="shared", sides="rol"), "Did you mean 'role'"),
    ],
)
def test_mistakes_are_told(changes, message, tmp_path, tokens, made):
    root, *_ = made
    with pytest.raises(UserError, match=message):
        compress(root / "llama-whole", tmp_path / "small", tokens, **{"length": 48} | changes)


@pytest.mark.parametrize("method", ["private", "depth"])
def test_what_is_compressed_is_not_compressed_again(method, tmp_path, tokens, made, capsys):
    root, *_ = made
    given = [root / "llama-shared" / "made", tmp_path / "small", "--calibrate", tokens, "--method", method]
    assert cli.main(["compress", *map(str, given)]) == 2
    assert "is compressed already. Compress the model it was made from" in capsys.readouterr().err


def test_few_calibration_tokens_are_told(tmp_path, tokens, made, capsys):
    root, *_ = made
    compress(root / "llama-whole", tmp_path / "small", tokens, 0.75, tokens=480, length=48)
    assert "few calibration tokens: 480, where 10 for each of 96 inputs, 960, are usual" in capsys.readouterr().err


def test_the_command(tmp_path, tokens, capsys, made):
    root, *_ = made
    given = [root / "llama-whole", tmp_path / "small", "--calibrate", tokens, "--method", "shared", "--groups", "continuity"]
    assert cli.main(["compress", *map(str, given)]) in (0, None)
    out = capsys.readouterr().out
    assert "expected memory" in out and "opens in transformers with trust_remote_code=True" in out
    told = json.loads((tmp_path / "small" / "config.json").read_text())
    assert told["model_type"] == "compressed_llama" and "model.layers.0.mlp.up_proj" in told["compressed"]


def test_work_is_read_back_as_it_was_saved(tmp_path, made):
    root, *_ = made
    streamed = open_streamed(root / "llama-whole")
    held = []
    streamed.run(TOKENS_BT, lambda index, h, block: (held.append(ours.measured(streamed, index, h, block)[1]), block(h))[1])
    found = METHODS["shared"](held[:2], 0.7)
    work = WorkFolder(tmp_path / "x", {"a": 1})
    work.save([0, 1], found)
    back = [work.load(0), work.load(1)]
    assert numel(one for block in back for one in block.values()) == numel(one for block in found for one in block.values())
    for a, b in zip(found, back):
        assert a.keys() == b.keys() and all(torch.equal(a[name].W_MN, b[name].W_MN) for name in a)
