"""The monitor in a loop: it changes nothing, leaves nothing behind, measures once, and goes on after a stop."""

from __future__ import annotations

import gc
import json
import math

import pytest
import torch
from hf_cases import build
from monitor_cases import make, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import gnomon
from gnomon import anatomy, residual
from gnomon.errors import UserError
from gnomon.models.mlp import MLPConfig, ResidualMLP
from gnomon.monitor import BlockPlace, Places
from gnomon.series import SERIES, split_place


def data(step, B=4, T=16):
    x = torch.randint(257, (B, T + 1), generator=torch.Generator().manual_seed(step))
    return x[:, :-1], x[:, 1:]


def train(model, monitor=None, steps=5, micro=1, start=0):
    """Losses and records of a plain loop, from `start`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, records = [], {}
    for step in range(start, start + steps):
        total = 0.0
        for x, y in zip(*(part.chunk(micro) for part in data(step))):
            loss = model.loss(x, y) / micro
            loss.backward()
            total += loss.item()
        record = monitor.before_step(step) if monitor else {}
        optimizer.step()
        optimizer.zero_grad()
        record |= monitor.after_step(step) if monitor else {}
        losses.append(total)
        if record:
            records[step] = record
    return losses, records


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def same(one, other, rel=1e-5, but=()):
    assert one.keys() == other.keys()
    for key in one.keys() - set(but):
        assert one[key].keys() == other[key].keys(), key
        for place, value in one[key].items():
            assert other[key][place] == pytest.approx(value, rel=rel, abs=1e-7), (key, place)


@pytest.mark.parametrize("options", [{}, {"batch": data(99)[0]}, {"track_every": 2, "accumulate": True}])
@pytest.mark.parametrize("name", ["llama-sphere", "gpt2-pre-norm"])
def test_losses_and_weights_are_bit_equal_with_and_without(name, options):
    plain, watched = build(name).train(), build(name).train()
    expected, _ = train(plain)
    losses, records = train(watched, gnomon.Monitor(watched, every=2, **options))
    assert losses == expected and list(records) == [0, 2, 4]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters()))


def test_random_numbers_are_left_alone():
    model = make("gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    results = []
    for every, options in ((0, {}), (1, {}), (1, {"batch": {"input_ids": tokens(3)}})):
        torch.manual_seed(1)
        monitor = gnomon.Monitor(model, every=every, since_start=False, **options)
        found = []
        for step in range(3):
            found.append(model(input_ids=tokens(), labels=tokens()).loss.item())
            monitor.before_step(step)
            monitor.after_step(step)
        monitor.close()
        results.append(found)
    assert results[0] == results[1] == results[2] and len(set(results[0])) == 3 and model.training


def test_a_record_is_plain_json_by_known_places():
    model = build("llama-sphere").train()
    _, records = train(model, gnomon.Monitor(model, every=2, track_every=2, accumulate=True), 3)
    for record in records.values():
        assert json.loads(json.dumps(record, allow_nan=False)) == record
        for key, series in record.items():
            over = SERIES[key].over
            for place, value in series.items():
                stack, layer, name = split_place(place)
                assert stack == "text" and layer in (0, 1)
                assert isinstance(value, list) == (over == "head")
                assert (name in ("attention", "mlp")) == (over in ("sublayer", "head")), (key, place)
    measured = set(records[2])
    of_our_loop = {"sigma_min", "feasibility", "tangency", "alignment"}
    assert measured == {key for key, one in SERIES.items() if one.over != "run"} - of_our_loop


def test_numbers_of_matrices_are_those_of_float64():
    model = build("gpt2-pre-norm").train()
    parts = anatomy.read(model).layer_matrices()
    monitor = gnomon.Monitor(model, every=1)
    weights = lambda: {p.place: p.block.take(dict(model.named_parameters())[p.name]).detach().double().clone() for p in parts}  # noqa: E731
    start = weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(4):
        before = weights()
        model.loss(*data(step)).backward()
        grads = {p.place: p.block.take(dict(model.named_parameters())[p.name].grad).double() for p in parts}
        record = monitor.before_step(step)
        optimizer.step()
        optimizer.zero_grad()
        record |= monitor.after_step(step)
        for place, W in weights().items():
            S = torch.linalg.svdvals(W)
            assert record["sigma_max"][place] == pytest.approx(S[0].item(), rel=1e-3)
            assert record["stable_rank"][place] == pytest.approx((S.square().sum() / S[0] ** 2).item(), rel=2e-3)
            assert record["update"][place] == pytest.approx(((W - before[place]).norm() / before[place].norm()).item(), rel=1e-5)
            assert record["change"][place] == pytest.approx(((W - start[place]).norm() / start[place].norm()).item(), rel=1e-5)
            assert record["gradient_norm"][place] == pytest.approx(grads[place].norm().item(), rel=1e-5)
            assert 0 <= record["lost_in_bf16"][place] <= 1 and record["gradient_overflow"][place] == 0


def test_nothing_is_left_behind():
    model = build("llama-sphere").train()
    monitor = gnomon.Monitor(model, every=100, since_start=False)
    assert hooks(model) > 0  # the first step is measured
    train(model, monitor, 2)
    quiet = hooks(model)
    assert quiet == 0
    train(model, monitor, 98, start=2)
    assert hooks(model) > 0  # step 100 is next
    train(model, monitor, 1, start=100)
    assert hooks(model) == 0 and not torch.overrides._get_current_function_mode_stack()
    monitor = gnomon.Monitor(model, every=1)
    monitor.close()
    assert hooks(model) == 0


def tensors_alive():
    gc.collect()
    return [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]


def test_no_gradient_and_no_state_is_kept_alive():
    before = tensors_alive()
    others = {id(o) for o in before}
    model = build("llama-sphere").train()
    monitor = gnomon.Monitor(model, every=1, since_start=False)
    train(model, monitor, 1)
    x, y = data(0)
    loss = model.loss(x, y)
    loss.backward()
    del loss
    model.zero_grad()
    record = monitor.before_step(1) | monitor.after_step(1)
    assert "angle" in record
    monitor.close()
    mine = {id(p) for p in model.parameters()}
    alive = [o for o in tensors_alive() if id(o) not in mine | others]
    assert not [o for o in alive if o.grad_fn is not None]
    # No tensor of the size of the states; `data`'s tokens and the vectors of the matrices are smaller.
    assert not [o.shape for o in alive if o.shape[:2] == x.shape and o.is_floating_point()]


def test_three_hundred_steps_leave_as_many_objects_as_a_hundred():
    model = ResidualMLP(MLPConfig(layers=3, width=8, inputs=4, outputs=2))
    monitor = gnomon.Monitor(model, every=10, track_every=50)

    def steps(numbers):
        for step in numbers:
            model.loss(torch.ones(2, 4), torch.zeros(2, dtype=torch.long)).backward()
            monitor.before_step(step)
            monitor.after_step(step)
        return len(tensors_alive()), hooks(model)

    assert steps(range(100)) == steps(range(100, 400))


def test_micro_batches_count_once():
    one, two = build("llama-sphere").train(), build("llama-sphere").train()
    _, whole = train(one, gnomon.Monitor(one, every=1), 1, micro=2)
    monitor = gnomon.Monitor(two, every=1)
    x, y = data(0)
    two.loss(x[:2], y[:2]).backward()
    first = monitor.before_step(0)
    for key in ("stream_norm", "angle", "attention_logit_max", "effective_rank", "massive"):
        assert whole[0][key] == first[key]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_count_once(reentrant, monkeypatch):
    from gnomon.monitor import states

    plain, again = build("llama-sphere").train(), build("llama-sphere").train()
    _, expected = train(plain, gnomon.Monitor(plain, every=1), 2)
    calls, add_up = [], states.add_up
    monkeypatch.setattr(states, "add_up", lambda *a: calls.append(1) or add_up(*a))
    for block in again.blocks:
        forward = block.forward
        block.forward = lambda *a, forward=forward: checkpoint(forward, *a, use_reentrant=reentrant)
    losses, records = train(again, gnomon.Monitor(again, every=1), 2)
    for step, record in expected.items():
        same(record, records[step])
    # Twice under the old kind, whose first run keeps no gradients and cannot be told from an evaluation.
    assert len(calls) == 2 * 4 * (2 if reentrant else 1)


def test_evaluations_between_are_not_measured():
    model = build("llama-sphere").train()
    twin = build("llama-sphere").train()
    _, expected = train(twin, gnomon.Monitor(twin, every=1), 1)
    monitor = gnomon.Monitor(model, every=1)
    model.eval()
    with torch.no_grad():
        model(data(50)[0])
    model.train()
    _, records = train(model, monitor, 1)
    same(expected[0], records[0])


def test_steps_may_be_counted_in_tens():
    model = build("llama-sphere").train()
    monitor, seen = gnomon.Monitor(model, every=20), []
    for step in range(0, 60, 10):
        model.loss(*data(step)).backward()
        record = monitor.before_step(step) | monitor.after_step(step)
        seen += [step] if "angle" in record else []
        assert bool(record) == (step % 20 == 0)
    assert seen == [0, 20, 40]


def test_a_batch_of_one_s_own_is_looked_at_after_the_step():
    model, x = build("llama-sphere").train(), data(7)[0]
    monitor = gnomon.Monitor(model, every=1, batch=x)
    _, records = train(model, monitor, 1)
    assert hooks(model) == 0 and model.training
    same(monitor.look(x), {key: series for key, series in records[0].items() if key in monitor.look({"tokens_BT": x})})


def test_a_resumed_run_goes_on_with_the_same_numbers():
    whole = build("llama-sphere").train()
    _, expected = train(whole, gnomon.Monitor(whole, every=1, track_every=1), 4)
    model = build("llama-sphere").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = gnomon.Monitor(model, every=1, track_every=1)
    for step in range(4):
        if step == 2:
            state = monitor.state_dict()
            monitor.close()
            monitor = gnomon.Monitor(model, every=1, track_every=1)
            monitor.load_state_dict(state)
        model.loss(*data(step)).backward()
        record = monitor.before_step(step)
        optimizer.step()
        optimizer.zero_grad()
        record |= monitor.after_step(step)
        same(expected[step], record, rel=1e-4)
    assert all(isinstance(x, torch.Tensor) for kind in state.values() for x in kind.values())


def test_a_loop_of_one_s_own_over_residuals():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
            self.stack = residual.Stack([residual.make("sphere", 8, index=i, depth=4) for i in range(4)])

        def forward(self, x):
            return self.stack(x, list(self.inside))

    torch.manual_seed(0)
    model = Mine()
    monitor = gnomon.Monitor(model, every=1)
    model(torch.randn(3, 5, 8)).sum().backward()
    record = monitor.before_step(0)
    assert list(record["angle"]) == ["main.0.attention", "main.0.mlp", "main.1.attention", "main.1.mlp"]
    assert record["stream_norm"] == pytest.approx(dict.fromkeys(record["angle"], 8**0.5), rel=1e-5)
    kept = math.prod(math.cos(angle) for angle in record["angle"].values())
    assert record["input_kept"]["main.1.mlp"] == pytest.approx(kept, rel=1e-5) and len(record["step_size"]) == 4


def test_lora_matrices_are_watched_and_the_frozen_base_is_not():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("llama", "sdpa"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    plain, records = make("llama", "sdpa"), []
    for m in (model, plain):
        monitor = gnomon.Monitor(m, every=1)
        m(input_ids=tokens(), labels=tokens()).loss.backward()
        records.append(monitor.before_step(0) | monitor.after_step(0))
    factors = {f"text.{i}.{role}.lora_{side}" for i in range(3) for role in ("query", "value") for side in "AB"}
    assert set(records[0]["gradient_norm"]) == factors
    # Fresh adapters change nothing, so states and attention are those of the base.
    for key in ("angle", "stream_norm", "attention_logit_max", "attention_entropy"):
        for place, value in records[1][key].items():
            assert records[0][key][place] == pytest.approx(value, rel=1e-5), key


def test_manifolds_are_held_to():
    from gnomon.optim import ManifoldMuon, assign

    model = build("llama-pre-norm").train()
    optimizer = ManifoldMuon(assign(model, "hetero"), lr=0.01)
    monitor = gnomon.Monitor(model, every=1, optimizer=optimizer)
    found = monitor.after_step(0)["feasibility"]
    assert max(found.values()) < 1e-4 and len(found) == 14
    with torch.no_grad():
        model.blocks[1].attention.query.weight.mul_(1.5)
    worst = monitor.after_step(1)["feasibility"]
    assert max(worst, key=worst.get) == "text.1.query" and worst["text.1.query"] > 0.5


def test_what_is_not_finite_is_left_out():
    model = build("llama-pre-norm").train()
    monitor = gnomon.Monitor(model, every=1)
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[0, 0] = math.nan
    model.loss(*data(0)).backward()
    record = monitor.before_step(0) | monitor.after_step(0)
    json.dumps(record, allow_nan=False)
    assert "text.1.mlp" not in record["stream_norm"] and "text.1.attention" in record["stream_norm"]
    assert "text.1.down" not in record["sigma_max"] and "text.1.up" in record["sigma_max"]
    assert record["gradient_overflow"]["text.1.down"] > 0


def test_a_pass_that_was_not_seen_is_told_once():
    model = build("llama-sphere").train()
    monitor = gnomon.Monitor(model, every=1)
    with pytest.warns(UserWarning, match="batch=inputs"):
        assert "angle" not in monitor.before_step(0)
    monitor.after_step(0)
    monitor.before_step(1)  # a second warning would be an error


def test_mistakes_are_told():
    with pytest.raises(UserError, match="nothing in this model can be measured"):
        gnomon.Monitor(nn.Linear(3, 3))
    with pytest.raises(UserError, match="must not be negative"):
        gnomon.Monitor(build("llama-sphere"), every=-1)


def test_blocks_that_the_user_names():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = x + self.first(x).relu()
            return x + self.second(self.norm(x)).relu()

    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(3)))
    blocks = tuple(BlockPlace("mine", i, block, (("first", block.first), ("second", block.norm))) for i, block in enumerate(net))
    monitor = gnomon.Monitor(net, every=1, at=Places((), blocks, ()))
    x = torch.randn(4, 6, 8)
    net(x).sum().backward()
    record = monitor.before_step(0)
    assert list(record["angle"]) == [f"mine.{i}.{name}" for i in range(3) for name in ("first", "second")]
    middle = x + net[0].first(x).relu()
    assert record["stream_norm"]["mine.0.first"] == pytest.approx(middle.square().sum(-1).mean().sqrt().item(), rel=1e-5)
    assert record["stream_norm"]["mine.0.second"] == pytest.approx(net[0](x).square().sum(-1).mean().sqrt().item(), rel=1e-5)


def test_rules_speak_through_the_monitor():
    """A query matrix blown up by ten thousand: the logits saturate, and the monitor says so from that step on."""
    model = build("llama-sphere")
    monitor = gnomon.Monitor(model, every=1)
    train(model, monitor, steps=2)
    assert monitor.warnings == []
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "query" in name).mul_(1e4)
    train(model, monitor, steps=4, start=2)
    assert "saturation" in [one.rule for one in monitor.warnings]
