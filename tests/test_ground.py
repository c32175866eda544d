"""Errors, files and progress: what every room stands on."""

from __future__ import annotations

import pytest

from gnomon.errors import UserError, check_name, suggest
from gnomon.files import atomic, atomic_folder, read_json, remove_partials, write_json
from gnomon.progress import Progress, duration, quantity


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
    with pytest.raises(ValueError):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["f.json"]


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
