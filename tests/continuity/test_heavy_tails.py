"""The exponent of a spectrum against samples whose exponent is known, and a direct search in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gnomon.continuity.heavy_tails import exponent, of_chance


def pareto(alpha: float, count: int, seed: int = 0) -> np.ndarray:
    """`count` numbers above 1 of density (alpha - 1) x^-alpha, largest first."""
    return np.sort((1 - np.random.default_rng(seed).random(count)) ** (-1 / (alpha - 1)))[::-1].copy()


def searched(x: np.ndarray) -> float:
    """Clauset, Shalizi, Newman, written out: every x_min, the likelihood's alpha, both sides of the empirical steps."""
    best, found = np.inf, np.nan
    for x_min in x:
        tail = np.sort(x[x >= x_min])
        if len(tail) < 10 or tail[-1] == x_min:
            continue
        alpha = 1 + len(tail) / np.log(tail / x_min).sum()
        law = 1 - (tail / x_min) ** (1 - alpha)
        steps = np.arange(len(tail) + 1) / len(tail)
        distance = max(np.abs(steps[1:] - law).max(), np.abs(steps[:-1] - law).max())
        if distance < best:
            best, found = distance, alpha
    return found


@pytest.mark.parametrize("alpha", [2.0, 3.5, 6.0])
def test_finds_the_exponent_of_a_power_law(alpha):
    found = exponent(torch.from_numpy(pareto(alpha, 3000)).sqrt())
    assert found == pytest.approx(alpha, rel=0.1)  # one standard error is (alpha - 1) / sqrt(3000)


@pytest.mark.parametrize("seed", range(3))
def test_is_the_search_written_out(seed):
    body = np.random.default_rng(seed).uniform(0.1, 1, 150)
    x = np.sort(np.concatenate([pareto(2.5, 100, seed), body]))[::-1].copy()
    assert exponent(torch.from_numpy(x).sqrt()) == pytest.approx(searched(x), rel=1e-9)


def test_does_not_depend_on_the_scale():
    sigma = torch.from_numpy(pareto(3.0, 500)).sqrt()
    assert exponent(sigma) == pytest.approx(exponent(1e-4 * sigma), rel=1e-9)


def test_few_values_or_equal_ones_have_none():
    assert exponent(torch.linspace(2, 1, 49)) is None
    assert exponent(torch.ones(100)) is None
    assert exponent(torch.cat([torch.linspace(2, 1, 40), torch.zeros(60)])) is None


def test_chance_is_the_exponent_of_gaussian_entries():
    W = torch.randn(96, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert of_chance(96, 200) == pytest.approx(exponent(torch.linalg.svdvals(W)), rel=1e-6)
