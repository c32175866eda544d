"""One run, end to end: it learns, leaves data, and survives what happens to runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from gnomon import cli
from gnomon.errors import UserError
from gnomon.models import Transformer
from gnomon.models.config import MODERN
from gnomon.monitor import passes
from gnomon.run_folder import checkpoint_folders, read_metrics
from gnomon.series import over_depth
from gnomon.train import loop, postmortem, preset, replace, run_data, saving, train
from gnomon.train.run_writer import load_recipe

SMALL = {
    "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32, "data.batch": 4, "steps": 12,
    "schedule.warmup": 3, "watch.eval_every": 6, "watch.probe_every": 6, "watch.save_every": 4,
    "watch.eval_tokens": 512,
    "watch.probe_tokens": 64, "watch.keep": 2, "compute.device": "cpu",
}  # fmt: skip


def recipe(residual="pre-norm", assignment="adamw", **changes):
    return replace(preset("tiny", residual, assignment), SMALL | changes)


def weights(folder):
    return load_file(checkpoint_folders(folder)[-1] / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_run_folder(tmp_path):
    record = train(recipe("proj-spheret", steps=40), tmp_path / "run")
    folder = tmp_path / "run"
    assert {p.name for p in folder.iterdir()} == {"recipe.json", "environment.json", "metrics.jsonl", "checkpoints"}
    metrics = read_metrics(folder)
    assert [m["step"] for m in metrics] == list(range(41))
    assert all(
        m.keys() >= {"step", "loss", "lr", "grad_norm", "tokens", "seconds", "tokens_per_second"} for m in metrics[1:]
    )
    assert metrics[-1]["val_loss"] < metrics[6]["val_loss"] - 0.05
    assert [m["step"] for m in metrics if "val_loss" in m] == [0, 6, 12, 18, 24, 30, 36, 40]
    last = metrics[-1]
    assert len(last["stream_norm"]) == len(last["angle"]) == len(last["step_size"]) == 4
    assert list(last["stream_norm"].values()) == pytest.approx([32**0.5] * 4, rel=1e-5)
    assert len(last["stream_coherence"]) == 4 and all(0 < value < 1 for value in last["stream_coherence"].values())
    assert len(last["attention_logit_max"]) == len(last["attention_entropy"]) == 2
    assert 0 < max(over_depth("attention_entropy", last["attention_entropy"])) < torch.log(torch.tensor(32.0))
    measured = {m["step"] for m in metrics if "angle" in m}
    assert measured == {m["step"] for m in metrics if "sigma_max" in m} == {0, 6, 12, 18, 24, 30, 36, 40}
    assert measured - {0} == {m["step"] for m in metrics if "update" in m} == {m["step"] for m in metrics if "gradient_norm" in m}
    assert record == {**last, "stopped": False}
    assert [p.name for p in checkpoint_folders(folder)] == ["step-00000036", "step-00000040"]
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["torch"] == torch.__version__ and environment["parameters"] > 0


def test_a_record_begins_with_the_model_as_it_starts(tmp_path):
    settings = recipe(steps=3, **{"watch.save_every": 0, "model.head_bias": False})
    folder = tmp_path / "run"
    train(settings, folder)
    first, second, *_ = read_metrics(folder)
    assert first["step"] == first["tokens"] == 0 and first.keys().isdisjoint({"loss", "lr", "grad_norm", "tokens_per_second"})
    torch.manual_seed(settings.seed)
    model = Transformer(settings.model)
    _, held_out = run_data.open_data(settings)
    x, y = (torch.from_numpy(part) for part in loop.data.slices(held_out, context=32, count=16))
    assert first["val_loss"] == pytest.approx(model.loss(x, y).item(), rel=1e-5)
    query = model.blocks[0].attention.query.weight.detach()
    assert first["sigma_max"]["text.0.query"] == pytest.approx(torch.linalg.matrix_norm(query, 2).item(), rel=0.02)
    # Nothing is measured beside the last step where nothing is asked for; and no step depends on it.
    train(replace(settings, {"watch.eval_every": 0, "watch.probe_every": 0}), tmp_path / "quiet")
    quiet = read_metrics(tmp_path / "quiet")
    assert [m["step"] for m in quiet] == [1, 2, 3] and quiet[0]["loss"] == second["loss"]
    assert same(weights(folder), weights(tmp_path / "quiet"))


def test_a_run_that_lost_all_its_checkpoints_begins_its_record_anew(tmp_path):
    for _ in range(2):
        train(recipe(steps=3), tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert [m["step"] for m in read_metrics(tmp_path / "run")] == [0, 1, 2, 3]


@pytest.mark.parametrize("residual", ["pre-norm", "proj-spheret"])
def test_same_seed_same_bits_other_seed_other_bits(residual, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(recipe(residual, seed=seed), tmp_path / name)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


@pytest.mark.parametrize("assignment", ["adamw", "muon", "none", "hetero"])
def test_resumed_twice_equals_uninterrupted(assignment, tmp_path, monkeypatch):
    train(recipe(assignment=assignment), tmp_path / "whole")

    class Killed(Exception):
        pass

    real = loop.data.batch
    for deadly in (5, 10):

        def batch(*args, step, deadly=deadly, **kwargs):
            if step == deadly:
                raise Killed
            return real(*args, step=step, **kwargs)

        monkeypatch.setattr(loop.data, "batch", batch)
        with pytest.raises(Killed):
            train(recipe(assignment=assignment), tmp_path / "killed")
    monkeypatch.setattr(loop.data, "batch", real)
    train(recipe(assignment=assignment), tmp_path / "killed")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    clocks = ("seconds", "tokens_per_second")
    a, b = (
        [{k: v for k, v in m.items() if k not in clocks} for m in read_metrics(tmp_path / n)]
        for n in ("whole", "killed")
    )
    assert a == b


@pytest.mark.parametrize("assignment", ["hetero", "dgram"])
def test_probes_tell_how_the_weights_fare(assignment, tmp_path):
    last = read_metrics(_run(recipe(assignment=assignment, **{"optim.dgram_cap": 3.0}), tmp_path))[-1]
    assert last["sigma_max"].keys() >= {"text.0.query", "text.1.down"}
    assert max(last["feasibility"].values()) < 1e-4
    assert max(last["tangency"].values()) < 1e-2 and min(last["alignment"].values()) > 0.7
    if assignment == "hetero":
        assert last["sigma_max"]["text.0.query"] == pytest.approx(1, abs=1e-3)
    else:
        assert max(last["sigma_max"].values()) <= 3.001


def test_tracked_continuity_survives_a_resume(tmp_path, monkeypatch):
    settings = recipe(**{"watch.track_every": 3})
    whole = read_metrics(_run(settings, tmp_path / "whole"))
    assert [m["step"] for m in whole if "weight_v1" in m] == [0, 3, 6, 9, 12]
    assert whole[-1].keys() >= {"gradient_v1", "accumulated_v1", "delta_gw_v1", "change", "turn_v1"}
    real = loop.data.batch

    def batch(*args, step, **kwargs):
        if step == 6:
            raise RuntimeError("killed")
        return real(*args, step=step, **kwargs)

    monkeypatch.setattr(loop.data, "batch", batch)
    with pytest.raises(RuntimeError, match="killed"):
        train(settings, tmp_path / "parts")
    monkeypatch.setattr(loop.data, "batch", real)
    again = read_metrics(_run(settings, tmp_path / "parts"))
    for a, b in zip(whole, again):
        for key in ("gradient_v1", "accumulated_v1", "weight_v1", "change", "turn_v1"):
            assert a.get(key, {}) == pytest.approx(b.get(key, {}), rel=1e-3, abs=1e-3), (a["step"], key)


def test_a_run_with_a_tracker_of_before_goes_on(tmp_path):
    """Checkpoints made before November 2026 have the tracker's file, and no vectors to start from."""
    settings = recipe(steps=6, **{"watch.track_every": 3, "watch.save_every": 3})
    folder = tmp_path / "run"
    train(settings, folder)
    shutil.rmtree(checkpoint_folders(folder)[-1])
    path = checkpoint_folders(folder)[-1]
    remembered = load_file(path / "monitor.safetensors")
    save_file({name: x for name, x in remembered.items() if not name.startswith("vectors/")}, path / "tracker.safetensors")
    (path / "monitor.safetensors").unlink()
    (path / "fingerprints.json").unlink()
    whole = read_metrics(folder)[-1]
    again = read_metrics(_run(settings, folder))[-1]
    for key in ("change", "accumulated_v1", "weight_v1", "turn_v1"):
        assert again[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-5), key
    # Sought from a random start again, and so a little less exact.
    assert again["sigma_max"] == pytest.approx(whole["sigma_max"], rel=3e-3)


