"""Makes gnomon's models known to transformers, whichever of the two is imported first, at no cost to either.

transformers has no place where a library could announce its models without being imported. So `import gnomon` leaves a
watcher in `sys.meta_path` that waits for the one module which maps model types to classes, acts once, and is gone.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from typing import Any

_AWAITED = "transformers.models.auto.configuration_auto"


def watch() -> None:
    """Register gnomon's models with transformers: now if it has been imported, else when it will be."""
    if _AWAITED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


class _Watcher:
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: Any) -> None:
            run(module)
            _register()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    # By name: the ground floor imports nothing from above.
    try:
        importlib.import_module("gnomon.models.hf").register()
    except Exception as error:  # a foreign `import transformers` must not fail because of us
        import warnings

        warnings.warn(
            f"gnomon's models are not known to AutoModelForCausalLM: {error!r}. They need transformers >= 5.13.1.",
            stacklevel=2,
        )
