"""Healed cells of the study: those that `compress`, `heal` and transformers give, one after the other."""

from __future__ import annotations

import hf_cases
import numpy as np
import pytest
import torch
from running_cases import make, write_tokens

from gnomon.compress import compress, heal, shorten
from gnomon.compress.healing import HELD_OUT
from gnomon.errors import UserError
from gnomon.running import open_streamed, read_rows
from gnomon.studies import compression_study
from gnomon.studies.compression_cells import setup
from gnomon.studies.compression_healed import BATCH, LENGTH, healed
from gnomon.studies.compression_methods import Made

transformers = pytest.importorskip("transformers")
# A text with something to learn: each id is followed by the next.
IDS_N = (np.arange(1600) + np.random.default_rng(0).integers(0, 2, 1600)) % 100 + 3
STEPS = 6
TOKENS = max(STEPS * BATCH, HELD_OUT) * LENGTH * HELD_OUT // (HELD_OUT - 1)


def asked(place, *methods, **more):
    given = dict(model=place / "m", texts=place / "text.bin", calibration=500, tokens=100, length=50, keep=0.7) | more
    return setup(str(place / "calibration.bin"), 1, methods, given)


def loss(folder, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    rows_BT = torch.from_numpy(ids.astype(np.int64)).view(2, 50)
    with torch.no_grad():
        return model(rows_BT, labels=rows_BT).loss.item()


def test_as_the_commands_would(tmp_path):
    make("llama").save_pretrained(tmp_path / "m")
    write_tokens(tmp_path / "calibration.bin", IDS_N)
    write_tokens(tmp_path / "text.bin", IDS_N[700:800])
    methods = ("mlp", "depth by change", "merge by change")
    lines = compression_study.run(asked(tmp_path, *methods, heal=STEPS), tmp_path / "o.jsonl")
    found = {line["method"]: line for line in lines}
    assert list(found) == ["whole", *methods, *(f"{method} + heal {STEPS}" for method in methods)]
    length = dict(tokens=500, length=50)
    compress(tmp_path / "m", tmp_path / "mlp", tmp_path / "calibration.bin", 0.7, method="mlp", **length)
    for method, merge in (("depth", False), ("merge", True)):
        shorten(tmp_path / "m", tmp_path / method, tmp_path / "calibration.bin", 0.7, by="change", merge=merge, **length)
    for method in ("mlp", "depth", "merge"):
        name = next(name for name in methods if name.startswith(method))
        assert found[name]["losses"]["text"] == pytest.approx(loss(tmp_path / method, IDS_N[700:800]), abs=1e-3)
        heal(tmp_path / method, tmp_path / "calibration.bin", STEPS, batch=BATCH, length=LENGTH, tokens=TOKENS)
        after = found[f"{name} + heal {STEPS}"]
        assert after["losses"]["text"] == pytest.approx(loss(tmp_path / method, IDS_N[700:800]), abs=2e-3)
        assert after["losses"]["text"] < found[name]["losses"]["text"] and after["weights"] == found[name]["weights"]


def test_a_folder_that_is_another_model_is_refused(tmp_path, monkeypatch):
    from gnomon.models.hf import GnomonForCausalLM

    monkeypatch.setitem(hf_cases.SMALL, "layers", 3)
    GnomonForCausalLM.from_transformer(hf_cases.build("llama-sphere")).save_pretrained(tmp_path / "m")
    write_tokens(tmp_path / "text.bin", IDS_N[:100])
    streamed = open_streamed(tmp_path / "m")
    rows = read_rows(streamed, tmp_path / "text.bin", 64, 32)
    made = Made(gone=(0,))
    with pytest.raises(UserError, match="cannot be healed there"), healed(streamed, made, "no text is read", 1, 0, rows):
        pass
