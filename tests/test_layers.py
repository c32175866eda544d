"""Imports go down: nobody has to remember the floor plan of ARCHITECTURE.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import gnomon

SOURCE = Path(gnomon.__file__).parent

FLOORS = [
    {"errors", "files", "lazy", "progress", "ranges", "run_folder", "sharding"},
    {"geometry", "checkpoints", "data", "report"},
    {"anatomy"},
    {"residual", "optim", "continuity"},
    {"models"},
    {"train", "evaluation", "export", "doctor"},
    {"studies"},
    {"cli", "__main__"},
]
# Rooms of these floors may not import each other; above them they may.
SEPARATE = FLOORS[1] | FLOORS[3]


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def floor(name: str) -> int:
    return next(i for i, names in enumerate(FLOORS) if name in names)


def imports() -> list[tuple[str, str, str]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module] + [f"{node.module}.{a.name}" for a in node.names if node.module == "gnomon"]
            for module in modules:
                if module.startswith("gnomon.") and room(module) != here:
                    found.append((str(path.relative_to(SOURCE)), here, room(module)))
    return found


def test_every_room_has_a_floor():
    rooms = {p.name.removesuffix(".py") for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert rooms - {"__init__"} <= set().union(*FLOORS)


def test_imports_go_down():
    known = [i for i in imports() if i[2] in set().union(*FLOORS)]
    assert len(known) > 20
    for path, here, there in known:
        assert floor(there) <= floor(here), f"{path} imports {there}, which is above it"
        if floor(there) == floor(here):
            assert here not in SEPARATE, f"{path} imports {there}: the rooms of this floor stand apart"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_gnomon_and_asking_for_help_leave_torch_alone():
    assert run("import gnomon, sys; print('torch' in sys.modules)") == "False\n"
    code = """
import sys
from gnomon.cli import COMMANDS, main
for command in [[], *([name] for name in COMMANDS)]:
    try:
        main([*command, '--help'])
    except SystemExit as done:
        assert done.code == 0
assert 'torch' not in sys.modules
print('fine')
"""
    assert run(code).endswith("fine\n")


def test_public_names_resolve():
    for name in gnomon.__all__:
        assert getattr(gnomon, name) is not None
    assert set(gnomon.__all__) <= set(dir(gnomon))
