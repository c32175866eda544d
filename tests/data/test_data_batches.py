"""The order of batches: pure in (seed, step), independent of the number of processes, fair over an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.data import Tokens, batch, chunks_per_epoch, slices
from gnomon.data.batches import _epoch
from gnomon.data.tokens import Joined
from gnomon.errors import UserError


def numbers(count: int) -> Tokens:
    """Token i is i, so that a batch shows where it was taken from."""
    return Tokens(np.arange(count, dtype=np.uint32), "numbers")


sizes = st.integers(1, 9).flatmap(lambda context: st.tuples(st.just(context), st.integers(context + 1, 120)))
seeds = st.integers(0, 2**64 - 1)


@given(sizes, seeds, st.integers(0, 50), st.integers(1, 12))
@settings(max_examples=40)
def test_a_batch_depends_on_seed_and_step_alone(size, seed, step, rows):
    context, count = size
    kwargs = dict(seed=seed, batch=rows, context=context)
    x_BT, y_BT = batch(numbers(count), step=step, **kwargs)
    for other in (0, step + 1, step // 2):  # whatever was asked for before
        batch(numbers(count), step=other, **kwargs)
    _epoch.cache_clear()
    again_BT, _ = batch(numbers(count), step=step, **kwargs)
    assert np.array_equal(x_BT, again_BT)
    assert x_BT.shape == y_BT.shape == (rows, context) and x_BT.dtype == y_BT.dtype == np.int64
    assert np.array_equal(y_BT, x_BT + 1)  # the target is the next token
    assert np.array_equal(x_BT, x_BT[:, :1] + np.arange(context))  # a row is one stretch of the tokens


@given(sizes, seeds, st.integers(0, 30), st.integers(1, 6), st.sampled_from([1, 2, 3, 8]))
@settings(max_examples=40)
def test_the_ranks_together_have_the_global_batch(size, seed, step, per_rank, world):
    context, count = size
    kwargs = dict(seed=seed, step=step, batch=per_rank * world, context=context)
    whole = batch(numbers(count), **kwargs)
    parts = [batch(numbers(count), rank=rank, world=world, **kwargs) for rank in range(world)]
    for side in (0, 1):
        assert np.array_equal(np.concatenate([part[side] for part in parts]), whole[side])


@given(sizes, seeds, st.integers(0, 3))
@settings(max_examples=40)
def test_an_epoch_has_every_chunk_exactly_once(size, seed, epoch):
    context, count = size
    tokens = numbers(count)
    chunks = chunks_per_epoch(tokens, context)
    starts = np.sort(
        [batch(tokens, seed=seed, step=epoch * chunks + i, batch=1, context=context)[0][0, 0] for i in range(chunks)]
    )
    assert np.array_equal(starts, starts[0] + context * np.arange(chunks))  # end to end, none twice, none left out
    assert 0 <= starts[0] < context and starts[-1] + context < count
    assert count - chunks * context < 2 * context  # and little of the text is left out


@given(sizes, seeds, st.integers(1, 40))
@settings(max_examples=30)
def test_the_batch_size_does_not_change_the_order(size, seed, rows):
    """A batch may cross the end of an epoch, or hold several: it is a cut through one endless sequence."""
    context, count = size
    one_by_one = [batch(numbers(count), seed=seed, step=i, batch=1, context=context)[0] for i in range(2 * rows)]
    two = [batch(numbers(count), seed=seed, step=i, batch=rows, context=context)[0] for i in range(2)]
    assert np.array_equal(np.concatenate(one_by_one), np.concatenate(two))


def test_seeds_and_epochs_differ_in_order_and_offset():
    tokens = numbers(4000)
    chunks = chunks_per_epoch(tokens, 16)
    kwargs = dict(batch=chunks, context=16)
    first = batch(tokens, seed=0, step=0, **kwargs)[0]
    for seed, step in ((1, 0), (0, 1), (2**63, 0)):
        assert not np.array_equal(first, batch(tokens, seed=seed, step=step, **kwargs)[0])
    offsets = {int(batch(tokens, seed=0, step=e, **kwargs)[0].min()) for e in range(40)}
    assert len(offsets) > 10 and max(offsets) < 16


def test_the_order_never_changes_between_versions():
    """Runs are compared across versions of gnomon and numpy: these numbers must stay."""
    x_BT, _ = batch(numbers(1000), seed=1234, step=5, batch=4, context=32)
    assert x_BT[:, 0].tolist() == [16, 112, 592, 48]


def test_the_source_of_the_order_is_philox():
    chunks, spare = 13, 15
    offset, order = _epoch(7, 3, chunks, spare)
    raw = np.random.Philox(key=7 + (3 << 64)).random_raw(chunks + 1).tolist()
    assert offset == raw[0] % (spare + 1)
    assert order.tolist() == sorted(range(chunks), key=lambda i: raw[1 + i])


@given(st.integers(1, 9), st.integers(2, 120), st.integers(1, 20))
@settings(max_examples=40)
def test_the_validation_slice_is_the_beginning(context, count, wanted):
    if count <= context:
        with pytest.raises(UserError):
            slices(numbers(count), context=context, count=wanted)
        return
    x_NT, y_NT = slices(numbers(count), context=context, count=wanted)
    windows = min(wanted, (count - 1) // context)
    assert np.array_equal(x_NT, np.arange(windows * context).reshape(windows, context))
    assert np.array_equal(y_NT, x_NT + 1)


def test_several_files_give_the_same_batches_as_one():
    whole = np.arange(1000, dtype=np.uint16)
    shards = Tokens(Joined([whole[:13], whole[13:700], whole[700:]]), "shards")
    for step in range(20):
        kwargs = dict(seed=3, step=step, batch=7, context=24)
        assert np.array_equal(batch(shards, **kwargs)[0], batch(Tokens(whole, "one"), **kwargs)[0])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(context=100), r"numbers has 100 tokens; a context of 100 needs one more"),
        (dict(context=0), "at least one token"),
        (dict(batch=0), "batch must be positive"),
        (dict(step=-1), "not negative"),
        (dict(seed=-1), "not negative"),
        (dict(batch=6, world=4), "6 rows cannot be dealt to rank 0 of 4: use a multiple of 4"),
        (dict(batch=8, rank=4, world=4), "rank 4 of 4"),
    ],
)
def test_what_cannot_be_is_explained(change, message):
    with pytest.raises(UserError, match=message):
        batch(numbers(100), **(dict(seed=0, step=0, batch=4, context=8) | change))
    with pytest.raises(UserError, match="number of validation windows"):
        slices(numbers(100), context=8, count=0)
