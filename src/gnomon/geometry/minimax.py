"""Coefficients of the best odd approximations of sign(x), in plain Python floats.

The polar factor of X is sign applied to its singular values, so a good matrix iteration is a good scalar
approximation of sign on [lower, 1]. Two families:

- `polar_express`: compositions of quintics, each minimax on the interval the one before leaves
  (arXiv 2505.16932, section 3); matrix products only.
- `zolotarev`: one rational function with `poles` poles, the best of its type on the interval
  (Zolotarev 1877; Nakatsukasa & Freund, SIAM Review 58(3), 2016, eq. 4.4); one Cholesky factorisation a pole.

Everything here runs once per setting and is cached; nothing touches a tensor.
"""

from __future__ import annotations

import math
from functools import lru_cache

Quintic = tuple[float, float, float]

# Below this ratio of the interval's ends a quintic may not bend further: a steeper one gains on tiny singular values
# but overshoots when rounding pushes the largest past the interval (arXiv 2505.16932, section 4.4 and its code).
CUSHION = 0.02407327424182761


@lru_cache
def polar_express(lower: float = 1e-3, steps: int | None = None, tolerance: float = 1e-7) -> tuple[Quintic, ...]:
    """The triples (a, b, c) of x -> a x + b x^3 + c x^5 whose composition takes [lower, 1] to 1.

    Args:
        lower: smallest singular value to resolve, relative to the largest; in (0, 1].
        steps: how many triples; None = as many as bring the whole interval within `tolerance` of 1. Past convergence
            the triples are the limit (15/8, -10/8, 3/8).
        tolerance: largest |1 - composition| at which to stop when `steps` is None.
    """
    low: float = lower
    high: float = 1.0
    triples: list[Quintic] = []
    while len(triples) < steps if steps is not None else (high - low > 2 * tolerance):
        a, b, c = _minimax_quintic(max(low, CUSHION * high), high)

        def value(x: float, a: float = a, b: float = b, c: float = c) -> float:
            return x * (a + x * x * (b + x * x * c))

        # With the cushion in force the image of [low, high] is not centred on 1; rescale so that it is.
        centre = (value(low) + value(high)) / 2 if low < CUSHION * high else 1.0
        triples.append((a / centre, b / centre, c / centre))
        low = value(low) / centre
        high = 2.0 - low
    return tuple(triples)


def _minimax_quintic(low: float, high: float) -> Quintic:
    """Remez exchange for the odd quintic closest to 1 on [low, high] (arXiv 2505.16932, appendix)."""
    if low > (1 - 5e-6) * high:  # the exchange is singular on a point; its limit is the Newton-Schulz quintic
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner = (3 * low + high) / 4, (low + 3 * high) / 4
    for _ in range(60):
        a, b, c = _equioscillating(low, *inner, high)
        root = math.sqrt(9 * b * b - 20 * a * c)
        moved = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
        settled = max(abs(x - y) for x, y in zip(inner, moved)) < 1e-15 * high
        inner = moved
        if settled:
            break
    return a, b, c


def _equioscillating(*nodes: float) -> Quintic:
    """The odd quintic with p(x) = 1 - e, 1 + e, 1 - e, 1 + e at the four nodes, by elimination."""
    rows = [[x, x**3, x**5, (-1.0) ** i, 1.0] for i, x in enumerate(nodes)]
    for i in range(4):
        pivot = max(range(i, 4), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(4):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i])]
    a, b, c = (rows[i][4] / rows[i][i] for i in range(3))
    return a, b, c


@lru_cache
def zolotarev(lower: float, tolerance: float) -> tuple[float, tuple[tuple[float, float], ...], float]:
    """Zolotarev's approximation x scale (1 + sum_j w_j / (x^2 + c_j)) of sign(x) on [lower, 1].

    It has the fewest poles that keep its values there in [1 - tolerance, 1]: it touches 1 from below, so a matrix put
    through it never leaves the unit spectral ball.

    Returns:
        (scale, ((w_1, c_1), ...), floor): floor is the smallest value taken on [lower, 1].
    """
    for poles in range(1, 9):
        scale, terms, floor = _zolotarev(lower, poles)
        if 1 - floor <= tolerance:
            break
    return scale, terms, floor


def _zolotarev(lower: float, poles: int) -> tuple[float, tuple[tuple[float, float], ...], float]:
    modulus = 1 - lower * lower
    quarter = _quarter_period(modulus)
    nodes = []
    for i in range(1, 2 * poles + 1):
        sn2 = _jacobi_sn(i * quarter / (2 * poles + 1), modulus) ** 2
        nodes.append(lower * lower * sn2 / (1 - sn2))
    shifts, zeros = nodes[0::2], nodes[1::2]
    terms = []
    for j, shift in enumerate(shifts):
        weight = -math.prod([shift - z for z in zeros])
        weight /= math.prod([shift - other for i, other in enumerate(shifts) if i != j])
        terms.append((weight, shift))

    def value(x: float) -> float:
        return x * (1 + sum(w / (x * x + c) for w, c in terms))

    # It equioscillates: the ends of the interval are one minimum and one maximum.
    low, high = sorted((value(lower), value(1.0)))
    return 1 / high, tuple(terms), low / high


def _quarter_period(m: float) -> float:
    """Complete elliptic integral K(m) by the arithmetic-geometric mean."""
    a, b = 1.0, math.sqrt(1 - m)
    while abs(a - b) > 1e-15 * a:
        a, b = (a + b) / 2, math.sqrt(a * b)
    return math.pi / (a + b)


def _jacobi_sn(u: float, m: float) -> float:
    """Jacobi's sn(u | m) by descending Landen steps (Abramowitz & Stegun 16.4)."""
    a, b = 1.0, math.sqrt(1 - m)
    ladder = []
    while True:
        ladder.append((a, (a - b) / 2))
        a, b, gap = (a + b) / 2, math.sqrt(a * b), (a - b) / 2
        if gap <= 1e-15 * a:
            break
    phi = 2 ** len(ladder) * a * u
    for (_, c), mean in zip(reversed(ladder), [a, *(pair[0] for pair in reversed(ladder))]):
        phi = (phi + math.asin(c / mean * math.sin(phi))) / 2
    return math.sin(phi)
