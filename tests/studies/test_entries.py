"""`python -m gnomon.studies.X` answers and refuses as `gnomon` itself does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from gnomon import studies

ENTRIES = [path.stem for path in sorted(Path(studies.__file__).parent.glob("*.py")) if "__main__" in path.read_text()]


@pytest.fixture
def call(monkeypatch, capsys):
    def called(entry: str, *words: str) -> tuple[int, str, str]:
        module = f"gnomon.studies.{entry}"
        monkeypatch.setattr(sys, "argv", [entry, *words])
        monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(SystemExit) as done:
            runpy.run_module(module, run_name="__main__")
        return (done.value.code, *capsys.readouterr())

    return called


def test_there_are_entries():
    assert {"map_evidence", "page_of_outcomes", "compression_page", "warning_page"} <= set(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES)
def test_help_and_mistakes(entry, call, tmp_path):
    code, out, err = call(entry, "--help")
    assert code == 0 and out.startswith(f"usage: python -m gnomon.studies.{entry} [-h]") and not err
    nowhere = str(tmp_path / "nowhere.jsonl")
    words = {
        "map_evidence": [nowhere, "--text", "novels"],
        "page_of_outcomes": ["map", nowhere, "--out", str(tmp_path / "page")],
    }.get(entry, [nowhere])
    code, out, err = call(entry, *words, "--no-such-flag", "x")
    assert code == 2 and not out and "--no-such-flag" in err and "Traceback" not in err
    code, out, err = call(entry, *words)
    assert code == 2 and not out and err.startswith("gnomon: ") and nowhere in err and len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
