"""Public names of a package that are imported when first used (PEP 562), so that its import and `--help` stay instant."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, exports: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    >>> if not TYPE_CHECKING:  # a checker would take any name at all for one of ours
    ...     __getattr__, __dir__ = lazy(__name__, {"open_checkpoint": "opener"})

    Args:
        package: its `__name__`.
        exports: public name -> the module below the package that defines it; a name equal to its module is the module.
    """
    here = sys.modules[package]

    def get(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{exports[name]}")
        value = module if exports[name] == name else getattr(module, name)
        setattr(here, name, value)
        return value

    return get, lambda: sorted({*vars(here), *exports})
