"""What is trained: one decoder-only transformer and one residual MLP.

The settings (`TransformerConfig` and its presets) load without torch; the modules are imported when first used.
"""

from __future__ import annotations

from typing import Any

from gnomon.models.config import TransformerConfig, gpt2, llama_34m, tiny

__all__ = ["MLPConfig", "ResidualMLP", "Transformer", "TransformerConfig", "gpt2", "llama_34m", "tiny", "variant"]


def __getattr__(name: str) -> Any:
    if name == "Transformer":
        from gnomon.models.transformer import Transformer

        return Transformer
    if name in ("MLPConfig", "ResidualMLP", "variant"):
        from gnomon.models import mlp

        return getattr(mlp, name)
    raise AttributeError(f"module 'gnomon.models' has no attribute {name!r}")
