"""The report of `inspect` and what was seen on a text, as one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon.continuity.inspect_page import fill
from gnomon.continuity.report import Report
from gnomon.files import write_json
from gnomon.running import states_page
from gnomon.running.on_text import OnText


@dataclass(frozen=True)
class WithWeights:
    """A `Report` of the weights with the states beside them; it is shown and written the same ways."""

    weights: Report
    seen: OnText

    def show(self, console: Any = None) -> None:
        """Print both."""
        self.weights.show(console)
        states_page.show(self.seen, console)

    def to_dict(self) -> dict[str, Any]:
        """That of the weights, with the text under `on_text`."""
        return self.weights.to_dict() | {"on_text": self.seen.to_dict()}

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_dict()`, atomically."""
        write_json(path, self.to_dict())
        return Path(path)

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the rows of the weights as CSV."""
        return self.weights.to_csv(path)

    def to_html(self, path: str | os.PathLike[str], figures: bool = False) -> Path:
        """Write one self-contained page, the states first.

        Raises:
            UserError: the extra `report` is not installed.
        """
        sheet = states_page.page(self.seen)
        fill(sheet, self.weights)
        return sheet.write(path, figures=figures)
