"""The command line: small and frozen, and it tells every mistake in one message with exit code 2."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
import tempfile

import pytest

from gnomon import cli

SMALL = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.context=16",
    "data.batch=2",
    "watch.eval_tokens=64",
]


def gnomon(*arguments):
    """`python -m gnomon` within this process, without the seconds it takes to import torch; an exception goes through."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = cli.main([*map(str, arguments)])
        except SystemExit as done:
            code = done.code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


# Adding a flag is a decision: everything else is reached through --set.
SURFACE = {
    "train": "config out steps seed lr residual p assignment data init device sink dry-run processes set",
    "report": "out watch",
    "compare": "out",
    "generate": "prompt tokens temperature top-k seed device",
    "eval": "data wikitext no-wikitext tokens tasks task-path fewshot limit json device",
    "export": "verify no-verify",
    "compress": "calibrate keep method by group groups sides tokens seed heal verify",
    "data": "tokenizer field val-fraction shard-tokens limit workers skip-bad",
    "inspect": "json html csv compare base config top full no-full fold-norms no-fold-norms per-head no-per-head lag "
    "text tokens removal",
    "study": "scale seeds jobs processes data variants out outcomes dry-run no-dry-run set",
    "advise": "layers width tokens batch-tokens tuning modern json",
    "residuals": "",
    "doctor": "",
}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_surface_is_frozen(command, capsys):
    import re

    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0
    flags = set(re.findall(r"--([a-z][a-z-]*)", capsys.readouterr().out.split("options")[1])) - {"help"}
    assert flags - {"set"} | ({"set"} if command in ("train", "study") else set()) == set(SURFACE[command].split())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    done = gnomon("train", "tiny", "--steps", 3, "--residual", "sphere", "--p", "inf", "--out", folder, "--set", *SMALL)
    assert done.returncode == 0, done.stderr
    return folder


def test_train_writes_a_run(run):
    recipe = json.loads((run / "recipe.json").read_text())
    assert recipe["model"]["residual_options"] == {"p": "inf"}
    assert (run / "report.html").stat().st_size > 10_000


def test_compare_eval_generate(run, tmp_path):
    done = gnomon("compare", run, "--out", tmp_path / "c.html")
    assert done.returncode == 0 and (tmp_path / "c.html").exists() and "max stream norm" in done.stdout, done.stderr
    assert "final val loss (bits/byte)" in done.stdout and json.loads((run / "environment.json").read_text())["bytes_per_token"] == 1
    done = gnomon("eval", run, "--tokens", 64, "--json", tmp_path / "e.json")
    assert done.returncode == 0 and "loss (nats/token)" in done.stdout and "bits/byte" in done.stdout, done.stderr
    (row,) = json.loads((tmp_path / "e.json").read_text())
    assert row["tokens"] == 64
    done = gnomon("generate", run, "--prompt", "The", "--tokens", 5)
    assert done.returncode == 0 and done.stdout.startswith("The"), done.stderr


def test_data_then_train_on_it(tmp_path, no_report):
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 200)
    done = gnomon("data", tmp_path / "text.txt", tmp_path / "tokens", "--tokenizer", "byte", "--workers", 2)
    assert done.returncode == 0, done.stderr
    done = gnomon(
        "train", "tiny", "--data", tmp_path / "tokens", "--steps", 2, "--out", tmp_path / "r", "--set", *SMALL
    )
    assert done.returncode == 0, done.stderr


def test_inspect_own_run(run, tmp_path):
    done = gnomon("inspect", run, "--json", tmp_path / "i.json", "--html", tmp_path / "i.html")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "i.json").read_text()).keys() >= {"model", "rows", "flags"}
    done = gnomon("inspect", tmp_path / "nothing")
    assert done.returncode == 2 and "nothing" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("where", ["a folder", "below a file"])
