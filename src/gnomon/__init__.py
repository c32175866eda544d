"""gnomon: transformers with a geometry you choose and can see.

`import gnomon` is instant; torch is imported when the first name that needs it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

from gnomon import plugin

__version__ = "0.1.0"

# Public name -> the module that defines it. A name equal to the module's last part is the module itself.
_EXPORTS = {
    "geometry": "gnomon.geometry",
    "residual": "gnomon.residual",
    "models": "gnomon.models",
    "data": "gnomon.data",
    "train": "gnomon.train",
    "anatomy": "gnomon.anatomy",
    "optim": "gnomon.optim",
    "continuity": "gnomon.continuity",
    "checkpoints": "gnomon.checkpoints",
    "evaluation": "gnomon.evaluation",
    "report": "gnomon.report",
    "studies": "gnomon.studies",
    "Stiefel": "gnomon.geometry.manifolds",
    "DGram": "gnomon.geometry.manifolds",
    "Oblique": "gnomon.geometry.manifolds",
    "Euclidean": "gnomon.geometry.manifolds",
    "Rule": "gnomon.optim",
    "assign": "gnomon.optim",
    "ManifoldMuon": "gnomon.optim",
    "inspect": "gnomon.continuity",
    "Tracker": "gnomon.continuity",
    "UserError": "gnomon.errors",
}

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'gnomon' has no attribute {name!r}")
    module = importlib.import_module(_EXPORTS[name])
    value = module if module.__name__ == f"gnomon.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


plugin.watch()
