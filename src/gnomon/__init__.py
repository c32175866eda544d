"""gnomon: transformers with a geometry you choose and can see.

`import gnomon` is instant; torch is imported when the first name that needs it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.lazy import lazy

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon import anatomy as anatomy
    from gnomon import checkpoints as checkpoints
    from gnomon import compress as compress
    from gnomon import continuity as continuity
    from gnomon import data as data
    from gnomon import diagnosis as diagnosis
    from gnomon import evaluation as evaluation
    from gnomon import geometry as geometry
    from gnomon import integrations as integrations
    from gnomon import models as models
    from gnomon import monitor as monitor
    from gnomon import optim as optim
    from gnomon import report as report
    from gnomon import residual as residual
    from gnomon import running as running
    from gnomon import studies as studies
    from gnomon import train as train
    from gnomon.continuity.inspector import inspect as inspect
    from gnomon.continuity.tracker import Tracker as Tracker
    from gnomon.errors import UserError as UserError
    from gnomon.geometry.manifolds import (
        DGram as DGram,
    )
    from gnomon.geometry.manifolds import (
        Euclidean as Euclidean,
    )
    from gnomon.geometry.manifolds import (
        Oblique as Oblique,
    )
    from gnomon.geometry.manifolds import (
        SpectralBall as SpectralBall,
    )
    from gnomon.geometry.manifolds import (
        SpectralSphere as SpectralSphere,
    )
    from gnomon.geometry.manifolds import (
        Sphere as Sphere,
    )
    from gnomon.geometry.manifolds import (
        Stiefel as Stiefel,
    )
    from gnomon.models.hf import register as register
    from gnomon.monitor.monitoring import Monitor as Monitor
    from gnomon.optim import ManifoldMuon as ManifoldMuon
    from gnomon.optim import Rule as Rule
    from gnomon.optim import assign as assign

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

if not TYPE_CHECKING:
    __all__ = [*_EXPORTS, "__version__"]
    __getattr__, __dir__ = lazy(__name__, _EXPORTS)
