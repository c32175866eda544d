"""Code that no test runs (benchmarks, examples, guides) asks gnomon for names that are there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path.relative_to(ROOT)
    for pattern in ("benchmarks/*.py", "examples/*.py", "*.md", "docs/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
IMPORT = re.compile(r"^[ >]*from (gnomon[\w.]*) import (\([^)]*\)|[^\n#(]+)", re.MULTILINE)


def asked(text: str) -> list[tuple[str, str]]:
    found = []
    for module, names in IMPORT.findall(text):
        found += [(module, name) for name in re.sub(r" as \w+", "", names).replace(",", " ").strip("()\n ").split()]
    return found


@pytest.mark.parametrize("path", [path for path in FILES if asked((ROOT / path).read_text())], ids=str)
def test_every_imported_name_exists(path):
    for module, name in asked((ROOT / path).read_text()):
        assert hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}"), name


def test_names_are_found_however_they_are_written():
    text = "from gnomon import data\n    from gnomon.x import (\n    a,\n    b,\n)\nfrom gnomon.y import c as e, d  # f\n"
    assert asked(text) == [("gnomon", "data"), *[("gnomon.x", n) for n in "ab"], *[("gnomon.y", n) for n in "cd"]]
