"""Narrower blocks of every family: what is asked is kept, shapes and heads stay right, and the models still run on transformers' code."""

from __future__ import annotations

import pytest
import torch
from running_cases import FAMILIES, make

from gnomon.compress.block_matrices import measuring, take
from gnomon.compress.modules import modules, narrow
from gnomon.compress.replacements import numel
from gnomon.errors import UserError
from gnomon.running import open_streamed

pytest.importorskip("transformers")

KINDS = [kind for kind in FAMILIES if kind not in ("bert", "mixtral")]
TOKENS_BT = torch.randint(3, 128, (6, 60), generator=torch.Generator().manual_seed(0))
WITHOUT_QUERIES = ("qwen3",)


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    """A model, and its second block with the moments of its inputs."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make(request.param)
    model.save_pretrained(folder)
    return request.param, model, measured(folder, model)


def measured(folder, model, index=1):
    streamed = open_streamed(folder)
    block = model.get_submodule(streamed.block_names[index])
    with streamed.held([streamed.block_names[index]]):
        names = list(take(streamed, index).shapes)
        with measuring(block, names) as sums, torch.no_grad():
            model(TOKENS_BT)
        return take(streamed, index, {name: C_NN / TOKENS_BT.numel() for name, C_NN in sums.items()}, TOKENS_BT.numel())


def logits(model, made=None, prefix=""):
    """With the replaced linears in the place of the model's own."""
    before = {name: model.get_submodule(f"{prefix}.{name}") for name in made or {}}
    try:
        for name, one in (made or {}).items():
            put(model, f"{prefix}.{name}", one.module())
        with torch.no_grad():
            return model(TOKENS_BT).logits
    finally:
        for name, module in before.items():
            put(model, f"{prefix}.{name}", module)


def put(model, name, module):
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, module)


def prefix_of(model):
    from gnomon.running.block_list import blocks_of

    return f"{blocks_of(model)[0]}.1"


def test_all_of_it_is_the_block(case):
    _, _, block = case
    assert modules([block], 1.0) == [{}]


def test_directions_and_refits_of_all_channels_change_nothing(case, monkeypatch):
    """The whole way with nothing cut: rotated values, refitted outputs, scattered rows."""
    kind, model, block = case
    from gnomon.compress import modules as room

    whole = room._attention(block, 1 - 1e-12)
    assert len(whole) == (2 if kind in WITHOUT_QUERIES else 4)
    made = room._mlp(block, block.of("down"), [m for m in (block.of("gate"), block.of("up")) if m], len(block.of("up").W_MN))
    monkeypatch.setattr(room, "_mlp", lambda *_: made)
    found = logits(model, narrow(block, 1 - 1e-12), prefix_of(model))
    torch.testing.assert_close(found, logits(model), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("keep", [0.8, 0.5])
def test_the_budget_is_met_to_a_channel(case, keep):
    kind, model, block = case
    made = narrow(block, keep)
    left = numel(made.values()) + sum(m * n for name, (m, n) in block.shapes.items() if name not in made)
    channel = sum(block.of(role).W_MN.numel() for role in ("gate", "up", "down") if block.of(role)) // len(block.of("up").W_MN)
    assert keep * block.numel - channel < left <= keep * block.numel
    found = logits(model, made, prefix_of(model))
    assert torch.isfinite(found).all() and not torch.allclose(found, logits(model))


def test_less_is_lost_than_by_the_first_channels(case):
    """What the rule is for: a choice by number, without refit, loses more of the logits."""
    kind, model, block = case
    made, prefix = narrow(block, 0.7, attention=1.0), prefix_of(model)
    width = made[block.of("down").linear].shape[1]
    whole = logits(model)

    def lost(other):
        return (logits(model, other, prefix) - whole).square().mean().item()

    from gnomon.compress import modules as room

    first = torch.arange(width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "leverage", lambda C_NN, count: first[:count])
        patch.setattr(room, "refit", lambda W_MN, C_NN, P_KN: W_MN[:, first])
        plain = narrow(block, 0.7, attention=1.0)
    assert lost(made) < lost(plain)


def test_keys_and_their_queries_keep_the_same_pairs(case):
    kind, model, block = case
    made = narrow(block, 0.6)
    query, key = block.of("query"), block.of("key")
    if kind in WITHOUT_QUERIES:
        assert not {query.linear, key.linear} & set(made)
        return
    C = key.head_dim
    W_q, W_k = (made[m.linear].W_MN[slice(None) if m.rows is None else list(m.rows)] for m in (query, key))
    kept_q, kept_k = ((W != 0).any(1).view(-1, C) for W in (W_q, W_k))
    times = query.heads // key.heads
    assert torch.equal(kept_q, kept_k.repeat_interleave(times, 0)) and not kept_k.all() and kept_k.any(1).all()
    if kind in ("llama", "gemma2", "mistral"):
        assert torch.equal(kept_k[:, : C // 2], kept_k[:, C // 2 :])


def test_a_budget_that_leaves_no_channel_is_told(case):
    _, _, block = case
    with pytest.raises(UserError, match="not one of the"):
        narrow(block, 0.1, attention=1.0)
    with pytest.raises(UserError, match="less than one"):
        narrow(block, 0.8, attention=0.01)


def test_a_mixture_of_experts_is_told(tmp_path):
    model = make("mixtral")
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="Use another method"):
        narrow(measured(tmp_path, model), 0.8)
