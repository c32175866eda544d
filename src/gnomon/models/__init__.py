"""What is trained: one decoder-only transformer and one residual MLP.

The settings (`TransformerConfig` and its presets) load without torch; the modules are imported when first used.
"""

from __future__ import annotations

from gnomon.lazy import lazy
from gnomon.models.config import TransformerConfig, gpt2, llama_34m, tiny

__all__ = ["MLPConfig", "ResidualMLP", "Transformer", "TransformerConfig", "gpt2", "llama_34m", "tiny", "variant"]
__getattr__, __dir__ = lazy(
    __name__, {"Transformer": "transformer", "MLPConfig": "mlp", "ResidualMLP": "mlp", "variant": "mlp"}
)
