"""Mixtures: exact shares, an order that is a function of (seed, step), and every source as it would be alone."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.data import (
    Mixture,
    Tokens,
    TokenWriter,
    batch,
    frequencies,
    mix,
    open_tokens,
    open_train_val,
    slices,
    tokenizer,
)
from gnomon.data.mixture import BLOCK, parse_mixture
from gnomon.errors import UserError

BYTE = tokenizer("byte")


def numbers(first: int, count: int) -> Tokens:
    """Token i is first + i, so that a batch shows which source it was taken from and where."""
    return Tokens(np.arange(first, first + count, dtype=np.uint32), f"from {first}")


def source_of(x_BT: np.ndarray) -> np.ndarray:
    return x_BT[:, 0] // 10_000


MIXED = mix([numbers(0, 900), numbers(10_000, 500), numbers(20_000, 70)], [6, 3, 1])


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.sampled_from([1, 2, 5]))
@settings(max_examples=20)
def test_the_ranks_together_have_the_global_batch_of_any_step(seed, step, world):
    kwargs = dict(seed=seed, step=step, batch=10, context=16)
    whole = batch(MIXED, **kwargs)
    parts = [batch(MIXED, rank=rank, world=world, **kwargs) for rank in range(world)]
    for side in (0, 1):
        assert np.array_equal(np.concatenate([part[side] for part in parts]), whole[side])
    assert np.array_equal(whole[1], whole[0] + 1)


@given(st.integers(0, 2**64 - 1), st.integers(1, 60))
@settings(max_examples=12)
def test_the_batch_size_does_not_change_the_order(seed, rows):
    one_by_one = [batch(MIXED, seed=seed, step=i, batch=1, context=16)[0] for i in range(2 * rows)]
    two = [batch(MIXED, seed=seed, step=i, batch=rows, context=16)[0] for i in range(2)]
    assert np.array_equal(np.concatenate(one_by_one), np.concatenate(two))


def test_each_block_has_the_exact_shares_at_random_places():
    orders = []
    for block in range(3):
        x_BT, _ = batch(MIXED, seed=3, step=block, batch=BLOCK, context=16)
        assert np.bincount(source_of(x_BT)).tolist() == [600, 300, 100]
        orders.append(source_of(x_BT))
    assert not np.array_equal(orders[0], orders[1])
    # At random: the rows of the first source are neither together nor evenly spaced.
    runs = np.diff(np.flatnonzero(np.diff(orders[0])))
    assert runs.min() == 1 and runs.max() > 5


def test_a_source_comes_in_the_order_it_has_alone():
    """The first source has the very rows of a run on it alone; the others have orders of their own."""
    x_BT, _ = batch(MIXED, seed=7, step=0, batch=4 * BLOCK, context=16)
    mine = x_BT[source_of(x_BT) == 0]
    assert np.array_equal(mine, batch(MIXED.sources[0], seed=7, step=0, batch=len(mine), context=16)[0])
    twins = mix([numbers(0, 900), numbers(10_000, 900)], [1, 1])
    x_BT, _ = batch(twins, seed=7, step=0, batch=BLOCK, context=16)
    left, right = (x_BT[source_of(x_BT) == k, 0] for k in (0, 1))
    assert not np.array_equal(left, right - 10_000)


def test_every_source_is_visited_epoch_by_epoch():
    x_BT, _ = batch(MIXED, seed=1, step=0, batch=BLOCK, context=16)
    small = x_BT[source_of(x_BT) == 2, 0]  # 70 tokens: 3 chunks an epoch
    for epoch in small[:99].reshape(-1, 3):
        assert np.array_equal(np.diff(np.sort(epoch)), [16, 16])


def test_the_order_never_changes_between_versions():
    x_BT, _ = batch(MIXED, seed=1234, step=5, batch=8, context=32)
    assert x_BT[:, 0].tolist() == [16, 112, 10025, 592, 10217, 20006, 48, 688]


@pytest.mark.parametrize("weights, counts", [([1, 1, 1], (334, 333, 333)), ([2, 0.5, 0.003], (799, 200, 1))])
def test_shares_are_rounded_to_the_nearest_row(weights, counts):
    assert mix([numbers(0, 99)] * 3, weights).counts == counts


def write(path, text, name="byte"):
    with TokenWriter(path, tokenizer(name)) as writer:
        writer.append(tokenizer(name).encode(text))
    return path


def test_a_mixture_is_a_line_of_text(tmp_path):
    write(tmp_path / "a-1.bin", "a" * 1000)
    write(tmp_path / "a-2.bin", "A" * 1000)
    write(tmp_path / "b.bin", "b" * 500)
    tokens = open_tokens(f"0.75*{tmp_path}/a-*.bin + .25 * {tmp_path}/b.bin", tokenizer="byte")
    assert isinstance(tokens, Mixture) and tokens.counts == (750, 250) and len(tokens) == 2500
    assert (tokens.vocab_size, tokens.tokenizer) == (257, "byte")
    assert tokens.name == f"0.75*{tmp_path}/a-*.bin + 0.25*{tmp_path}/b.bin"
    train, val = open_train_val(f"3*{tmp_path}/a-1.bin + 1*{tmp_path}/b.bin", fraction=0.1)
    assert [len(part) for part in (*train.sources, *val.sources)] == [900, 450, 100, 50]
    x_NT, _ = slices(val, context=4, count=12)
    assert BYTE.decode(x_NT[:, 0]) == "a" * 9 + "b" * 3  # as training weighs them
    assert frequencies(train, 257, 1000)[[ord("a"), ord("b")]].tolist() == [750, 250]


def test_a_path_that_exists_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("1*a + 2*b.bin", "text")
    assert len(open_tokens("1*a + 2*b.bin")) == 4


def test_what_cannot_be_mixed_is_explained(tmp_path):
    assert parse_mixture("out/a + b") == [] and parse_mixture("2*x") == [(2.0, "x")]
    assert parse_mixture("0.7*a+0.3*b") == parse_mixture(" .7 * a  +  .3*b ") == [(0.7, "a"), (0.3, "b")]
    assert parse_mixture("1*c++/x + 2*d+e") == [(1.0, "c++/x"), (2.0, "d+e")] and parse_mixture("c++/x+y") == []
    with pytest.raises(UserError, match="half a mixture"):
        open_tokens("0.5*jargon + jargon")
    with pytest.raises(UserError, match="nowhere"):
        open_tokens("0.5*jargon + 0.5*nowhere.bin")
    with pytest.raises(UserError, match="rounds to 0 of 1000"):
        open_tokens("1*jargon + 0.0001*jargon")
    with pytest.raises(UserError, match="positive weight"):
        open_tokens("1*jargon + 0*jargon")
    write(tmp_path / "g.bin", "x y z", "gpt2")
    write(tmp_path / "b.bin", "x y z")
    with pytest.raises(UserError, match="cannot be mixed"):
        open_tokens(f"1*{tmp_path}/g.bin + 1*{tmp_path}/b.bin")


def test_a_run_on_a_mixture_keeps_it_in_its_recipe_and_goes_on_as_if_never_stopped(tmp_path):
    from gnomon.run_folder import read_metrics
    from gnomon.train import preset, replace, train
    from gnomon.train.run_writer import load_recipe

    write(tmp_path / "a.bin", "the quick brown fox " * 99)
    write(tmp_path / "b.bin", "jumps over the lazy dog " * 99)
    recipe = replace(
        preset("tiny"),
        {"model.layers": 1, "model.width": 16, "model.heads": 2, "model.context": 16, "data.batch": 4, "steps": 4,
         "data.train": f"0.7*{tmp_path}/a.bin + 0.3*{tmp_path}/b.bin", "watch.eval_tokens": 64,
         "watch.probe_tokens": 32, "watch.save_every": 2, "compute.device": "cpu"},
    )  # fmt: skip
    train(recipe, tmp_path / "run")
    assert load_recipe(tmp_path / "run") == recipe
    losses = [record["loss"] for record in read_metrics(tmp_path / "run")[1:]]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    train(recipe, tmp_path / "run")
    assert [record["loss"] for record in read_metrics(tmp_path / "run")[1:]] == losses
