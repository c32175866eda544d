"""The page of a finished run: its curves, and what its weights tell across depth."""

from __future__ import annotations

from pathlib import Path

from gnomon import continuity, report
from gnomon.continuity.inspect_page import fill


def report_of(folder: str | Path) -> Path:
    """Write `report.html` of a finished run: its curves, and the continuity of its weights across depth."""
    folder = Path(folder)
    page = report.run_page(report.read_runs([folder]))
    page.section("Continuity of the weights across depth")
    fill(page, continuity.inspect(folder))
    return page.write(folder / "report.html", figures=False)
