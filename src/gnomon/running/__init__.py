"""Any checkpoint on text, one block in memory at a time. Torch and transformers are imported when the first name is used."""

from __future__ import annotations

from gnomon.lazy import lazy

_EXPORTS = {
    "open_streamed": "streamed", "Streamed": "streamed",
    "prepare": "on_text", "OnText": "on_text", "Prepared": "on_text",
    "loss_of": "block_worth", "losses_without": "block_worth",
    "WithWeights": "with_weights",
    "read_rows": "token_rows", "Rows": "token_rows",
}  # fmt: skip

__all__ = list(_EXPORTS)
__getattr__, __dir__ = lazy(__name__, _EXPORTS)
