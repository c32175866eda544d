"""`auto`: what is tried meets the budget, the best on rows not fitted to is written, and the folder is that model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hf_cases import build
from running_cases import make, write_tokens

from gnomon import cli
from gnomon.compress import folder_check
from gnomon.compress.best_mixture import JUDGES, WITHIN, auto, candidates, search
from gnomon.compress.budget import open_whole
from gnomon.errors import UserError
from gnomon.running import open_streamed, read_rows

transformers = pytest.importorskip("transformers")
IDS_N = np.random.default_rng(0).integers(3, 128, 800)
KEEP = 0.6


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "t.bin", IDS_N)


@pytest.fixture
def whole(tmp_path):
    make("llama").save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


def test_what_is_tried_meets_the_budget(whole, tokens):
    streamed = open_whole(whole)
    found = candidates(streamed, read_rows(streamed, tokens, 800, 50), KEEP)
    total = sum(streamed.nbytes(name) for name in streamed.block_names)
    assert [(len(m.gone), m.method) for m in found] == [(n, method) for n in (0, 1) for method in WITHIN]
    for mixture in found:
        left = sum(streamed.nbytes(name) for i, name in enumerate(streamed.block_names) if i not in mixture.gone)
        assert mixture.share * left == pytest.approx(KEEP * total)


def test_whole_blocks_alone_where_they_are_enough(whole, tokens):
    streamed = open_whole(whole)
    found = candidates(streamed, read_rows(streamed, tokens, 800, 50), 2 / 3)
    assert [(len(m.gone), m.method, m.share) for m in found if m.gone] == [(1, "", 1.0)]


def test_the_best_is_written(whole, tokens, tmp_path, monkeypatch):
    in_this_process = lambda folder, work, tokens_BT: (open_streamed(folder).run(tokens_BT).logits, {})  # noqa: E731
    monkeypatch.setattr(folder_check, "in_fresh_process", in_this_process)
    made, tried = auto(whole, tmp_path / "out", tokens, KEEP, tokens=800, length=50, verify=True)
    assert len(tried) == 6 and [m.loss for m in tried] == sorted(m.loss for m in tried)
    assert made.difference < 1e-5 and made.parameters <= KEEP * made.parameters_before
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert len(model.model.layers) == 3 - len(tried[0].gone)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_a_mixture_with_blocks_left_out_is_written(whole, tokens, tmp_path, monkeypatch):
    from gnomon.compress import best_mixture

    monkeypatch.setattr(best_mixture, "DEPTH", (1.0,))
    made, tried = auto(whole, tmp_path / "out", tokens, KEEP, tokens=800, length=50)
    assert {len(m.gone) for m in tried} == {1}
    assert 0.5 * made.parameters_before < made.parameters <= KEEP * made.parameters_before
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    rows_BT = torch.from_numpy(IDS_N).view(-1, 50)
    with torch.no_grad():
        assert model(rows_BT, labels=rows_BT).loss.item() == pytest.approx(made.loss, rel=1e-4)


def test_rows_that_judge_are_not_fitted_to(whole, tokens, monkeypatch):
    from gnomon.compress import best_mixture

    streamed = open_whole(whole)
    rows = read_rows(streamed, tokens, 800, 50)
    fitted, judged = [], []
    monkeypatch.setattr(best_mixture, "_fill", lambda s, rows, *_: fitted.append(rows.tokens_BT))
    monkeypatch.setattr(best_mixture, "loss_with", lambda s, rows, *_: judged.append(rows.tokens_BT) or 1.0)
    search(streamed, rows, KEEP)
    assert torch.equal(judged[0], rows.tokens_BT[::JUDGES]) and len(fitted[0]) + len(judged[0]) == len(rows.tokens_BT)
    assert not {tuple(row) for row in fitted[0].tolist()} & {tuple(row) for row in judged[0].tolist()}


def test_blocks_that_depend_on_their_number_stay(tokens, tmp_path, monkeypatch, capsys):
    from gnomon.compress import best_mixture
    from gnomon.models.hf import GnomonForCausalLM

    GnomonForCausalLM.from_transformer(build("llama-sphere")).save_pretrained(tmp_path / "whole")
    streamed = open_whole(tmp_path / "whole")
    monkeypatch.setattr(best_mixture, "changes", lambda *_: list(range(len(streamed.blocks))))  # the first goes: the others move up
    monkeypatch.setattr(best_mixture, "loss_with", lambda s, rows, load, gone: 1.0 - len(gone))
    made, tried = auto(tmp_path / "whole", tmp_path / "out", tokens, 0.5, tokens=800, length=50)
    assert tried[0].gone and "depends on their number" in capsys.readouterr().err
    assert made.parameters <= 0.5 * made.parameters_before


def test_a_method_that_does_not_fit_is_left_out(tokens, tmp_path):
    make("mixtral").save_pretrained(tmp_path / "whole")
    streamed = open_whole(tmp_path / "whole")
    found = search(streamed, read_rows(streamed, tokens, 800, 50), 0.66)
    assert found and all(mixture.method in ("", "pivoted") for mixture in found)


def test_mistakes_are_told(whole, tokens, tmp_path):
    streamed = open_whole(whole)
    with pytest.raises(UserError, match="one to fit to and one to judge by"):
        search(streamed, read_rows(streamed, tokens, 50, 50), KEEP)
    with pytest.raises(UserError, match="exists already"):
        auto(whole, whole, tokens)


def test_the_command(whole, tokens, tmp_path, capsys):
    arguments = [whole, tmp_path / "out", "--calibrate", tokens, "--keep", KEEP, "--tokens", 800, "--method", "auto", "--heal", 2]
    assert cli.main(["compress", *map(str, arguments)]) in (0, None)
    out = capsys.readouterr().out
    assert all(method in out for method in WITHIN) and "healed by 2 steps" in out and f"wrote {tmp_path / 'out'}" in out
