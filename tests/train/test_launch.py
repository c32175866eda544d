"""The command on two processes: it stops when asked, survives kills, and one process speaks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from parallel_cases import spawn
from safetensors.torch import load_file

from gnomon import cli
from gnomon.run_folder import checkpoint_folders, read_metrics
from gnomon.train import checkpoint_layout, loop

# Starting processes takes seconds each, and on a busy machine minutes.
pytestmark = pytest.mark.timeout(900)

STEPS = 24
SETTINGS = [
    "model.layers=2", "model.width=32", "model.heads=2", "model.context=32", "data.batch=4", f"steps={STEPS}",
    "watch.save_every=5", "watch.eval_every=10", "watch.probe_every=10", "watch.eval_tokens=128", "watch.probe_tokens=64",
]  # fmt: skip


def command(folder, *more):
    settings = ["--assignment", "hetero", "--residual", "proj-spheret", "--device", "cpu", "--set", *SETTINGS, *more]
    return ["-m", "gnomon", "train", "tiny", "--out", str(folder), *settings]


def environments(world):
    """What torchrun tells each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def launch(*arguments, world=2):
    """What torchrun does, without its agent."""
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | environment | {"PYTHONFAULTHANDLER": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments(world)
    ]


KILLED = """
import os, signal, sys
from gnomon import cli
from gnomon.train import loop
real = loop.data.batch
def batch(*given, step, **more):
    if os.environ["RANK"] == "1" and step == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*given, step=step, **more)
loop.data.batch = batch
sys.exit(cli.main(sys.argv[1:]))
"""


def work(rank, world, barrier, folder, told, arguments, asked=None):
    """The command in a process that lives on: exit code, stdout and stderr. The last of them is sent SIGTERM at step `asked`."""
    real, out, err = loop.data.batch, io.StringIO(), io.StringIO()

    def batch(*given, step, **more):
        if rank == world - 1 and step == asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*given, step=step, **more)

    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.dict(os.environ, told[rank]):
        with mock.patch.object(loop.data, "batch", batch):
            return cli.main(arguments), out.getvalue(), err.getvalue()


def wait_for_step(folder, step, processes):
    for _ in range(2400):
        if (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) >= step:
            return
        assert all(p.poll() is None for p in processes), [p.communicate() for p in processes]
        time.sleep(0.05)
    raise AssertionError("the run did not get going")


def ends(processes):
    """Outputs and exit codes; processes that wait for each other for ever are aborted, and tell where they were."""
    deadline = time.monotonic() + 240
    while any(p.poll() is None for p in processes):
        if time.monotonic() > deadline:
            for p in processes:
                p.send_signal(signal.SIGABRT)
            raise AssertionError([p.communicate() for p in processes])
        time.sleep(0.1)
    return [(p.communicate(), p.returncode) for p in processes]


def weights(folder):
    return load_file(checkpoint_folders(folder)[-1] / "model.safetensors")


def test_asked_killed_and_continued_equals_uninterrupted(tmp_path):
    folder = tmp_path / "run"
    # Any of the processes may be asked.
    (code, out, err), (other, quiet, _) = spawn(2, work, str(tmp_path), environments(2), command(folder)[2:], 7)
    assert code == other == 130 and "the same command continues" in out and quiet == "", (out, err)
    stopped = read_metrics(folder)[-1]["step"]
    newest = checkpoint_folders(folder)[-1]
    assert newest.name == f"step-{stopped:08d}" and checkpoint_layout.damage(newest) is None and 7 <= stopped < 12

    # kill -9 of one in the middle; the other cannot go on, and whoever launched them ends it.
    first, second = launch("-c", KILLED, *command(folder)[2:])
    assert second.wait(240) == -signal.SIGKILL, second.communicate()
    time.sleep(0.2)
    first.kill()
    ends([first, second])
    left = read_metrics(folder)[-1]["step"]
    newest = checkpoint_folders(folder)[-1]
    assert checkpoint_layout.damage(newest) is None and stopped < left <= 17 and left - int(newest.name.split("-")[1]) <= 10

    (code, out, err), (other, quiet, _) = spawn(2, work, str(tmp_path), environments(2), command(folder)[2:])
    assert code == other == 0 and quiet == "" and "wrote" in out, (out, err)
    answers = spawn(2, work, str(tmp_path), environments(2), command(tmp_path / "whole")[2:])
    assert [code for code, *_ in answers] == [0, 0], answers
    one, two = weights(folder), weights(tmp_path / "whole")
    assert all(torch.equal(one[name], two[name]) for name in two)
    assert [m["step"] for m in read_metrics(folder)] == list(range(STEPS + 1))
    assert not list((folder / "checkpoints").glob(".*")) and (folder / "report.html").exists()


