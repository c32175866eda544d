"""Rows that respect documents: each target belongs to the document of its row, each token is a target once an epoch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.data import NO_TARGET, Tokens, batch, chunks_per_epoch, mix, open_tokens, tokenizer
from gnomon.errors import UserError
from gnomon.models.config import tiny
from gnomon.models.transformer import Transformer
from gnomon.run_folder import read_metrics
from gnomon.train import preset, replace, train

END = tokenizer("byte").end_of_text


def stream(documents: list[list[int]], first_mark: bool = True) -> Tokens:
    ids = [id for text in documents for id in [END, *text]][0 if first_mark else 1 :]
    return Tokens(np.array(ids, np.uint16), "documents", 257, "byte")


texts = st.lists(st.lists(st.integers(0, 255), max_size=20), min_size=1, max_size=12)


@given(texts, st.integers(1, 9), st.integers(0, 99), st.booleans())
@settings(max_examples=50)
def test_an_epoch_has_every_pair_of_neighbours_of_one_document_once(documents, context, seed, first_mark):
    tokens = stream(documents, first_mark)
    # From the definition: token t + 1 is predicted from those before it, back to the last end of text.
    wanted = []
    document: list[int] = []
    for t, id in enumerate(tokens.array.tolist()[:-1]):
        document = [] if id == END else document
        document.append(id)
        inside = document[(len(document) - 1) // context * context :]
        wanted.append((tuple(inside), int(tokens.array[t + 1])))
    if END not in tokens.array or not wanted:
        return
    rows = chunks_per_epoch(tokens, context, "respect")
    seen = []
    for step in range(2 * rows):
        x_BT, y_BT = batch(tokens, seed=seed, step=step, batch=1, context=context, boundaries="respect")
        targets = int((y_BT != NO_TARGET).sum())
        assert targets >= 1 and (y_BT[0, targets:] == NO_TARGET).all() and (x_BT[0, targets:] == END)[1:].all()
        seen += [(tuple(x_BT[0, : t + 1].tolist()), int(y_BT[0, t])) for t in range(targets)]
        if step == rows - 1:
            assert sorted(seen) == sorted(wanted)
    assert sorted(seen) == sorted(2 * wanted)


def test_a_row_starts_with_its_document():
    tokens = stream([[1, 2, 3, 4, 5], [6], [], [7, 8]])
    x_BT, y_BT = batch(tokens, seed=0, step=0, batch=5, context=4, boundaries="respect")
    rows = sorted(zip(x_BT.tolist(), y_BT.tolist()))
    no = NO_TARGET
    assert rows == sorted(
        [
            ([END, 1, 2, 3], [1, 2, 3, 4]),
            ([4, 5, END, END], [5, END, no, no]),
            ([END, 6, END, END], [6, END, no, no]),
            ([END, END, END, END], [END, no, no, no]),
            ([END, 7, 8, END], [7, 8, no, no]),
        ]
    )


def test_the_loss_leaves_out_what_has_no_target():
    torch.manual_seed(0)
    model = Transformer(tiny(layers=1, width=16, heads=2, context=8))
    tokens = stream([[1, 2, 3, 4, 5], [6, 9, 8]])
    x, y = map(torch.from_numpy, batch(tokens, seed=0, step=0, batch=2, context=8, boundaries="respect"))
    whole = [model.loss(x[i : i + 1, :n], y[i : i + 1, :n]) * n for i in (0, 1) for n in [int((y[i] >= 0).sum())]]
    assert model.loss(x, y).item() == pytest.approx(sum(whole).item() / int((y >= 0).sum()), rel=1e-6)


def test_micro_batches_of_unequal_targets_give_the_gradient_of_the_batch(tmp_path):
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join("word " * (i * i % 23) + "end" for i in range(300)))
    from gnomon.data import prepare

    prepare(tmp_path / "a.txt", tmp_path / "tokens", tokenizer="byte")
    recipe = replace(
        preset("tiny"),
        {"model.layers": 1, "model.width": 16, "model.heads": 2, "model.context": 32, "data.batch": 8, "steps": 4,
         "data.train": str(tmp_path / "tokens"), "data.boundaries": "respect", "watch.eval_tokens": 64,
         "watch.probe_tokens": 32, "compute.device": "cpu"},
    )  # fmt: skip
    for accumulate in (1, 4):
        train(replace(recipe, {"data.accumulate": accumulate}), tmp_path / f"run-{accumulate}")
    one, four = ([r["loss"] for r in read_metrics(tmp_path / f"run-{n}")[1:]] for n in (1, 4))
    assert four == pytest.approx(one, rel=1e-5)
    train(replace(recipe, {"data.boundaries": "ignore"}), tmp_path / "ignoring")
    assert read_metrics(tmp_path / "ignoring")[1]["loss"] != pytest.approx(one[0], rel=1e-4)


def test_sources_of_a_mixture_respect_their_own_documents():
    mixed = mix([stream([[1] * 5, [2] * 9]), stream([[3] * 7, [4]])], [1, 1])
    x_BT, y_BT = batch(mixed, seed=0, step=0, batch=200, context=4, boundaries="respect")
    for x, y in zip(x_BT, y_BT):
        assert len(set(x[y != NO_TARGET]) - {END}) <= 1


def test_tokens_without_documents_are_refused():
    with pytest.raises(UserError, match="it is one document"):
        batch(open_tokens("jargon"), seed=0, step=0, batch=1, context=8, boundaries="respect")
    with pytest.raises(UserError, match="does not say which tokenizer"):
        batch(Tokens(np.arange(99), "raw"), seed=0, step=0, batch=1, context=8, boundaries="respect")
    with pytest.raises(UserError, match="Did you mean 'respect'"):
        batch(open_tokens("jargon"), seed=0, step=0, batch=1, context=8, boundaries="respekt")


@pytest.mark.skipif(sys.platform != "linux", reason="limits data the Linux way")
def test_a_file_larger_than_memory_may_be_used(tmp_path):
    """A sparse file of 1 GB, in a process that may not hold 200 MB."""
    code = """
import resource, sys
import numpy as np
from gnomon.data import batch, open_tokens, slices, frequencies
resource.setrlimit(resource.RLIMIT_DATA, (200 << 20, 200 << 20))
tokens = open_tokens(sys.argv[1])
assert len(tokens) == 500_000_000
for step in (0, 10**5):
    x, y = batch(tokens, seed=0, step=step, batch=64, context=1024)
assert x.shape == (64, 1024)
slices(tokens, context=1024, count=64)
assert frequencies(tokens, 300, 1_000_000)[0] == 1_000_000
try:
    np.asarray(tokens.array).astype("int64")
except MemoryError:
    print("fine")
"""
    with open(tmp_path / "huge.bin", "wb") as file:
        file.truncate(2 * 500_000_000)  # a hole, which reads as zeros
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "huge.bin")], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr
