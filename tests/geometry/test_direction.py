"""The direction of steepest descent: feasible, certified close to optimal, blind to scale."""

from __future__ import annotations

import pytest
import torch

import gnomon
from gnomon.geometry.steepest import direction, paper_direction

S, D, O, E = gnomon.Stiefel(), gnomon.DGram(), gnomon.Oblique(), gnomon.Euclidean()
FREE = [E, gnomon.Sphere(), gnomon.SpectralBall(), gnomon.SpectralSphere()]
ALL = [S, D, O, *FREE]
SHAPES = [(64, 16), (16, 64), (48, 16), (32, 16), (16, 16), (15, 15), (12, 1)]


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def point(manifold, shape, dtype=torch.float32, spread=None):
    W = manifold.random(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    if spread is not None:
        n = min(shape)
        lengths = torch.logspace(0, torch.log10(torch.tensor(float(spread))), n, dtype=torch.float64)[torch.randperm(n)]
        X = W if shape[0] >= shape[1] else W.T
        X = X / X.norm(dim=0) * lengths
        W = X if shape[0] >= shape[1] else X.T
    return W.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("manifold", [S, D, O], ids=["stiefel", "dgram", "oblique"])
@pytest.mark.parametrize("steps", [0, 3])
def test_feasible(manifold, shape, steps):
    found = direction(point(manifold, shape), gaussian(*shape), manifold, steps=steps)
    # The bound is enforced with a spectral norm from a few power iterations.
    assert torch.linalg.matrix_norm(found.A.double(), 2) <= 1.025
    assert found.tangency < 2e-3
    assert (found.A * gaussian(*shape)).sum() > 0


@pytest.mark.parametrize("manifold", [S, D], ids=["stiefel", "dgram"])
@pytest.mark.parametrize("rows, least", [(4, 0.98), (3, 0.97), (2, 0.93)])
def test_certified_alignment_at_the_default(manifold, rows, least):
    """`alignment` divides by an upper bound of the optimum, so the true alignment is at least this."""
    shape = (rows * 96, 96)
    assert direction(point(manifold, shape), gaussian(*shape), manifold, steps=3).alignment > least


def decaying(m, n):
    """A gradient like those of training: singular values that fall as 1 / (1 + 60 i / n), half of them below a thirtieth."""
    U, V = (torch.linalg.qr(gaussian(k, n, seed=k, dtype=torch.float64))[0] for k in (m, n))
    return ((U / (1 + 60 * torch.arange(n) / n)) @ V.T).float()


@pytest.mark.parametrize("manifold", [S, D], ids=["stiefel", "dgram"])
@pytest.mark.parametrize("rows, rough, refined", [(4, 0.92, 0.98), (3, 0.9, 0.97), (2, 0.83, 0.93)])
def test_certified_alignment_for_gradients_like_those_of_training(manifold, rows, rough, refined):
    shape = (int(rows * 96), 96)
    W, G = point(manifold, shape), decaying(*shape)
    assert direction(W, G, manifold).alignment > rough
    assert direction(W, G, manifold, steps=1).alignment > refined


def exact_square(W, G):
    """Square Stiefel in float64: A = W msign(skew(W^T G)), skew singular values paired, by SVD."""
    P = W.T @ G
    U, s, V = torch.linalg.svd((P - P.T) / 2)
    return W @ (U[:, s > 1e-9 * s[0]] @ V[s > 1e-9 * s[0]])


@pytest.mark.parametrize("n", [16, 63, 64, 65])
def test_square_stiefel_is_closed_form(n):
    W, G = point(S, (n, n)), gaussian(n, n)
    found = direction(W, G, S)
    best = (G.double() * exact_square(W.double(), G.double())).sum()
    assert ((G.double() * found.A.double()).sum() / best).item() == pytest.approx(1, abs=2e-3)
    assert found.tangency < 1e-5


def oracle(W, G, columns, iterations=3000):
    """max <G, A>, |A|_2 <= 1, A tangent: float64 dual subgradient descent; returns the best (upper) bound found."""
    d = W.norm(dim=0)
    weight = 1 / (d[:, None] ** 2 + d[None, :] ** 2)
    L, best, step = torch.zeros(len(d), len(d), dtype=torch.float64), float("inf"), None
    for k in range(iterations):
        U, s, V = torch.linalg.svd(G + W @ L, full_matrices=False)
        best = min(best, s.sum().item())
        H = W.T @ (U @ V)
        H = (H + H.T) * weight
        if columns == "free":
            H.fill_diagonal_(0)
        step = s.mean() if step is None else step
        L = L - step * H / (1 + k) ** 0.5
    return best


@pytest.mark.parametrize("manifold, columns", [(S, "fixed"), (D, "free")], ids=["stiefel", "dgram"])
@pytest.mark.parametrize("shape", [(24, 6), (18, 6), (12, 6)])
def test_against_a_float64_dual_solver(manifold, columns, shape):
    W, G = point(manifold, shape, torch.float64), gaussian(*shape, dtype=torch.float64)
    bound = oracle(W, G, columns)
    gains = [(G * direction(W, G, manifold, steps=k).A).sum().item() for k in (0, 10)]
    assert gains[1] <= bound * (1 + 1e-6)
    assert gains[1] / bound > {24: 0.985, 18: 0.97, 12: 0.93}[shape[0]]
    assert gains[0] / bound > 0.88


@pytest.mark.parametrize("manifold", ALL, ids=lambda m: m.name)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6, 1e30, 1e-30])
def test_blind_to_the_scale_of_the_gradient(manifold, scale):
    W, G = point(manifold, (48, 16)), gaussian(48, 16)
    a, b = (direction(W, G * c, manifold).A for c in (1.0, scale))
    # Muon's quintics run in bf16, where a scale that is no power of two rounds anew.
    assert ((a - b).norm() / a.norm()).item() < (0.05 if manifold in FREE else 0.02)


