"""`gnomon study compression` on a small model: every method keeps to its budget, what is on file is not measured again."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from running_cases import make, write_tokens, write_word_tokenizer

from gnomon import cli, studies
from gnomon.errors import UserError
from gnomon.studies import compression_study
from gnomon.studies.compression_cells import PARTS, Setup, cells, setup

pytest.importorskip("transformers")
KEEP = 0.7


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    make("llama").save_pretrained(folder / "llama")
    write_word_tokenizer(folder / "llama")
    passages = ["w1 w2 w3", "w7 w5", "w9 w9 w9 w9 w9"]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    for name in ("calibration", "a", "b"):
        write_tokens(folder / f"{name}.bin", np.random.default_rng(len(name)).integers(3, 128, 1200))
    return folder


def asked(place, *methods, **more):
    texts = ",".join(str(place / f"{name}.bin") for name in ("a", "b"))
    given = dict(model=place / "llama", texts=texts, calibration=500, tokens=100, length=50, keep=KEEP) | more
    return setup(str(place / "calibration.bin"), 2, methods, given)


@pytest.fixture(scope="module")
def found(place):
    """All methods and parts."""
    return compression_study.run(asked(place, sequential=False), place / "o.jsonl")


@pytest.fixture(scope="module")
def with_last_words(found, place):
    """Some of them asked for LAMBADA, with a file that has their losses."""
    shutil.copy(place / "o.jsonl", place / "l.jsonl")
    wanted = asked(place, "private", lambada=place / "lambada.jsonl", items=3, sequential=False)
    assert {tuple(cell["what"]) for cell in compression_study.left(wanted, place / "l.jsonl")} == {("lambada",)}
    return compression_study.run(wanted, place / "l.jsonl")


def test_every_cell_is_there_once(found, place):
    assert [compression_study.cell_of(line) for line in found] == list(cells(asked(place)))


def test_budgets_are_kept(found):
    from gnomon.studies.compression_methods import METHODS, ROUNDED

    whole = next(line for line in found if line["method"] == "whole")
    for line in found:
        share = {key: line[key] / whole[key] for key in ("weights", "bytes") if key in line}
        if line["method"] in ROUNDED:
            assert share["weights"] == 1 and share["bytes"] == pytest.approx({"int8": 0.51, "int4": 0.28}[line["method"]], abs=0.02)
        elif line["method"].startswith(("depth", "merge")):
            assert share["weights"] == pytest.approx(2 / 3) and len(line["gone"]) == 1
        elif line["method"] in METHODS:
            # What rank and channels leave unused is less than one of them for each matrix.
            assert KEEP - 0.06 < share["weights"] <= KEEP, line["method"]
            assert share["bytes"] == share["weights"] or "+" in line["method"] and share["bytes"] < 0.6 * share["weights"]


def test_losses_are_of_the_model_in_transformers(found, place):
    import transformers

    from gnomon.data import open_tokens

    model = transformers.AutoModelForCausalLM.from_pretrained(place / "llama").eval()
    rows_BT = torch.from_numpy(np.asarray(open_tokens(str(place / "a.bin"))[0:100], dtype=np.int64)).view(2, 50)
    with torch.no_grad():
        expected = model(rows_BT, labels=rows_BT).loss.item()
    whole = next(line for line in found if line["method"] == "whole")
    assert whole["losses"]["a"] == pytest.approx(expected, abs=1e-4)
    rounded = next(line for line in found if line["method"] == "int8")
    assert rounded["losses"]["a"] == pytest.approx(expected, abs=0.02)


def test_last_words_are_those_of_the_model_in_transformers(with_last_words, found, place):
    """And are added to what is on file, which is not measured again."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(place / "llama").eval()
    with torch.no_grad():
        rows = [model(torch.tensor([row])).logits[0, -1].log_softmax(-1) for row in ([1, 2], [7], [9] * 4)]
    whole, *private = [line for line in with_last_words if "lambada" in line]
    assert whole["lambada"]["nats"] == pytest.approx(-(rows[0][3] + rows[1][5] + rows[2][9]).item() / 3, abs=1e-4)
    assert [(line["method"], line["sample"]) for line in private] == [("private", 0), ("private", 1)]
    assert private[0]["lambada"]["nats"] != whole["lambada"]["nats"]
    before = {compression_study.cell_of(line): line for line in found}
    assert all(line["losses"] == before[compression_study.cell_of(line)]["losses"] for line in private)


