"""The report of `inspect`: what was measured, and the ways to show it."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon import report as drawing
from gnomon.continuity import inspect_page, sidebyside
from gnomon.continuity.advice import remarks
from gnomon.continuity.measurements import Measurements
from gnomon.continuity.summary import columns_and_formats
from gnomon.errors import UserError, printable
from gnomon.files import spelled, write_json

_IN_JSON = "model family settings summary rows flags matrices serial heads sharing".split()


@dataclass(frozen=True)
class Report(Measurements):
    """`Measurements` (see there for the fields) that can be printed, drawn and written to files."""

    other: Report | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything but vectors, ready for JSON: a gap over nothing reads "inf"."""
        found = {key: getattr(self, key) for key in _IN_JSON}
        found["heat"] = [
            {"stack": heat.stack, "role": heat.role, "layers": list(heat.layers)}
            | {
                key: None if map is None else [[round(x, 6) for x in line] for line in map.tolist()]
                for key, map in (("v1", heat.v1), ("u1", heat.u1))
            }
            for heat in self.heats
        ]
        if self.other:
            found["compared_with"] = self.other.to_dict()
            found["comparison"] = sidebyside.summary(self, self.other)
            found["turned"] = sidebyside.turned(self, self.other)
        return spelled(found)

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_dict()`, atomically."""
        write_json(path, self.to_dict())
        return Path(path)

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the rows as CSV, one line per pair."""
        drawing.csv(path, self.rows)
        return Path(path)

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame, one line per pair.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError(f"a DataFrame needs pandas ({error}). Install it: pip install pandas") from None
        return pandas.DataFrame(self.rows)

    def to_html(self, path: str | os.PathLike[str], figures: bool = False) -> Path:
        """Write one self-contained page; with `figures` also PNG, SVG and CSV of each chart beside it.

        Raises:
            UserError: the extra `report` is not installed.
        """
        return inspect_page.page(self).write(path, figures=figures)

    def table(self) -> str:
        """The summary as text: one line per role, bars against the null level, then what to watch for."""
        from rich.console import Console

        console = Console(file=(text := io.StringIO()), width=10_000)
        self.show(console)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def show(self, console: Any = None) -> None:
        """Print the table, in colour on a terminal."""
        from rich.console import Console

        console = console or Console()
        folded = "folded in" if self.settings["fold_norms"] else "not folded (raw)"

        def say(line: str) -> None:
            console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

        how = f"{self.settings['tier']}, norms {folded}, lag {self.settings['lag']}"
        say(f"{self.model}  ·  {self.family}  ·  {how}")
        if self.summary:
            columns, formats = columns_and_formats(self.summary)
            drawing.show(self.summary, columns, formats=formats, console=console)
            say("│ marks the null level: what unrelated directions of the same dimension give")
        if self.other:
            lines = sidebyside.summary(self, self.other)
            title, formats = f"against {self.other.model}", sidebyside.FORMATS
            drawing.show(lines, sidebyside.COLUMNS, title=title, formats=formats, console=console)
        for line in remarks(self.flags):
            say(line)