@pytest.mark.parametrize("spread", [1, 3, 10, 30])
def test_dgram_bears_uneven_columns(spread):
    W = point(D, (128, 32), spread=spread)
    found = direction(W, gaussian(128, 32), D)
    assert found.alignment > 0.9 and found.tangency < 3e-3


@pytest.mark.parametrize("manifold", [S, D, O], ids=["stiefel", "dgram", "oblique"])
def test_rotating_everything_rotates_the_direction(manifold):
    W, G = point(manifold, (48, 12), torch.float64), gaussian(48, 12, dtype=torch.float64)
    Q = torch.linalg.qr(gaussian(48, 48, seed=9, dtype=torch.float64))[0]
    torch.testing.assert_close(direction(Q @ W, Q @ G, manifold).A, Q @ direction(W, G, manifold).A, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("manifold", ALL, ids=lambda m: m.name)
def test_no_gradient_no_direction(manifold):
    W = torch.stack([point(manifold, (24, 8))] * 3)
    G = torch.stack([gaussian(24, 8), torch.zeros(24, 8), gaussian(24, 8, seed=1)])
    A = direction(W, G, manifold).A
    assert A.isfinite().all() and not A[1].any() and A[0].any()


DEFICIENT = {
    "rank-1": lambda G: torch.outer(G[:, 0], G[0]),
    "few columns": lambda G: G * (torch.arange(G.shape[1]) < 3),
    "few rows": lambda G: G * (torch.arange(G.shape[0])[:, None] < 3),
    "one entry": lambda G: 1e-6 * G + (torch.arange(G.numel()).view(G.shape) == 0),
    "tiny": lambda G: 1e-20 * G,
}


@pytest.mark.parametrize("kind", DEFICIENT)
@pytest.mark.parametrize("shape", [(64, 64), (65, 65), (192, 64), (64, 192), (96, 64)])
@pytest.mark.parametrize("manifold", [S, D, O], ids=["stiefel", "dgram", "oblique"])
@pytest.mark.parametrize("steps", [0, 2])
def test_deficient_gradients_give_finite_feasible_directions(manifold, shape, kind, steps):
    """What training meets at once: gradients of rank one, unused inputs, one large entry."""
    G = DEFICIENT[kind](gaussian(*shape))
    found = direction(point(manifold, shape), G, manifold, steps=steps)
    assert found.A.isfinite().all() and torch.linalg.matrix_norm(found.A.double(), 2) < 1.03
    assert (found.A * G).sum() >= 0


@pytest.mark.parametrize("manifold", FREE, ids=lambda m: m.name)
@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_free_directions_are_muons_own(manifold, shape):
    from torch.optim._muon import _zeropower_via_newtonschulz

    G = gaussian(*shape)
    expected = _zeropower_via_newtonschulz(G, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
    torch.testing.assert_close(direction(point(manifold, shape), G, manifold).A.float(), expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("kind", [gnomon.Stiefel, gnomon.DGram, gnomon.Oblique])
def test_the_papers_solver_is_a_property_of_the_manifold(kind):
    generator = torch.Generator().manual_seed(0)
    W, G = kind().random(24, 8, generator=generator), torch.randn(24, 8, generator=generator) / 14
    asked = direction(W, G, kind(paper=True), steps=3)
    assert torch.equal(asked.A, paper_direction(W, G, kind()).A)
    assert not torch.equal(asked.A, direction(W, G, kind(), steps=3).A)
