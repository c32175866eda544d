"""What was measured of residuals and optimizers, as one small table that comes with the package (`evidence.json`).

`python -m gnomon.studies.map_evidence` makes it from the outcomes of `gnomon study map`; `gnomon.train.recommend` reads it. A row is
one contestant at one point: the centre, or a point at which one axis was moved. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon.files import read_json, restored, write_json

FILE = Path(__file__).with_name("evidence.json")


@dataclass(frozen=True)
class Row:
    """Runs of one contestant at one point.

    Args:
        contestant: its name at the centre.
        axis: "centre", "depth", "width", "steps", "tokens" or "rate": what was moved from the centre.
        block: "plain" or "modern" (`gnomon.models.config.MODERN`).
        text: what was read, in words.
        layers, width, steps: of the runs.
        tokens: a step.
        residual, residual_options, assignment: as `gnomon.train.preset` and `TransformerConfig` take them.
        settings: tuned values of the recipe by dotted path; `optim.lr` as tuned at this point.
        warmup: share of the steps.
        factor: times the tuned rate, on the axis "rate".
        seeds, diverged: runs compared, and how many of them diverged.
        mean: final validation loss, nats a token.
        difference, low, high: to the baseline of the same point, and the 95 % t interval; None for the baseline.
        word: the study's verdict.
    """

    contestant: str
    axis: str
    block: str
    text: str
    layers: int
    width: int
    steps: int
    tokens: int
    residual: str
    residual_options: Mapping[str, Any]
    assignment: str
    settings: Mapping[str, Any]
    warmup: float
    factor: float
    seeds: int
    diverged: int
    mean: float
    difference: float | None
    low: float | None
    high: float | None
    word: str

    @property
    def place(self) -> tuple[int, int, int, int]:
        return self.layers, self.width, self.steps, self.tokens

    @property
    def pair(self) -> tuple[str, Mapping[str, Any], str]:
        return self.residual, self.residual_options, self.assignment


def load(path: Path = FILE) -> tuple[Row, ...]:
    """The rows; none where the table is empty.

    Raises:
        UserError: no such file, or not JSON.
    """
    return tuple(Row(**restored(row)) for row in read_json(path)["rows"])


def made_by(path: Path = FILE) -> dict[str, str]:
    """Text -> the command that made its rows.

    Raises:
        UserError: no such file, or not JSON.
    """
    return dict(read_json(path)["made_by"])


def save(rows: tuple[Row, ...], commands: Mapping[str, str], path: Path = FILE) -> None:
    """Write the table, in an order that does not depend on when a row was measured; `commands`: text -> what made its rows."""
    order = sorted(rows, key=lambda row: (row.text, row.block, row.axis, *row.place, row.factor, row.contestant))
    write_json(path, {"made_by": dict(sorted(commands.items())), "rows": [dataclasses.asdict(row) for row in order]})
