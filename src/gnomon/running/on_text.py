"""A model on a text: hidden states and attention of every block, and what the blocks are worth.

The measures are those of `gnomon.Monitor`, named in `gnomon.series`; a model of any size is run from disk (`Streamed`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from gnomon.errors import UserError
from gnomon.monitor import Monitor
from gnomon.progress import Progress
from gnomon.running.block_worth import loss_of, losses_without
from gnomon.running.streamed import Block, Streamed, Visit, open_streamed
from gnomon.running.text_estimate import Estimate, estimate
from gnomon.running.token_rows import Rows, read_rows
from gnomon.series import split_place

# A prime, so that evenly spaced tokens do not all stand at the beginning of their rows.
SAMPLE = 1021
ROWS = 1024


@dataclass(frozen=True)
class OnText:
    """What was seen.

    Attributes:
        model: as it was given.
        settings: text, tokenizer, rows, length of a row, tokens, and how long it took.
        record: series -> place -> number, or a list by head: as `gnomon.Monitor` writes it.
        loss: mean cross-entropy in nats a token; None for a model that does not predict the next token.
        without: the loss without each block, in their order; empty unless asked for.
    """

    model: str
    settings: dict[str, Any]
    record: dict[str, dict[str, Any]]
    loss: float | None = None
    without: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self)

    def by_sublayer(self) -> list[dict[str, Any]]:
        """One row for each place that states pass, in the model's order: stack, layer, sublayer, and what was measured there."""
        rows: dict[str, dict[str, Any]] = {}
        for key, series in self.record.items():
            for place, value in series.items():
                if not isinstance(value, list):
                    stack, layer, name = split_place(place)
                    rows.setdefault(place, {"stack": stack, "layer": layer, "sublayer": name})[key] = value
        return list(rows.values())

    def by_head(self) -> list[dict[str, Any]]:
        """One row for each head of each attention."""
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for key, series in self.record.items():
            for place, value in series.items():
                for head, number in enumerate(value if isinstance(value, list) else ()):
                    stack, layer, name = split_place(place)
                    at = {"stack": stack, "layer": layer, "sublayer": name, "head": head}
                    rows.setdefault((place, head), at)[key] = number
        return list(rows.values())

    def worth(self) -> list[dict[str, Any]]:
        """One row for each block: layer, the loss without it, and by how much that is higher."""
        assert self.loss is not None or not self.without
        return [
            {"layer": layer, "loss_without": loss, "worth": loss - (self.loss or 0.0)}
            for layer, loss in enumerate(self.without)
        ]


class Seen(NamedTuple):
    """The record of a pass, and the stream after the last block, (B, T, D)."""

    record: dict[str, dict[str, Any]]
    last: Tensor


@dataclass(frozen=True)
class Prepared:
    """A model and the rows it is to read; nothing has been run yet."""

    streamed: Streamed
    rows: Rows
    removal: bool
    expected: Estimate

    def run(self, progress: bool = False) -> OnText:
        """Run the model and look at it."""
        started = time.monotonic()
        record, last = self.look(progress=progress)
        loss, without = None, []
        if self.removal:
            loss, without = self._remove(progress)
        elif self.streamed.predicts:
            loss = loss_of(self.streamed, self.rows, last)
        rows, length = self.rows.tokens_BT.shape
        settings = {
            "text": self.rows.text,
            "tokenizer": self.rows.tokenizer,
            "tokens": rows * length,
            "rows": rows,
            "length": length,
            "seconds": round(time.monotonic() - started, 1),
        }
        return OnText(self.streamed.checkpoint.name, settings, record, loss, without)

    def look(self, visit: Visit | None = None, progress: bool = False) -> Seen:
        """States and attention, with `visit` in the place of each block where it is given (`Streamed.run`)."""
        streamed, last = self.streamed, []
        monitor = Monitor(streamed.model, every=0, since_start=False, sample=SAMPLE, rows=ROWS)
        with Progress("states", len(streamed.blocks), "blocks") as bar:

            def watched(index: int, h_BTD: Tensor, block: Block) -> Tensor:
                last[:] = [visit(index, h_BTD, block) if visit else block(h_BTD)]
                if progress:
                    bar.advance(1)
                return last[0]

            with streamed.visited(watched):
                record = monitor.look(
                    {"input_ids": self.rows.tokens_BT, **streamed.without_cache, **streamed.without_logits}
                )
        return Seen(record, last[0])

    def _remove(self, progress: bool) -> tuple[float, list[float]]:
        """With the work of a block growing by its number, progress is told by work."""
        count = len(self.streamed.blocks)
        work = self.expected
        with Progress("removal", work.removal_flops, "FLOP") as bar:

            def tell(index: int) -> None:
                if progress:
                    bar.advance(work.block_flops * (index + 1) if index < count else work.head_flops)

            whole, without = losses_without(self.streamed, self.rows, tell=tell)
        return whole, list(without.values())


def prepare(
    source: Any,
    text: str | Path,
    tokens: int = 4096,
    *,
    length: int | None = None,
    removal: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Prepared:
    """Open a model and a text for it, and say what running it will take.

    Args:
        source: what `gnomon.checkpoints.open_checkpoint` takes.
        text: a text, read by the model's own tokenizer; or a token file.
        tokens: how many at most.
        length: tokens of a row; None for the model's context, at most 1,024.
        removal: also the loss without each block.
        config: used instead of config.json.

    Raises:
        UserError: transformers cannot run the model, the text is too short, or its tokens are not the model's.
    """
    streamed = open_streamed(source, config)
    if removal and not streamed.predicts:
        raise UserError(
            f"{type(streamed.model).__name__} does not predict a next token, so there is no loss to compare. Leave out --removal."
        )
    rows = read_rows(streamed, text, tokens, length)
    return Prepared(streamed, rows, removal, estimate(streamed, *rows.tokens_BT.shape, removal=removal))
