"""The model's own code as files beside its weights, for `trust_remote_code=True` where gnomon is not installed.

The files are gnomon's modules as they are, in one flat folder, with the imports between them made relative.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import gnomon

FILES = {
    "gnomon.errors": "gnomon_errors",
    "gnomon.geometry.sphere": "gnomon_sphere",
    "gnomon.residual.base": "gnomon_residual_base",
    "gnomon.residual.additive": "gnomon_residual_additive",
    "gnomon.residual.spherical": "gnomon_residual_spherical",
    "gnomon.residual": "gnomon_residual",
    "gnomon.models.config": "gnomon_settings",
    "gnomon.models.transformer": "gnomon_transformer",
    "gnomon.models.hf.configuration": "configuration_gnomon",
    "gnomon.models.hf.modeling": "modeling_gnomon",
}
"""Module -> its name in the folder. The last two names are those of `AUTO_MAP`."""

AUTO_MAP = {
    "AutoConfig": "configuration_gnomon.GnomonConfig",
    "AutoModelForCausalLM": "modeling_gnomon.GnomonForCausalLM",
}
"""What `config.json` says for transformers to find the classes."""


def write(folder: Path) -> list[str]:
    """Write the files; returns their names."""
    for module, name in FILES.items():
        (folder / f"{name}.py").write_text(standalone(module), encoding="utf-8")
    return [f"{name}.py" for name in FILES.values()]


def standalone(module: str) -> str:
    """The source of a module with imports of gnomon's modules made relative to one flat folder."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    head = f"# {module} of gnomon {gnomon.__version__}, Apache-2.0; only its imports were changed.\n"
    return head + re.sub(r"^from (gnomon[\w.]*) import (\w+)?", _relative, source, flags=re.MULTILINE)


def _relative(found: re.Match[str]) -> str:
    package, name = found.group(1), found.group(2)
    if f"{package}.{name}" in FILES:
        file = FILES[f"{package}.{name}"]
        # transformers copies only files that are imported in the second form.
        return f"from . import {file} as {name}\nfrom .{file} import __doc__ as _"
    return f"from .{FILES[package]} import {name or ''}"