def test_inspect_refuses_its_outputs_before_the_work(where, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gnomon.continuity.inspect", lambda *a, **k: pytest.fail("the work was begun"))
    (tmp_path / "file").touch()
    out = tmp_path if where == "a folder" else tmp_path / "file" / "report.html"
    for flag in ("--json", "--html", "--csv"):
        assert cli.main(["inspect", "anything", flag, str(out)]) == 2
        assert "folder" in capsys.readouterr().err


def test_training_without_the_extra_report_ends_well_and_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    done = gnomon("train", "tiny", "--steps", 1, "--out", tmp_path / "run", "--set", *SMALL)
    assert done.returncode == 0 and "gnomon[report]" in done.stdout


def test_exporting_without_the_extra_hf_names_it(run, tmp_path):
    """In a process of its own, where nothing has imported transformers yet."""
    code = "import sys; sys.modules['transformers'] = None; from gnomon import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "export", str(run), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "gnomon[hf]" in done.stderr and "Traceback" not in done.stderr


def test_lists(capsys):
    assert cli.main(["residuals"]) == 0 and "proj-spheret" in capsys.readouterr().out
    assert cli.main(["doctor"]) == 0 and "torch.compile" in capsys.readouterr().out


def test_says_what_it_is_for_and_its_version(capsys):
    import gnomon as package

    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == f"gnomon {package.__version__}\n"
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out.split("\n\n")
    assert told[1].startswith("Transformers with a geometry you choose and can see") and "--version" in told[2]
    assert cli.main([]) == 2 and "which command?" in (err := capsys.readouterr().err) and told[1] in err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_overview_says_of_a_command_what_its_own_help_says(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    listed = " ".join(cli.overview().split())
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    usage, told = capsys.readouterr().out.split("\n\n")[:2]
    assert usage.startswith(f"usage: gnomon {name} [-h]") and f" {name} {' '.join(told.split())}" in listed


def test_a_closed_pipe_is_no_traceback():
    code = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); from gnomon.cli import main; sys.exit(main(['--help']))"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 141 and done.stderr == ""


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """A folder in which nothing may be written, whoever runs the test."""
    folder = tmp_path / "locked"
    folder.mkdir()
    make = tempfile.TemporaryFile

    def temporary(dir):
        if dir == folder:
            raise PermissionError(errno.EACCES, "Permission denied")
        return make(dir=dir)

    monkeypatch.setattr("tempfile.TemporaryFile", temporary)
    return folder


@pytest.mark.parametrize("command", ["inspect nowhere --json", "inspect nowhere --html", "inspect nowhere --csv", "eval nowhere --json",
                                     "compare nowhere --out"])  # fmt: skip
def test_where_it_is_to_write_is_checked_before_the_work(command, tmp_path, locked, capsys):
    """The checkpoint is not there either, which only the work would find out."""
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for place, words in ((tmp_path, "is a folder"), (tmp_path / "file" / "x.json", "is a file"), (tmp_path / "pipe", "is a pipe"),
                         (locked / "x.json", "Permission denied"), (locked / "new" / "x.json", "Permission denied")):  # fmt: skip
        assert cli.main([*command.split(), str(place)]) == 2
        told = capsys.readouterr().err
        assert words in told and str(place) in told and "nowhere" not in told


def test_a_config_that_may_not_be_read_is_told(tmp_path, monkeypatch, capsys):
    config = tmp_path / "recipe.json"
    config.write_text("{}")
    monkeypatch.setattr("os.access", lambda *_, **__: False)
    assert cli.main(["train", "--config", str(config)]) == 2
    assert "no permission" in capsys.readouterr().err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["train", "tiny", "--config", "recipe.json"], "give one of them"),
        (["train", "--config", "recipe.json", "--assignment", "muon"], "--set optim.name"),
        (["train", "--stepz", "3"], "--steps"),
        (["trian"], "train"),
        (["train", "tinny"], "Did you mean 'tiny'"),
        (["train", "--residual", "spher"], "Did you mean 'sphere'"),
        (["train", "--set", "optim.lrr=3"], "optim.lr"),
        (["train", "--set", "optim.lr"], "KEY=VALUE"),
        (["train", "--steps", "many"], "many"),
        (["train", "--sink", "wandbb"], "Did you mean 'wandb'"),
        (["train", "--device", "cuda:99"], "--device cpu"),
        (["train", "--data", "no/such/file.bin"], "no/such/file.bin"),
        (["train", "--p", "-1", "--residual", "sphere"], "p must lie in"),
        (["train", "--p", "2", "--residual", "pre-norm"], "no option 'p'"),
        (["train", "--config", "missing.json"], "missing.json"),
        (["eval", "nowhere"], "nowhere"),
        (["eval", "nowhere", "--wikitext"], "--data wikitext-2"),
        (["eval", "nowhere", "--fewshot", "5"], "go with --tasks"),
        (["eval", "nowhere", "--tasks", "piqa", "--data", "x.bin"], "one at a time"),
        (["eval", "nowhere", "--data", "wikitext2", "--wikitext"], "Did you mean 'wikitext-2'"),
        (["generate", "nowhere"], "nowhere"),
        (["compare", "nowhere"], "nowhere"),
        (["data", "nowhere.txt", "x"], "nowhere.txt"),
        (["inspect", "nowhere", "--tokens", "512"], "--tokens is for a text"),
        (["compress", "nowhere", "x", "--calibrate", "x.txt", "--group", "3"], "--group goes with --method shared"),
        (["compress", "nowhere", "x", "--calibrate", "x.txt", "--by", "loss"], "--by goes with --method depth or merge"),
        (["study", "compression", "--jobs", "2"], "one model in one process"),
        (["study", "drift", "--set", "optim.lr=3"], "no language model"),
        (["study", "manifolds", "--set", "optim.lr=3"], "rates of its own"),
    ],
)
def test_mistakes_exit_2_with_one_message(arguments, words, tmp_path):
    where = ["--out", str(tmp_path / "run")] if arguments[0] == "train" else []
    done = gnomon(*arguments, *where)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert words in done.stderr + done.stdout and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_truncated_token_file(tmp_path):
    (tmp_path / "t.bin").write_bytes(b"\x00" * 1001)
    done = gnomon("train", "tiny", "--data", tmp_path / "t.bin", "--out", tmp_path / "run")
    assert done.returncode == 2 and "t.bin" in done.stderr and "Traceback" not in done.stderr


def test_recipe_with_a_typo_names_it(run, tmp_path):
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["optim"]["weight_dcay"] = 0.3
    (tmp_path / "r.json").write_text(json.dumps(recipe))
    done = gnomon("train", "--config", tmp_path / "r.json", "--out", tmp_path / "run")
    assert done.returncode == 2 and "optim.weight_dcay" in done.stderr and "weight_decay" in done.stderr


def test_config_reproduces_a_run(run, tmp_path, no_report):
    done = gnomon("train", "--config", run / "recipe.json", "--out", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    a, b = (json.loads((f / "metrics.jsonl").read_text().splitlines()[-1])["loss"] for f in (run, tmp_path / "again"))
    assert a == b


def test_a_residual_by_set_leaves_the_recommended_options_behind(capsys):
    assert cli.main(["train", "tiny", "--set", "model.residual=keel", "--dry-run"]) == 0
    assert cli.main(["train", "tiny", "--set", "model.residual_options.clmp=1", "--dry-run"]) == 2
    assert "Did you mean 'clamp'" in capsys.readouterr().err
