"""What is done to the numbers before they are drawn, against direct definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.report.chart_data import extent, groups, late_range, log_ticks, noisy, short, smooth, split_finite, thin

numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=1, max_size=400), st.integers(4, 60))
def test_thinning_keeps_both_ends_and_extremes_and_the_limit(y, limit):
    kept = thin(y, limit)
    assert kept == sorted(set(kept)) and len(kept) <= max(limit, 4)
    assert kept[0] == 0 and kept[-1] == len(y) - 1
    assert min(y[i] for i in kept) == min(y) and max(y[i] for i in kept) == max(y)


def test_thinning_keeps_the_spike_that_every_nth_would_lose():
    y = [0.0] * 10_000
    y[7013] = 5.0
    assert 7013 in thin(y, 100)
    assert 7013 % 100 != 0


@given(st.lists(numbers, min_size=1, max_size=60), st.floats(0.1, 30))
def test_smoothing_is_the_two_sided_exponential_mean(y, half_life):
    y = np.array(y)
    distance = np.abs(np.arange(len(y))[:, None] - np.arange(len(y)))
    weights = 0.5 ** (distance / half_life)
    expected = weights @ y / weights.sum(1)
    np.testing.assert_allclose(smooth(list(y), half_life), expected, rtol=1e-9, atol=1e-6)


def test_smoothing_by_nothing_changes_nothing():
    assert smooth([3.0, 1.0], 0) == [3.0, 1.0]


def test_what_cannot_be_drawn_is_counted_and_what_was_never_a_point_is_not():
    rows = [{"x": 1, "y": 2.0}, {"x": 2, "y": math.nan}, {"x": 3, "y": None}, {"x": 4}, {"x": 5, "y": math.inf},
            {"x": 6, "y": -1.0}, {"x": 7, "y": True}]
    kept, lost = split_finite(rows, ["x", "y"])
    assert [row["x"] for row in kept] == [1, 6] and lost == 4
    kept, lost = split_finite(rows, ["x", "y"], log=["y"])
    assert [row["x"] for row in kept] == [1] and lost == 5


@given(st.floats(1e-12, 1e12), st.floats(1.0, 1e9))
def test_log_ticks_are_few_and_surround_the_values(low, factor):
    ticks = log_ticks(low, low * factor)
    assert ticks == sorted(ticks) and len(ticks) <= 13
    assert ticks[0] <= low * (1 + 1e-12)


def test_the_late_range_leaves_the_first_values_out_only_when_that_helps():
    falling = [{"x": i, "y": 2 + 10 * math.exp(-i / 3)} for i in range(100)]
    low, high = late_range(falling, "x", "y", 0.1)
    assert 1.9 < low < 2.0 < high < 3.0
    flat = [{"x": i, "y": 2 + i % 2} for i in range(100)]
    assert late_range(flat, "x", "y", 0.1) is None
    assert late_range(falling, "x", "y", 0) is None
    level = [{"x": 0, "y": 10}, *({"x": i, "y": 2} for i in range(10, 100))]
    assert late_range(level, "x", "y", 0.05) is None  # a range without height is no range


def test_noise_is_told_from_a_trend():
    rng = np.random.default_rng(0)
    assert noisy(list(rng.normal(size=500)))
    assert not noisy(list(np.linspace(0, 1, 500)))
    assert not noisy([1.0] * 500)


def test_groups_keep_the_order_of_first_appearance():
    rows = [{"a": "z"}, {"a": "b"}, {"a": "z"}]
    assert {key: len(inside) for key, inside in groups(rows, ["a"]).items()} == {("z",): 2, ("b",): 1}
    assert list(groups(rows, ["a"])) == [("z",), ("b",)]
    assert extent([{"a": 1, "b": -1}, {"a": 5, "b": 0}], ["a", "b"]) == (-1, 5)


@pytest.mark.parametrize("value, cut", [(1 / 3, 0.333333), (np.float32(0.5), 0.5), (123456789, 123456789),
                                        (np.int64(3), 3), ("text", "text"), (None, None)])
def test_floats_are_cut_and_all_else_is_kept(value, cut):
    assert short(value) == cut and not isinstance(short(value), np.generic)
