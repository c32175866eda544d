"""The pure measures against their definitions in float64 numpy, and at the edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gnomon.monitor import attention_rows, matrix_numbers, states


def walk(seed=0, B=3, T=20, D=24):
    g = torch.Generator().manual_seed(seed)
    e = torch.randn(B, T, D, generator=g)
    h = e + 0.5 * torch.randn(B, T, D, generator=g)
    after = h + 0.3 * torch.randn(B, T, D, generator=g)
    after[1, 4, 7] = 900.0
    return h, after, e


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_states_are_what_the_table_says():
    h, after, e = walk()
    found = {key: float(x) for key, x in states.conclude(states.add_up(h, after, e)).items()}
    H, G, E = (x.double().numpy().reshape(-1, 24) for x in (h, after, e))
    rms = lambda X: math.sqrt((X**2).sum(-1).mean())  # noqa: E731
    shares = np.linalg.svd(unit(G), compute_uv=False) ** 2 / len(G)
    channel = (G**2).mean(0)
    expected = {
        "stream_norm": rms(G),
        "stream_growth": rms(G) / rms(H),
        "angle": np.arccos((unit(H) * unit(G)).sum(-1)).mean(),
        "input_cosine": (unit(G) * unit(E)).sum(-1).mean(),
        "stream_coherence": np.linalg.norm(unit(G).mean(0)),
        "effective_rank": np.exp(-(shares * np.log(np.maximum(shares, 1e-300))).sum()),
        "massive": 900.0 / np.sort(np.abs(G).ravel())[(G.size - 1) // 2],
        "massive_channel": 7,
        "massive_position": 4,
        "kurtosis": (channel**2).mean() / channel.mean() ** 2,
    }
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=2e-6), key


def test_padding_is_left_out_and_sums_of_halves_are_the_whole():
    h, after, e = walk()
    keep = torch.ones(3, 20, dtype=torch.bool)
    keep[0, 15:] = keep[2, :3] = False
    found = states.add_up(h, after, e, keep)
    plain = states.add_up(*(x[keep][None] for x in (h, after, e)))
    for key in ("sums_5", "unit_D", "square_D", "sample_nD"):
        assert torch.allclose(getattr(found, key), getattr(plain, key)), key
    assert found.peak_3.tolist() == [900.0, 7.0, 4.0]  # the position in the sequence, not among the kept
    h, after, e = walk(B=4)
    whole = states.add_up(h, after, e, sample=16)
    halves = [states.add_up(h[i], after[i], e[i], sample=8) for i in (slice(2), slice(2, 4))]
    for key in ("sums_5", "unit_D", "square_D"):
        assert torch.allclose(sum(getattr(half, key) for half in halves), getattr(whole, key)), key
    assert torch.equal(torch.cat([half.sample_nD for half in halves]), whole.sample_nD)


def test_angles_near_zero_and_pi_and_of_zero_states():
    x = torch.tensor([[1.0, 0.0]])
    for theta in (1e-6, 1.0, math.pi - 1e-5):
        y = torch.tensor([[math.cos(theta), math.sin(theta)]])
        assert states.angle(x, y).item() == pytest.approx(theta, rel=1e-5, abs=2e-7)
    zero = torch.zeros(2, 5, 8)
    assert all(value.isfinite() for value in states.conclude(states.add_up(zero, zero, zero)).values())


def test_the_rank_of_known_states():
    assert states.effective_rank(torch.ones(40, 6)).item() == pytest.approx(1)
    assert states.effective_rank(torch.eye(6).repeat(5, 1) * 7).item() == pytest.approx(6)
    assert states.effective_rank(torch.tensor([[1.0, math.inf], [0.0, 1.0]])).isnan()


def attention_oracle(q, k, mask, scale, cap=None):
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    logits = np.einsum("bhtc,bhsc->bhts", q, k) * scale
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    logits = np.where(mask, logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return logits, p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("kind", ["causal", "bool", "added", "cap", "both ways"])
def test_attention_is_what_the_table_says(kind):
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 6, 12, 8, generator=g) * 3, torch.randn(2, 2, 12, 8, generator=g) * 3
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    mask = {"bool": seen[None, None], "added": torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]}.get(kind)
    cap = 4.0 if kind == "cap" else None
    rows = attention_rows.choose(2, 12, None)
    logits = attention_rows.logits_of(q, k, rows, scale=0.5, mask=mask, causal=kind in ("causal", "cap"), cap=cap)
    found = attention_rows.conclude(attention_rows.add_up(logits, rows, 12))
    allowed = np.ones((12, 12), bool) if kind == "both ways" else seen.numpy()
    true, p = attention_oracle(q.double().numpy(), k.double().numpy(), allowed, 0.5, cap)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
    expected = {
        "attention_logit_max": true.max((0, 2, 3)),
        "attention_entropy": entropy.mean((0, 2)),
        "attention_sink": p[:, :, 6:, 0].mean((0, 2)),
        "attention_self": np.diagonal(p, axis1=2, axis2=3)[:, :, 6:].mean((0, 2)),
    }
    for key, value in expected.items():
        assert found[key].numpy() == pytest.approx(value, rel=2e-5, abs=2e-6), key


def test_a_sample_of_rows_is_those_rows_and_padding_is_left_out():
    g = torch.Generator().manual_seed(2)
    q, k = torch.randn(4, 2, 16, 8, generator=g), torch.randn(4, 2, 16, 8, generator=g)
    rows = attention_rows.choose(4, 16, 12)
    assert rows.sequence_b.tolist() == [0, 1, 2, 3] and rows.query_R.tolist() == [5, 10, 15]
    assert attention_rows.choose(4, 16, 2).sequence_b.tolist() == [0, 2]
    everything = attention_rows.choose(4, 16, None)
    full = attention_rows.logits_of(q, k, everything, causal=True)
    assert torch.allclose(attention_rows.take_rows(full, rows), attention_rows.logits_of(q, k, rows, causal=True), atol=1e-6)
    # Left padding of three: the first token is the fourth, and rows of padding do not count.
    keep = torch.ones(4, 16, dtype=torch.bool)
    keep[:, :3] = False
    mask = torch.ones(16, 16, dtype=torch.bool).tril() & keep[0]
    padded = attention_rows.logits_of(q, k, everything, mask=mask | torch.eye(16, dtype=torch.bool))
    short = attention_rows.choose(4, 13, None)
    plain = attention_rows.logits_of(q[:, :, 3:], k[:, :, 3:], short, causal=True)
    one = attention_rows.conclude(attention_rows.add_up(padded, everything, 16, keep))
    other = attention_rows.conclude(attention_rows.add_up(plain, short, 13))
    for key in one:
        assert torch.allclose(one[key], other[key], rtol=1e-5), key


@pytest.mark.parametrize("shape", [(30, 40), (64, 16), (5, 5), (300, 200)])
def test_the_largest_singular_value(shape):
    W = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    start = torch.randn(shape[1], generator=torch.Generator().manual_seed(4))
    (sigma, v), = matrix_numbers.leading([matrix_numbers.krylov(W, start, matrix_numbers.FIRST_STEPS)])  # fmt: skip
    _, S, V = torch.linalg.svd(W.double())
    assert sigma.item() == pytest.approx(S[0].item(), rel=2e-3)
    (again, v), = matrix_numbers.leading([matrix_numbers.krylov(W, v, matrix_numbers.NEXT_STEPS)])  # fmt: skip
    assert again.item() == pytest.approx(S[0].item(), rel=5e-4) and again >= sigma * (1 - 1e-6)


def test_matrices_of_rank_one_zero_and_nan():
    W = torch.outer(torch.arange(1.0, 9), torch.arange(1.0, 6))
    found = matrix_numbers.leading(
        [matrix_numbers.krylov(x, torch.ones(5), steps) for x, steps in ((W, 24), (0 * W, 24), (W * math.nan, 24), (W, 6))]
    )
    sigmas = [float(sigma) for sigma, _ in found]
    assert sigmas[0] == pytest.approx(float(W.norm()), rel=1e-6) == sigmas[3] and sigmas[1] == 0 and math.isnan(sigmas[2])


def test_steps_that_bf16_does_not_notice():
    V = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])
    step = torch.tensor([[1 / 300, 1 / 200, 0.0, 1e-9, 1e-9]])
    G = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0]])
    # Half a unit in the last place above 1 is 2^-8 = 1/256; below any number fits beside 0.
    assert matrix_numbers.lost_in_bf16(V + step.double(), V.double(), G).item() == pytest.approx(2 / 4)
    narrow = V.bfloat16()
    assert matrix_numbers.lost_in_bf16((narrow.float() + step).bfloat16(), narrow, G).item() == pytest.approx(2 / 4)
    assert matrix_numbers.lost_in_bf16(V, V, torch.zeros_like(G)).isnan()
    # In the format they are kept in: fp32 loses the billionth beside 1 alone.
    assert matrix_numbers.lost_to_rounding((narrow.float() + step).bfloat16(), narrow, G).item() == pytest.approx(2 / 4)
    assert matrix_numbers.lost_to_rounding(V + step, V, G).item() == pytest.approx(1 / 4)
    assert matrix_numbers.lost_to_rounding(V, V, G).item() == 1
    assert matrix_numbers.lost_to_rounding(V, V, torch.zeros_like(G)).isnan()
    assert matrix_numbers.relative(2 * V, V).item() == pytest.approx(1) and matrix_numbers.relative(V, 0 * V).isnan()


def test_gradients_that_leave_their_format():
    G = torch.tensor([[math.inf, math.nan, 1e-6, 0.0, 1.0]]).half()
    found = matrix_numbers.of_gradient(G)
    assert found["gradient_overflow"] == 2 and found["gradient_underflow"].item() == pytest.approx(2 / 5)
    assert matrix_numbers.of_gradient(torch.full((3, 3), 2.0))["gradient_norm"].item() == pytest.approx(6)


def test_the_sample_is_not_of_one_position():
    """Rows as long as a stretch: every 64th token would be the first of its row."""
    positions = states.scattered(64 * 256, 256) % 64
    assert len(positions.unique()) == states.TURNS
    assert states.scattered(7, 7).tolist() == list(range(7)) and states.scattered(0, 0).numel() == 0
    halves = [states.scattered(512, 16) + i * 512 for i in range(2)]
    assert torch.equal(torch.cat(halves), states.scattered(1024, 32))