def test_mistakes_are_told_before_anything_is_written(tmp_path):
    for mistake, words in (("data.batch=5", "multiple of 2"), ("data.train=gone", "gone"), ("data.btch=4", "data.batch")):
        arguments = command(tmp_path / "run", mistake)[2:]
        (code, _, err), (other, _, silent) = spawn(2, work, str(tmp_path), environments(2), arguments)
        assert code == other == 2 and words in err and "Traceback" not in err + silent
        # Both meet it, one tells it.
        assert err.count("gnomon:") == 1 and silent == ""
    assert not (tmp_path / "run").exists()


def test_processes_starts_them_and_a_mistake_is_told_once_and_nothing_else(tmp_path, capfd, monkeypatch):
    """Torchrun adds a traceback of its own to every error."""
    arguments = [*command(tmp_path / "run", "steps=3")[2:], "--processes", "2"]
    with monkeypatch.context() as patch:
        patch.setattr("gnomon.train.launch.launch", lambda *_: pytest.fail("processes were started"))
        assert cli.main([*arguments, "--set", *SETTINGS, "data.train=gone"]) == 2
    out, err = capfd.readouterr()
    assert err.count("gnomon:") == 1 and "Traceback" not in err and out == ""
    assert len(err.strip().splitlines()) == 1 and not (tmp_path / "run").exists()
    with pytest.raises(SystemExit) as done:
        cli.main(arguments)
    out, err = capfd.readouterr()
    assert done.value.code == 0 and out.count("wrote") == 1, err
    assert read_metrics(tmp_path / "run")[-1]["step"] == 3
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["processes"] == 2


def test_processes_are_asked_to_stop_by_one_signal(tmp_path):
    arguments = [sys.executable, *command(tmp_path / "run", "steps=4000"), "--processes", "2"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "run", 5, [process])
    process.terminate()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and out.count("the same command continues") == 1, (out, err)
    newest = checkpoint_folders(tmp_path / "run")[-1]
    assert int(newest.name.split("-")[1]) == read_metrics(tmp_path / "run")[-1]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun(tmp_path, strategy):
    """torchrun hands SIGTERM on; the same command then continues to the end, as one process would."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    start += command(tmp_path / "run", "steps=100", f"parallel.strategy={strategy}")
    process = subprocess.Popen([sys.executable, *start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "run", 12, [process])
    process.terminate()
    process.communicate(timeout=120)
    saved = checkpoint_folders(tmp_path / "run")[-1].name
    assert int(saved.split("-")[1]) == read_metrics(tmp_path / "run")[-1]["step"] < 100
    for arguments in (start, command(tmp_path / "one", "steps=100")):
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    many, one = (read_metrics(tmp_path / name)[-1] for name in ("run", "one"))
    assert many["loss"] == pytest.approx(one["loss"], abs=0.05) and many["step"] == 100
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["strategy"] == strategy


@pytest.mark.slow
def test_compiled_block_by_block(tmp_path):
    more = ("compute.compile=true", "parallel.recompute=true", "parallel.strategy=fsdp", "steps=6")
    for ((out, err), code) in ends(launch(*command(tmp_path / "many", *more))):
        assert code == 0, (out, err)
    for ((out, err), code) in ends(launch(*command(tmp_path / "one", "steps=6"), world=1)):
        assert code == 0, (out, err)
    many, one = (read_metrics(tmp_path / name)[-1] for name in ("many", "one"))
    assert many["loss"] == pytest.approx(one["loss"], abs=0.01)
    # Probes look through hooks, which compiled blocks must not hide.
    assert many["stream_norm"] == pytest.approx(one["stream_norm"], rel=1e-2) and len(many["attention_logit_max"]) == 2