def _run(settings, folder):
    train(settings, folder)
    return folder


def test_logit_clip_scales_down(tmp_path):
    free, clipped = (
        read_metrics(
            _run(recipe(assignment="none", steps=20, **{"optim.lr": 0.2, "optim.logit_clip": c}), tmp_path / str(c))
        )[-1]
        for c in (None, 1.0)
    )
    largest = [max(over_depth("attention_logit_max", m["attention_logit_max"])) for m in (clipped, free)]
    assert largest[0] < largest[1]


@pytest.mark.parametrize(
    "residual, assignment", [("pre-norm", "muon"), ("bounded-sphere", "none"), ("geonorm", "adamw"), ("keel", "spectral-ball")]
)
def test_a_modern_model_starts_silent_and_learns(tmp_path, residual, assignment):
    modern = {f"model.{key}": value for key, value in MODERN.items()}
    train(recipe(residual, assignment, steps=40, **modern), tmp_path / "run")
    metrics = read_metrics(tmp_path / "run")
    # All it knows is how frequent each token is.
    assert metrics[0]["val_loss"] == pytest.approx(metrics[0]["unigram"], abs=0.2)
    assert metrics[-1]["val_loss"] < metrics[6]["val_loss"] - 0.05
    written = weights(tmp_path / "run")
    assert all(written[f"blocks.{i}.{name}.weight"].any() for i in range(2) for name in ("attention.output", "mlp.down"))


