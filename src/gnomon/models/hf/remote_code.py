"""The model's own code as files beside its weights, for `trust_remote_code=True` where gnomon is not installed.

The files are gnomon's modules as they are, all that the model imports, in one flat folder, with the imports between them made
relative.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import gnomon

ROOTS = {
    "gnomon.models.hf.configuration": "configuration_gnomon",
    "gnomon.models.hf.modeling": "modeling_gnomon",
}

AUTO_MAP = {
    "AutoConfig": "configuration_gnomon.GnomonConfig",
    "AutoModel": "modeling_gnomon.GnomonModel",
    "AutoModelForCausalLM": "modeling_gnomon.GnomonForCausalLM",
}
"""What `config.json` says for transformers to find the classes."""

_IMPORT = re.compile(r"^from (gnomon[\w.]*) import (\w+)?", flags=re.MULTILINE)


def source_files() -> dict[str, str]:
    """The source of every file by its name, from the two that transformers looks for through all they import."""
    found: dict[str, str] = {}
    waiting = list(ROOTS)
    while waiting:
        module = waiting.pop()
        if _file(module) not in found:
            source = _source(module)
            found[_file(module)] = _standalone(module, source)
            waiting += [_target(match)[0] for match in _IMPORT.finditer(source)]
    return {f"{name}.py": text for name, text in sorted(found.items())}


def write_source_files(folder: Path) -> None:
    """Write the files."""
    for name, text in source_files().items():
        (folder / name).write_text(text, encoding="utf-8")


def _standalone(module: str, source: str) -> str:
    head = f"# {module} of gnomon {gnomon.__version__}, Apache-2.0; only its imports were changed.\n"
    return head + _IMPORT.sub(_relative, source)


def _relative(match: re.Match[str]) -> str:
    target, is_module = _target(match)
    if is_module:
        # transformers copies only files that are imported in the second form.
        return f"from . import {_file(target)} as {match[2]}\nfrom .{_file(target)} import __doc__ as _"
    return f"from .{_file(target)} import {match[2] or ''}"


def _target(match: re.Match[str]) -> tuple[str, bool]:
    """The module that an import statement reads, and whether it binds the module itself."""
    package, name = match[1], match[2]
    inside = importlib.util.find_spec(package)
    if name and inside is not None and inside.submodule_search_locations is not None:
        if importlib.util.find_spec(f"{package}.{name}") is not None:
            return f"{package}.{name}", True
    return package, False


def _file(module: str) -> str:
    return ROOTS.get(module, module.replace(".", "_"))


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None and module != "gnomon", f"{module} cannot stand alone"
    return Path(spec.origin).read_text(encoding="utf-8")
