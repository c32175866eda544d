"""What is remembered of gradients, against plain Python in float64 and torch's own AdamW."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gnomon
from gnomon.errors import UserError
from gnomon.optim import ManifoldMuon
from gnomon.optim.updates import updates


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def adam_h(rows, gradients, lr, b1, b2, eps):
    """AdamH as arXiv 2606.16899 writes it, on lists of numbers, corrections for the start and all."""
    w = [x for row in rows for x in row]
    m, v, R = [0.0] * len(w), [0.0] * len(w), math.sqrt(sum(x * x for x in w))
    for t, g in enumerate(gradients, 1):
        g = [x for row in g for x in row]
        m = [b1 * a + (1 - b1) * x for a, x in zip(m, g)]
        v = [b2 * a + (1 - b2) * x * x for a, x in zip(v, g)]
        u = [(a / (1 - b1**t)) / (math.sqrt(c / (1 - b2**t)) + eps) for a, c in zip(m, v)]
        size = math.sqrt(sum(x * x for x in u))
        w = [x - lr * R * y / size for x, y in zip(w, u)]
        norm = math.sqrt(sum(x * x for x in w))
        w = [R * x / norm for x in w]
    return w


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 1)])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-7), (torch.float32, 1e-5)])
def test_adam_on_the_sphere_is_adam_h(shape, dtype, bound):
    start, gradients = gaussian(*shape), [gaussian(*shape, seed=step + 1) for step in range(12)]
    W = nn.Parameter(start.to(dtype, copy=True))
    options = dict(lr=0.03, adamw_betas=(0.8, 0.97), adamw_eps=1e-12)
    optimizer = ManifoldMuon([{"params": [("W", W)], "manifold": "sphere"}], direction="adam", momentum=0.3, scale="rms", **options)
    for G in gradients:
        W.grad = G.to(dtype)
        optimizer.step()
    expected = adam_h(start.tolist(), [G.tolist() for G in gradients], 0.03, 0.8, 0.97, 1e-12)
    assert W.detach().double().flatten().tolist() == pytest.approx(expected, rel=bound, abs=bound)
    assert {key: value.shape for key, value in optimizer.state[W].items()} == {"momentum": shape, "variance": shape}


def test_adams_update_is_torchs_but_for_a_factor():
    W, V = (nn.Parameter(torch.zeros(6, 4, dtype=torch.float64)) for _ in range(2))
    theirs = torch.optim.Adam([V], lr=1.0, betas=(0.9, 0.95), eps=1e-15)
    group, state = {"direction": "adam", "betas": (0.9, 0.95), "eps": 1e-15}, {W: {}}
    for step in range(4):
        W.grad = V.grad = gaussian(6, 4, seed=step)
        before = V.detach().clone()
        theirs.step()
        ours, moved = updates(group, [W], state)[0], before - V.detach()
        torch.testing.assert_close(ours / ours.norm(), moved / moved.norm())


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_torchs(nesterov):
    W, group, state = nn.Parameter(torch.zeros(3, 3)), {"direction": "msign", "momentum": 0.9, "nesterov": nesterov}, {}
    state[W], expected = {}, torch.zeros(3, 3)
    for step in range(3):
        W.grad = gaussian(3, 3, seed=step, dtype=torch.float32)
        found = updates(group, [W], state)[0]
        expected = 0.9 * expected + 0.1 * W.grad
        torch.testing.assert_close(found, 0.9 * expected + 0.1 * W.grad if nesterov else expected)
        assert found.data_ptr() not in (W.grad.data_ptr(), state[W]["momentum"].data_ptr())


@pytest.mark.parametrize("direction", ["msign", "adam"])
def test_what_never_had_a_gradient_stays_on_the_sphere(direction):
    """An unused row has moments of zero: 0 / (0 + eps) is no step."""
    W = nn.Parameter(gaussian(6, 4, dtype=torch.float32))
    optimizer, before = ManifoldMuon([{"params": [("W", W)], "manifold": "sphere"}], direction=direction), W.detach().clone()
    for _ in range(3):
        W.grad = torch.zeros(6, 4)
        optimizer.step()
    torch.testing.assert_close(W.detach(), before)


def test_adam_is_for_the_sphere_alone():
    W, V = nn.Parameter(gaussian(6, 4)), nn.Parameter(gaussian(6, 4))
    for manifold in (gnomon.Stiefel(), gnomon.Euclidean(), gnomon.SpectralBall()):
        with pytest.raises(UserError, match=f"is for matrices on Sphere.* W is on {type(manifold).__name__}"):
            ManifoldMuon([{"params": [("W", W)], "manifold": manifold}], direction="adam")
    optimizer = ManifoldMuon([{"params": [("W", W)], "manifold": "sphere"}])
    optimizer.add_param_group({"params": [("V", V)], "manifold": "sphere", "direction": "adam"})
    for P in (W, V):
        P.grad = gaussian(6, 4, seed=2)
    optimizer.step()
    assert [set(optimizer.state[P]) for P in (W, V)] == [{"momentum"}, {"momentum", "variance"}]
    with pytest.raises(UserError, match="direction.*adam"):
        ManifoldMuon([{"params": [("U", nn.Parameter(gaussian(6, 4)))], "manifold": "sphere"}], direction="adma")