@pytest.mark.parametrize("assignment", ["stiefel", "dgram", "hetero", "sphere", "spectral-sphere"])
def test_zero_is_not_replaced_by_chance_on_a_manifold_without_one(tmp_path, assignment):
    with pytest.raises(UserError, match="does not hold: it would start at random"):
        train(recipe(assignment=assignment, **{"model.zero_init": True}), tmp_path / "run")


def test_finished_run_is_left_alone(tmp_path):
    first = train(recipe(), tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert train(recipe(), tmp_path)["loss"] == first["loss"]
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def command(folder, steps=4000):
    settings = [f"{k}={json.dumps(v)}" for k, v in (SMALL | {"steps": steps, "watch.save_every": 10}).items()]
    return [sys.executable, "-m", "gnomon", "train", "tiny", "--out", str(folder), "--set", *settings]


def start(folder, steps=4000):
    return subprocess.Popen(command(folder, steps), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(folder, step, process):
    for _ in range(600):
        if checkpoint_folders(folder) and len(read_metrics(folder)) >= step:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("the run did not get going")


def test_killed_and_continued_equals_uninterrupted(tmp_path, no_report):
    """kill -9 at an arbitrary moment; rubble of a half-written checkpoint and metrics line included."""
    steps = 40
    process = start(tmp_path / "killed", steps)
    wait_for_step(tmp_path / "killed", 15, process)
    process.kill()
    process.wait()
    (tmp_path / "killed" / "checkpoints" / ".step-00000099.1.partial").mkdir()
    with open(tmp_path / "killed" / "metrics.jsonl", "a") as file:
        file.write('{"step": 17, "los')
    assert cli.main(command(tmp_path / "killed", steps)[3:]) == 0
    train(load_recipe(tmp_path / "killed"), tmp_path / "whole")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert [m["step"] for m in read_metrics(tmp_path / "killed")] == list(range(steps + 1))
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_first(tmp_path, number, monkeypatch, capsys):
    real = loop.data.batch

    def batch(*args, step, **kwargs):
        if step == 5:
            signal.raise_signal(number)
        return real(*args, step=step, **kwargs)

    monkeypatch.setattr(loop.data, "batch", batch)
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    assert cli.main(command(tmp_path)[3:]) == 130 and "the same command continues" in capsys.readouterr().out
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    saved = int(checkpoint_folders(tmp_path)[-1].name.split("-")[1])
    assert saved == read_metrics(tmp_path)[-1]["step"] < 10


@pytest.mark.parametrize("residual", ["pre-norm", "proj-spheret"])
def test_accumulation_equals_the_large_batch(residual, tmp_path):
    train(recipe(residual), tmp_path / "one")
    train(recipe(residual, **{"data.accumulate": 4}), tmp_path / "four")
    a, b = weights(tmp_path / "one"), weights(tmp_path / "four")
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-5)


def test_another_recipe_is_refused_with_the_difference(tmp_path):
    train(recipe(), tmp_path)
    with pytest.raises(UserError, match="optim.lr: 0.004 -> 0.1"):
        train(recipe(**{"optim.lr": 0.1}), tmp_path)


def test_a_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not empty"):
        train(recipe(), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_damaged_checkpoint_is_told(tmp_path):
    train(recipe(), tmp_path)
    file = checkpoint_folders(tmp_path)[-1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        train(recipe(), tmp_path)


def test_parameters_in_another_order_are_refused(tmp_path):
    """Without names, two parameters of one shape would swap their moments in silence."""
    train(recipe(), tmp_path)
    file = checkpoint_folders(tmp_path)[-1] / "state.json"
    state = json.loads(file.read_text())
    names = state["optimizer"]["param_groups"][0]["param_names"]
    query, key = (next(i for i, n in enumerate(names) if n.endswith(f"{role}.weight")) for role in ("query", "key"))
    names[query], names[key] = names[key], names[query]
    file.write_text(json.dumps(state))
    (file.parent / "fingerprints.json").unlink()
    with pytest.raises(UserError, match="not in its order"):
        train(recipe(), tmp_path)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_not_finite_stops_before_the_update(tmp_path, monkeypatch, where):
    from gnomon.models.transformer import MLP

    calls = {"n": 0}
    real = MLP.forward

    def poisoned(self, x):
        y = real(self, x)
        calls["n"] += 1
        if where == "forward":
            return y * float("nan") if calls["n"] > 100 else y
        if calls["n"] > 100 and y.requires_grad:
            y.register_hook(lambda g: g * float("inf"))
        return y

    monkeypatch.setattr(MLP, "forward", poisoned)
    with pytest.raises(UserError, match="before the update") as error:
        train(recipe(steps=400), tmp_path)
    report = json.loads((tmp_path / "postmortem.json").read_text())
    first = {"forward": "the output of 'blocks.0.mlp", "backward": "the gradient of 'blocks."}[where]
    assert report["first_bad"].startswith(first) and report["first_bad"] in str(error.value)
    assert report["recent"][-1]["loss"] == "nan" or report["recent"][-1]["grad_norm"] in ("nan", "inf")
    assert all(t.isfinite().all() for t in weights(tmp_path).values())


def test_gradients_whose_squares_overflow_are_clipped_and_not_refused(tmp_path, monkeypatch):
    from gnomon.models.transformer import MLP

    real = MLP.forward

    def steep(self, x):
        y = real(self, x)
        if y.requires_grad:
            y.register_hook(lambda g: g * 1e12)
        return y

    monkeypatch.setattr(MLP, "forward", steep)
    record = train(recipe(steps=3), tmp_path)
    assert 1e20 < record["grad_norm"] < math.inf
    assert all(t.isfinite().all() for t in weights(tmp_path).values())


@pytest.mark.parametrize("size", [1e-3, 1e20, 3e38])
def test_large_gradients_have_a_norm_and_a_bound(size):
    from gnomon.train.distributed import clip_gradients, grad_norm, large_grad_norm

    model = torch.nn.Linear(30, 40)
    for p in model.parameters():
        p.grad = torch.randn_like(p).clamp(-1, 1) * size
    expected = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm().item()
    assert grad_norm(model).isfinite() == (size < 1e19)
    assert large_grad_norm(model) == pytest.approx(expected, rel=1e-5)
    directions = [p.grad / size for p in model.parameters()]
    clip_gradients(model, 0.5, expected)
    assert grad_norm(model).item() == pytest.approx(0.5, rel=1e-4)
    for p, direction in zip(model.parameters(), directions):
        torch.testing.assert_close(p.grad * (expected / size / 0.5), direction, rtol=1e-4, atol=1e-6)


def test_a_gradient_clipped_to_almost_nothing_moves_muons_matrices_as_far(tmp_path):
    """torch.optim.Muon's floor of 1e-7 under the norm of an update would make the step 3e-4 of what it should be."""
    moved = {}
    for clip in (1.0, 1e-12):
        settings = recipe(assignment="muon", steps=1, **{"optim.clip": clip, "optim.weight_decay": 0.0, "schedule.warmup": 0})
        torch.manual_seed(settings.seed)
        before = Transformer(settings.model).state_dict()["blocks.0.mlp.up.weight"]
        train(settings, tmp_path / str(clip))
        moved[clip] = (weights(tmp_path / str(clip))["blocks.0.mlp.up.weight"] - before).norm().item()
    assert moved[1e-12] == pytest.approx(moved[1.0], rel=0.02)


def test_logit_clip_is_refused_where_the_norm_is_not_free(tmp_path):
    for assignment in ("hetero", "stiefel"):
        with pytest.raises(UserError, match=f"optim.assignment={assignment} holds on Stiefel"):
            train(recipe(assignment=assignment, **{"optim.logit_clip": 5.0}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("assignment", ["adamw", "muon"])
def test_a_rate_far_too_high_is_named(tmp_path, assignment):
    with pytest.raises(UserError, match="learning rate is too high") as error:
        train(recipe(assignment=assignment, steps=20, **{"optim.lr": 1e6, "schedule.warmup": 0}), tmp_path)
    assert "not finite" in str(error.value)


@pytest.mark.parametrize(
    "losses, weight, words",
    [
        ([3.9, 4e10, math.nan], 0.1, "climbed from 3.9 to 4e+10"),
        ([5.5, math.nan], 2e5, "weights had grown to 2e+05"),
        ([5.5, 5.9, math.nan], 0.3, "not visible"),
        ([5, 4, 3, 2.5, 2.4, 3.2, math.nan], 0.3, "climbed from 2.4 to 3.2"),
    ],
)
def test_likely_cause(losses, weight, words):
    recent = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, 1)]
    assert words in postmortem.likely_cause("the output of 'blocks.0'", recent, weight)


def test_the_postmortem_replays_as_training_ran(tmp_path, monkeypatch):
    """In bf16, and in every micro-batch: what overflows only there is found."""
    from gnomon.models.transformer import MLP

    real, calls = MLP.forward, []

    def forward(self, x):
        y = real(self, x)
        calls.append(y.dtype)
        # The second micro-batch of each step, from the third on, in bf16 only.
        spoilt = len(calls) > 8 and y.dtype == torch.bfloat16 and (len(calls) - 1) // 2 % 2 == 1
        return y * float("inf") if spoilt else y

    monkeypatch.setattr(MLP, "forward", forward)
    settings = recipe(steps=20, **{"compute.precision": "bf16", "data.accumulate": 2, "watch.eval_every": 0, "watch.probe_every": 0})
    with pytest.raises(UserError, match="the output of 'blocks.0.mlp"):
        train(settings, tmp_path)


def test_every_look_runs_as_training_does(tmp_path, monkeypatch):
    real, seen = passes.run, []

    def run(*given, **options):
        seen.append(torch.is_autocast_enabled("cpu"))
        return real(*given, **options)

    monkeypatch.setattr(passes, "run", run)
    train(recipe(assignment="none", **{"compute.precision": "bf16", "optim.logit_clip": 1.0}), tmp_path)
    # At steps 0, 6 and 12 to be written down, at 10 for clipping.
    assert seen == [True] * 4


def test_the_postmortem_looks_into_compiled_blocks():
    model = Transformer(recipe().model)
    for block in model.blocks:
        block.compile(backend="eager")
    batch = (torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64))
    with torch.no_grad():
        model.loss(*batch)
        assert postmortem.first_not_finite(model, [batch], contextlib.nullcontext) is None
        model.blocks[1].mlp.down.weight.fill_(3e38)
    found = postmortem.first_not_finite(model, [batch], contextlib.nullcontext)
    assert found == "the output of 'blocks.1.mlp.down'"


def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    real, count = saving.save_file, {"n": 0}

    def save_file(tensors, path):
        count["n"] += 1
        if count["n"] == 4:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return real(tensors, path)

    monkeypatch.setattr(saving, "save_file", save_file)
    with pytest.raises(OSError):
        train(recipe(), tmp_path)
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"step-00000004", "latest"}
    monkeypatch.setattr(saving, "save_file", real)
    train(recipe(), tmp_path)


FULL = """
import contextlib, io, json, resource, signal, sys
from gnomon.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
told = []
for size in (100, 40_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    with contextlib.redirect_stderr(io.StringIO()) as err:
        told.append((main([*sys.argv[2:], "--out", f"{sys.argv[1]}/{size}"]), err.getvalue()))
print(json.dumps(told))
"""


def test_a_file_that_cannot_be_written_is_one_message(tmp_path):
    """The recipe, and with more room a checkpoint (whose library has exceptions of its own)."""
    _, _, _, *arguments = command(tmp_path, 8)
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (code, told), size in zip(json.loads(done.stdout.splitlines()[-1]), ("100", "40000"), strict=True):
        assert code == 2 and "File too large" in told.strip().splitlines()[-1] and "Traceback" not in told
        assert not list((tmp_path / size / "checkpoints").glob("step-*"))
    assert (tmp_path / "40000" / "recipe.json").exists() and not (tmp_path / "100" / "recipe.json").exists()


def test_vocabulary_must_hold_the_data():
    with pytest.raises(UserError, match="vocab_size"):
        run_data.open_data(recipe(**{"model.vocab_size": 100}))


def test_bf16_autocast_runs_and_learns(tmp_path):
    record = train(
        recipe("proj-spheret", steps=30, **{"compute.precision": "bf16", "model.stream": "compute"}), tmp_path
    )
    assert record["loss"] < 4.5
    assert all(t.dtype == torch.float32 for t in weights(tmp_path).values())


@pytest.mark.slow
def test_compiled_run_follows_the_eager_one(tmp_path):
    for name, compile in (("eager", False), ("compiled", True)):
        train(recipe("proj-spheret", **{"compute.compile": compile}), tmp_path / name)
    a, b = (read_metrics(tmp_path / name)[-1]["loss"] for name in ("eager", "compiled"))
    assert a == pytest.approx(b, rel=1e-4)


def test_decay_and_scalars():
    """Weight decay touches matrices only; norms and step sizes stay out of it."""
    from gnomon.models import Transformer
    from gnomon.train import optimizer

    model = Transformer(recipe("sphere").model)
    groups = optimizer.build(model, dataclasses.replace(recipe().optim, weight_decay=0.3)).param_groups
    decay = {name: group["weight_decay"] for group in groups for name in group["param_names"]}
    assert decay.keys() == dict(model.named_parameters()).keys()
    assert decay["blocks.0.join_attention.a"] == 0 and decay["blocks.0.attention.query.weight"] == 0.3
