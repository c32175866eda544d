"""The pages of the examples show what is there, and what it printed."""

from __future__ import annotations

import re
from pathlib import Path

import example_outputs
import pytest

ROOT = Path(__file__).parents[1]
# Not in tests/test_examples.py, which says where.
ELSEWHERE = {"hf_trainer", "lightning_loop", "monitor_plain_loop", "monitor_transformers", "monitor_lightning"}
FILES = sorted((ROOT / "examples").glob("*.py"))


def test_no_example_is_forgotten():
    """Each has a test, a place on the page of examples and in the navigation."""
    here = (ROOT / "tests/test_examples.py").read_text()
    page, navigation = (ROOT / "docs" / "examples.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for file in FILES:
        assert f'example("{file.stem}")' in here or f'"{file.stem}.py"' in here or file.stem in ELSEWHERE
        title = example_outputs.parts(file)[0].partition(": ")[0]
        assert f"[{title}](../examples/{file.name})" in page and f"- {title}: examples/{file.stem}.md\n" in navigation


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_output_on_its_page_is_that_of_the_code_beside_it(file):
    made, *printed = (example_outputs.KEPT / f"{file.stem}.txt").read_text("utf-8").splitlines()
    assert made.endswith(f"; code {example_outputs.fingerprint(file)}"), f"python tools/example_outputs.py {file.stem}"
    commands = example_outputs.commands(file)
    assert commands and [line[2:] for line in printed if line.startswith("$ ")] == commands
    assert len([line for line in printed if line and not line.startswith("$ ")]) >= len(commands)
    assert not [line for line in printed if re.search(r"/(work|home|root|tmp)/", line)]
    assert (example_outputs.KEPT / f"{file.stem}.svg").exists() == (file.stem in example_outputs.PICTURES)
