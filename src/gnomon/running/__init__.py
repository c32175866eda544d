"""Any checkpoint on text, one block in memory at a time. Torch and transformers are imported when the first name is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.lazy import lazy

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon.running.block_worth import loss_of as loss_of
    from gnomon.running.block_worth import losses_without as losses_without
    from gnomon.running.on_text import OnText as OnText
    from gnomon.running.on_text import Prepared as Prepared
    from gnomon.running.on_text import prepare as prepare
    from gnomon.running.streamed import Streamed as Streamed
    from gnomon.running.streamed import open_streamed as open_streamed
    from gnomon.running.token_rows import Rows as Rows
    from gnomon.running.token_rows import read_rows as read_rows
    from gnomon.running.with_weights import WithWeights as WithWeights

_EXPORTS = {
    "open_streamed": "streamed", "Streamed": "streamed",
    "prepare": "on_text", "OnText": "on_text", "Prepared": "on_text",
    "loss_of": "block_worth", "losses_without": "block_worth",
    "WithWeights": "with_weights",
    "read_rows": "token_rows", "Rows": "token_rows",
}  # fmt: skip

if not TYPE_CHECKING:
    __all__ = list(_EXPORTS)
    __getattr__, __dir__ = lazy(__name__, _EXPORTS)
