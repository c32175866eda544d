"""gnomon: transformers with a geometry you choose and can see.

`import gnomon` is instant; torch is imported when the first name that needs it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.lazy import lazy

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon.continuity.inspector import inspect  # noqa: F401
    from gnomon.continuity.tracker import Tracker  # noqa: F401
    from gnomon.errors import UserError  # noqa: F401
    from gnomon.geometry.manifolds import DGram, Euclidean, Oblique, SpectralBall, SpectralSphere, Sphere, Stiefel  # noqa: F401
    from gnomon.models.hf import register  # noqa: F401
    from gnomon.monitor.monitoring import Monitor  # noqa: F401
    from gnomon.optim import ManifoldMuon, Rule, assign  # noqa: F401

__version__ = "0.1.0"

_ROOMS = (
    "geometry", "residual", "monitor", "models", "data", "train", "anatomy", "optim", "continuity", "checkpoints", "evaluation",
    "running", "compress", "report", "studies", "diagnosis", "integrations",
)  # fmt: skip
_EXPORTS = {room: room for room in _ROOMS} | {
    "Stiefel": "geometry.manifolds",
    "DGram": "geometry.manifolds",
    "Oblique": "geometry.manifolds",
    "Euclidean": "geometry.manifolds",
    "Sphere": "geometry.manifolds",
    "SpectralBall": "geometry.manifolds",
    "SpectralSphere": "geometry.manifolds",
    "Rule": "optim",
    "assign": "optim",
    "ManifoldMuon": "optim",
    "inspect": "continuity",
    "Tracker": "continuity",
    "Monitor": "monitor",
    "UserError": "errors",
    "register": "models.hf",
}

__all__ = [*_EXPORTS, "__version__"]
__getattr__, __dir__ = lazy(__name__, _EXPORTS)
