"""The floor plan of ARCHITECTURE.md, held: imports go down, nothing goes in circles, every module has a name of its own.

Imports inside functions and modules named in strings (lazy exports, `import_module`) count like any other; only those for
the type checker do not.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gnomon

SOURCE = Path(gnomon.__file__).parent

FLOORS = [
    {"command", "diagnosis", "errors", "files", "lazy", "progress", "ranges", "run_folder", "series", "sharding"},
    {"geometry", "checkpoints", "data", "report"},
    {"anatomy"},
    {"residual", "optim", "continuity"},
    {"models", "monitor"},
    {"train", "evaluation", "integrations", "running", "compress", "export", "doctor"},
    {"studies"},
    {"cli", "__main__"},
]
# Rooms of these floors may not import each other; above them they may.
SEPARATE = FLOORS[1] | FLOORS[3] | FLOORS[4]


def module_of(path: Path) -> str:
    parts = ["gnomon", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


def named_in(node: ast.AST) -> list[str]:
    """Modules of ours that one node of the tree names, by import statement or by string."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        inside = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name in FILES else node.module for name in inside]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"gnomon(\.\w+)+", node.value):
        return [node.value]
    return []


def without_type_checking(tree: ast.AST) -> list[ast.AST]:
    """All nodes but those that only a type checker sees."""
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
    return found


@functools.cache
def arrows() -> set[tuple[str, str]]:
    """(importer, imported) over all modules of the package."""
    found = set()
    for module, path in FILES.items():
        for node in without_type_checking(ast.parse(path.read_text())):
            # A package that one of its own modules names in a string is the folder of its data files.
            not_meant = {module, "gnomon"} | ({module.rpartition(".")[0]} if isinstance(node, ast.Constant) else set())
            found |= {(module, name) for name in named_in(node) if name in FILES and name not in not_meant}
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def floor(name: str) -> int:
    return next(i for i, names in enumerate(FLOORS) if name in names)


def circles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """Groups of modules of which each reaches each (Tarjan's strongly connected components)."""
    after: dict[str, list[str]] = {}
    for a, b in edges:
        after.setdefault(a, []).append(b)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in after.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in FILES:
        if node not in index:
            visit(node)
    return found


def test_the_plan_names_the_rooms_there_are():
    rooms = {p.name.removesuffix(".py") for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert rooms - {"__init__"} == set().union(*FLOORS)


def test_imports_go_down():
    between = [(a, b) for a, b in sorted(arrows()) if room(a) and room(a) != room(b)]
    assert len(between) > 100
    for a, b in between:
        assert floor(room(b)) <= floor(room(a)), f"{a} imports {b}, which is above it"
        if floor(room(b)) == floor(room(a)):
            assert room(a) not in SEPARATE, f"{a} imports {b}: the rooms of this floor stand apart"


def test_nothing_goes_in_circles():
    assert circles(arrows()) == []
    assert circles({("gnomon.files", "gnomon.errors"), ("gnomon.errors", "gnomon.files")}) != []


def test_every_module_has_a_name_of_its_own():
    names = Counter(path.stem for path in FILES.values() if path.name != "__init__.py")
    rooms = {path.parent.name for path in FILES.values() if path.name == "__init__.py"}
    assert [name for name, count in names.items() if count > 1] == []
    # A file that bears a room's name holds the class of that name.
    assert {name for name in names if name in rooms} <= {"anatomy", "diagnosis", "report"}


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