def test_parts_hold_what_the_verdict_reads(found):
    parts = {line["method"]: line[line["method"]] for line in found if line["method"] in PARTS}
    assert {role: set(sides) for role, sides in parts["roles"].items()} == dict.fromkeys(
        ("query", "key", "value", "output", "gate", "up", "down"), {"own", "input", "output"}
    )
    assert {len(some) for some in parts["pairs"].values()} == {2}
    assert {key: len(some) for key, some in parts["blocks"].items() if key != "whole"} == dict.fromkeys(
        ("without", "change", "calibration", "continuity"), 3
    )
    assert parts["whitening"].keys() == parts["roles"].keys()
    assert all(0 < one <= other < 1 for role in parts["whitening"].values() for one, other in zip(role["whitened"], role["plain"]))


def test_what_is_on_file_is_not_measured_again(found, place, monkeypatch):
    from gnomon.studies import compression_bench

    monkeypatch.setattr(compression_bench, "Bench", None)
    assert compression_study.run(asked(place, sequential=False), place / "o.jsonl") == found


def test_fitted_to_the_smaller_blocks_before(found, place):
    lines = compression_study.run(asked(place, "private", "modules"), place / "sequential.jsonl")
    for line in lines:
        other = next(one for one in found if compression_study.cell_of(one) == compression_study.cell_of(line))
        assert line["weights"] == other["weights"]
        assert line["losses"]["a"] == pytest.approx(other["losses"]["a"], abs=0.3)
        assert (line["losses"] == other["losses"]) == (line["method"] == "whole")


def test_other_settings_are_another_study(place, tmp_path):
    file = tmp_path / "o.jsonl"
    file.write_text(json.dumps(asked(place).same | dict(method="whole", keep=1.0, sample=0)) + "\n" + '{"cut')
    assert len(compression_study.lines(file, asked(place))) == 1 and not compression_study.lines(file, asked(place, tokens=64))
    file.write_text('{"cut\n{}\n')
    with pytest.raises(UserError, match="line 1, is no cell"):
        compression_study.lines(file)


def test_mistakes_are_told(place):
    with pytest.raises(UserError, match="--set texts= missing"):
        setup("x.bin", None, (), {"model": "m"})
    with pytest.raises(UserError, match="Did you mean 'texts'"):
        asked(place, text="x")
    with pytest.raises(UserError, match="Did you mean 'private'"):
        asked(place, "privat")
    with pytest.raises(UserError, match="no file"):
        asked(place, lambada="not-there.jsonl")
    with pytest.raises(UserError, match="whole numbers"):
        asked(place, tokens="many")
    write_tokens(place / "again" / "a.bin", np.arange(3, 128))
    with pytest.raises(UserError, match="equal names"):
        asked(place, texts=f"{place / 'a.bin'},{place / 'again' / 'a.bin'}")
    with pytest.raises(UserError, match="no recipes"):
        studies.load("compression")


def test_the_command(place, capsys, tmp_path):
    arguments = ["--data", place / "calibration.bin", "--seeds", 1, "--variants", "private", "--outcomes", tmp_path / "o.jsonl"]
    changes = [f"model={place / 'llama'}", f"texts={place / 'a.bin'}", "calibration=500", "tokens=100", "length=50", "keep=0.8,0.6"]
    assert cli.main(["study", "compression", *map(str, arguments), "--dry-run", "--set", *changes]) in (0, None)
    assert "whole" in capsys.readouterr().out and not (tmp_path / "o.jsonl").exists()
    assert cli.main(["study", "compression", *map(str, arguments), "--set", *changes]) in (0, None)
    assert "share of the bytes" in capsys.readouterr().out
    assert len(compression_study.lines(tmp_path / "o.jsonl")) == 3


def test_texts_have_names():
    found = Setup("m", "d", ("x/wikitext2/test.txt", "y/novels_val.txt.gz"), "m").named_texts
    assert list(found) == ["wikitext2-test", "novels_val"]


def test_samples_do_not_overlap(place):
    from gnomon.studies.compression_bench import Bench

    one, other = Bench(asked(place)).samples
    assert one.count == other.count == 500 and isinstance(asked(place), Setup)
    assert not torch.equal(one.tokens_BT, other.tokens_BT)
