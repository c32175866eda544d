"""The anchor against its equation in numpy, and as a part of every model."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from gnomon import residual
from gnomon.models import Transformer, TransformerConfig
from gnomon.models.anchor import Anchor

SMALL = dict(vocab_size=61, context=24, layers=2, heads=4, width=32, init_std=0.2)


def made(name, anchor=True):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(**SMALL, residual=name, anchor=anchor)).double()


def tokens(seed=0):
    return torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(seed))


def rows(seed):
    return np.random.default_rng(seed).standard_normal((7, 12))


def test_on_a_sphere_it_turns_towards_the_start_and_elsewhere_adds_it():
    h, start, g = rows(0), rows(1), 0.3
    turning, adding = Anchor("geonorm").double(), Anchor("pre-norm").double()
    with torch.no_grad():
        turning.amount.fill_(g), adding.amount.fill_(g)
        turned, added = (anchor(torch.tensor(h), torch.tensor(start)).numpy() for anchor in (turning, adding))
    np.testing.assert_allclose(added, h + g * start, rtol=1e-12)

    def angle(a, b):
        return np.arccos((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1))

    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(h, axis=-1), rtol=1e-12)
    between = angle(h, start)
    # The ratio of step to stream is g sin(between) |start| / |h|, and p = 1 turns by its arc tangent.
    moved = np.arctan(g * np.sin(between) * np.linalg.norm(start, axis=-1) / np.linalg.norm(h, axis=-1))
    np.testing.assert_allclose(angle(h, turned), moved, rtol=1e-6)
    np.testing.assert_allclose(angle(turned, start), between - moved, rtol=1e-6)


@pytest.mark.parametrize("name", residual.names())
def test_a_model_begins_as_the_one_without_and_learns_its_amounts(name):
    with_it, without = made(name), made(name, anchor=False)
    assert torch.equal(with_it(tokens()), without(tokens()))
    with_it.loss(tokens(), tokens(1)).backward()
    amounts = {n: p for n, p in with_it.named_parameters() if ".anchor_" in n}
    assert len(amounts) == 4 and all(p.shape == (1,) and p.grad.isfinite() for p in amounts.values())
    # Where the first sublayer starts from, the start itself is all there is; later ones have somewhere to go.
    assert all(bool(p.grad) for n, p in amounts.items() if not n.startswith("blocks.0.anchor_attention"))
    before = with_it(tokens()).detach()
    with torch.no_grad():
        for amount in amounts.values():
            amount += 0.2
    assert not torch.allclose(with_it(tokens()), before)


@pytest.mark.parametrize("name", ["pre-norm", "bounded-sphere"])
def test_it_is_causal_and_a_cache_changes_nothing(name):
    from gnomon.models.transformer import Cache

    model = made(name)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p += 0.3 * (".anchor_" in n)
        x, cache = tokens(), Cache()
        other = torch.cat((x[:, :15], (x[:, 15:] + 1) % 61), dim=1)
        assert torch.equal(model(x)[:, :15], model(other)[:, :15])
        parts = torch.cat([model(part, cache) for part in x.split([9, 1, 14], dim=1)], dim=1)
    torch.testing.assert_close(parts, model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
