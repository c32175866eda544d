"""The power-law exponent of a matrix's spectrum, as people know it from WeightWatcher, and what chance gives.

Legend: W_MN a matrix, sigma_k its singular values, falling.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

_MIN_VALUES = 50  # fewer eigenvalues have no tail to speak of (WeightWatcher's limit too)
_MIN_TAIL = 10


def exponent(sigma_k: Tensor) -> float | None:
    """The exponent alpha of p(x) ~ x^-alpha for the eigenvalues x = sigma^2 of W'W above some x_min.

    Maximum likelihood, alpha = 1 + n / sum ln(x_i / x_min), at the x_min whose fit has the smallest Kolmogorov-Smirnov distance
    (Clauset, Shalizi, Newman, arXiv:0706.1062, eqs. 3.1 and 3.9). Every spectrum has one, a random matrix's too.

    Args:
        sigma_k: all singular values, largest first.

    Returns:
        alpha > 1; None for fewer than 50 values above zero, or where all are the same.
    """
    x_k = sigma_k.double().square()
    x_k = x_k[x_k > x_k.max() * 1e-12]
    if len(x_k) < _MIN_VALUES:
        return None
    log_k = x_k.log()
    count_k = torch.arange(1, len(x_k) + 1, dtype=torch.float64)
    # sum over the n largest of ln(x_i / x_n)
    excess_k = log_k.cumsum(0) - count_k * log_k
    best, found = math.inf, None
    for n in range(_MIN_TAIL, len(x_k) + 1):
        excess = float(excess_k[n - 1])
        if excess <= 0:
            continue
        alpha = 1 + n / excess
        # The share of the tail at or above x_i, and what the law says it is; the empirical step is judged at both of its ends.
        law_n = ((log_k[n - 1] - log_k[:n]) * (alpha - 1)).exp()
        distance = max(float((count_k[:n] / n - law_n).abs().max()), float(((count_k[:n] - 1) / n - law_n).abs().max()))
        if distance < best:
            best, found = distance, alpha
    return found


@functools.lru_cache(maxsize=64)
def of_chance(M: int, N: int) -> float | None:
    """The exponent that `exponent` finds for independent Gaussian entries of this shape (one draw, seed 0)."""
    W_MN = torch.randn(M, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    small = W_MN @ W_MN.T if M <= N else W_MN.T @ W_MN
    return exponent(torch.linalg.eigvalsh(small).clamp_min(0).sqrt().flip(0))
