"""What is trained: one decoder-only transformer and one residual MLP.

The settings (`TransformerConfig` and its presets) load without torch; the modules are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.lazy import lazy
from gnomon.models.config import TransformerConfig, gpt2, llama_34m, tiny

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon.models.mlp import MLPConfig as MLPConfig
    from gnomon.models.mlp import ResidualMLP as ResidualMLP
    from gnomon.models.mlp import variant as variant
    from gnomon.models.transformer import Transformer as Transformer

__all__ = ["MLPConfig", "ResidualMLP", "Transformer", "TransformerConfig", "gpt2", "llama_34m", "tiny", "variant"]
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__, {"Transformer": "transformer", "MLPConfig": "mlp", "ResidualMLP": "mlp", "variant": "mlp"}
    )
