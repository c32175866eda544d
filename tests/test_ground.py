"""Errors, files and progress: what every room stands on."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gnomon import cli, report
from gnomon.errors import UserError, check_name, printable, refused, suggest
from gnomon.files import (
    atomic,
    atomic_folder,
    check_readable,
    flatten,
    read_json,
    remove_partials,
    restored,
    spelled,
    write_json,
)
from gnomon.progress import Progress, duration, quantity
from gnomon.run_folder import checkpoint_folder, checkpoint_folders, locate, newest_checkpoint, read_metrics, run_of


def test_suggestions():
    assert suggest("spere", ["sphere", "pre-norm"]) == "Did you mean 'sphere'?"
    assert suggest("zzz", ["b", "a"]) == "Known: a, b."
    assert check_name("kind", "a", ["a"]) == "a"
    with pytest.raises(UserError, match="unknown kind 'x'"):
        check_name("kind", "x", ["a"])


def test_file_is_whole_or_as_before(tmp_path):
    path = tmp_path / "new" / "f.json"
    write_json(path, {"a": 1})
    with pytest.raises(OSError), atomic(path, "w") as file:
        file.write("half")
        raise OSError(28, "No space left on device")
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["f.json"]


def test_numbers_that_are_not_finite_are_spelled_and_come_back(tmp_path):
    write_json(path := tmp_path / "f.json", {"a": math.inf, "b": [-math.inf, (math.nan, 1.5)], "c": {"d": None, "e": "word"}})
    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert read == {"a": "inf", "b": ["-inf", ["nan", 1.5]], "c": {"d": None, "e": "word"}}
    back = restored(read)
    assert back["a"] == math.inf and back["b"][0] == -math.inf and math.isnan(back["b"][1][0]) and back["b"][1][1] == 1.5
    assert back["c"] == {"d": None, "e": "word"} and spelled(back) == read


def test_leaves_by_dotted_path():
    assert flatten({"a": {"b": 1, "c": {}, "d": {"e": [2]}}, "f": None}) == {"a.b": 1, "a.d.e": [2], "f": None}


def test_checkpoints_of_a_run_by_number(tmp_path):
    with pytest.raises(UserError, match="no run folder"):
        newest_checkpoint(tmp_path)
    for step in (900, 100_000_000, 20):
        checkpoint_folder(tmp_path, step).mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-00000999.partial").mkdir()
    (tmp_path / "checkpoints" / "latest").symlink_to("step-00000020")
    names = [path.name for path in checkpoint_folders(tmp_path)]
    assert names == ["step-00000020", "step-00000900", "step-100000000"]
    assert locate(tmp_path) == (tmp_path, tmp_path / "checkpoints" / "step-100000000")
    (chosen := checkpoint_folder(tmp_path, 900)).joinpath("model.safetensors").touch()
    assert locate(chosen) == (tmp_path.resolve(), chosen) and run_of(chosen) == tmp_path.resolve()


def test_metrics_of_old_and_new_runs(tmp_path):
    assert read_metrics(tmp_path) == []
    lines = [{"step": 2, "loss": None, "list": [1.0, None]}, {"step": 1, "loss": "inf"}, {"step": 3, "loss": 1.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "loss": 2.5}\n{"step": 4, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    first, second, third = read_metrics(tmp_path)
    assert first["loss"] == math.inf and math.isnan(second["loss"]) and second["list"] == [1.0, None]
    assert third == {"step": 3, "loss": 2.5}, "what was written last counts"
    (tmp_path / "metrics.jsonl").write_text("[1]\n" + text)
    with pytest.raises(UserError, match="line 1, is no JSON object"):
        read_metrics(tmp_path)
    assert len(read_metrics(tmp_path, notes := [])) == 3 and "2 unreadable lines skipped (line 1, 6)" in notes[0]


def test_folder_is_whole_or_absent(tmp_path):
    with pytest.raises(OSError), atomic_folder(tmp_path / "a") as partial:
        (partial / "x").write_text("half")
        raise OSError
    assert not list(tmp_path.iterdir())
    with atomic_folder(tmp_path / "a") as partial:
        (partial / "x").write_text("whole")
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "a"):
        pass
    assert (tmp_path / "a" / "x").read_text() == "whole"


def test_rubble_of_a_killed_process_is_removed(tmp_path):
    (tmp_path / ".a.1.partial").mkdir()
    (tmp_path / ".b.1.partial").write_text("")
    (tmp_path / "kept.partial").write_text("")
    remove_partials(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.partial"]


def test_numbers_for_people():
    assert (duration(75), duration(4000)) == ("1:15", "1:06:40")
    assert (quantity(1234567), quantity(1234567, "B"), quantity(12)) == ("1.23M", "1.23 MB", "12")


def test_progress_tells_rate_and_eta(monkeypatch, capsys):
    clock = {"now": 0.0}
    monkeypatch.setattr("gnomon.progress.time.monotonic", lambda: clock["now"])
    with Progress("reading", total=200, unit="B", done=100) as bar:
        clock["now"] = 20.0
        bar.advance(50, note="shard 1")
    line = capsys.readouterr().err
    assert "reading" in line and "75 %" in line and "2.5 B/s" in line and "ETA 0:20" in line and "shard 1" in line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("plain", [False, True])
def test_the_live_line_fits_the_terminal_and_shows_the_newest_warning(monkeypatch, plain):
    clock = {"now": 0.0}
    monkeypatch.setattr("gnomon.progress.time.monotonic", lambda: clock["now"])
    monkeypatch.setattr("gnomon.progress.shutil.get_terminal_size", lambda: os.terminal_size((70, 24)))
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1" if plain else "")
    with Progress("training", total=100, unit="step") as bar:
        for warning in ("logits grow", "the stream forgets its input \x1b[2J and more words than fit"):
            clock["now"] += 1
            bar.warn(warning)
            bar.advance(1, note="loss 2.1")
        shown = sys.stderr.getvalue()
    assert ("\x1b[33m" in shown) != plain and "\x1b[2J" not in shown
    kept = [line for line in re.sub(r"\x1b\[\d+m", "", shown).split("\n")]
    assert kept[0].rstrip() == "logits grow" and kept[-1].count("\r") == 1
    live = kept[-1].lstrip("\r")
    assert "loss 2.1  ! the stream f" in live and len(live) <= 69
    assert sys.stderr.getvalue().endswith("\r")


def test_no_terminal_gets_few_plain_lines(monkeypatch, capsys):
    clock = {"now": 0.0}
    monkeypatch.setattr("gnomon.progress.time.monotonic", lambda: clock["now"])
    with Progress("training", total=36_000, unit="step") as bar:
        for _ in range(36_000):
            clock["now"] += 1
            bar.advance(1)
    lines = capsys.readouterr().err
    # Ten hours: every 15 s for 150 s, then 1.1 times as late each time.
    assert 50 < len(lines.splitlines()) < 80 and "\r" not in lines and "\x1b" not in lines


def test_foreign_text_is_printable(capsys):
    assert printable("plain: naïve 日本 👩‍👩\nsecond line") == "plain: naïve 日本 👩‍👩\nsecond line"
    assert printable("a\x1b[31mred\r\t\x07\x9b1m\u202egnp\udcff") == "a\\x1b[31mred\\r\t\\x07\\x9b1m\\u202egnp\\udcff"
    assert printable("no " + "x" * 100_000 + " there") == f"no {'x' * 200}…{'x' * 50} (100,000 characters) there"
    assert len(printable("long name " * 10_000)) < 300
    report.show([{"name": "w\x1b[2J" + "y" * 1000}], title="of \x1b]0;t\x07")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown and "w\\x1b[2J" in shown and "(1,005 characters)" in shown


def test_what_is_no_readable_file_is_named_and_nothing_waits(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "self").symlink_to("self")
    for name, message in {
        "pipe": "pipe is a pipe, not a file",
        "gone": "no file .*gone .a link to what is gone.",
        "self": "self: Too many levels of symbolic links",
        "none": "no file .*none$",
        "": "it is a folder",
        "x" * 300: "File name too long",
        "/dev/null": "is a device, not a file",
    }.items():
        with pytest.raises(UserError, match=message):
            check_readable(tmp_path / name)
        with pytest.raises(UserError, match=message):
            read_json(tmp_path / name)


def test_what_the_system_refuses_is_one_message(tmp_path, monkeypatch, capsys):
    def fails(error):
        def command(argv=None, **_):
            raise error

        monkeypatch.setattr(cli.tyro, "cli", command)
        code = cli.main(["doctor"])
        return code, capsys.readouterr().err

    assert fails(PermissionError(13, "Permission denied", "/x/y\x1b[1m")) == (
        2, "gnomon: /x/y\\x1b[1m: Permission denied. See who may read and write it: ls -ld\n"
    )  # fmt: skip
    assert fails(OSError(28, "No space left on device"))[1].startswith("gnomon: No space left on device. Free some")
    for bug in (ConnectionError("no route"), OSError("of a library")):
        with pytest.raises(OSError):
            fails(bug)
    assert refused(BrokenPipeError(32, "Broken pipe")) is None
    with pytest.raises(OSError) as caught, atomic(tmp_path / "full.json") as file:
        file.write(b"half")
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(tmp_path / "full.json") and not list(tmp_path.iterdir())


def test_a_file_of_another_user_is_named():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "a.json"
        path.write_text("{}")
        path.chmod(0)
        code = f"""
import os
import re
from gnomon.files import read_json
if not os.getuid():
    os.setuid(65534)  # root may read everything
read_json({str(path)!r})"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UserError" in done.stderr and "a.json: no permission to read it" in done.stderr
