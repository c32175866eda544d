"""The page of a run: its curves, and what its weights tell across depth; once, or again and again while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gnomon import continuity, report
from gnomon.continuity.inspect_page import fill
from gnomon.errors import UserError
from gnomon.run_folder import METRICS, RECIPE, SETTINGS, checkpoint_folders


def report_of(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run: its curves, and the continuity of its newest checkpoint across depth.

    Args:
        out: the HTML file; `report.html` in the run's folder if not given.

    Raises:
        UserError: no run with a record; the extra `report` is not installed.
    """
    folder = Path(folder)
    page = report.run_page(report.read_runs([folder]))
    if checkpoint_folders(folder):
        page.section("Continuity of the weights across depth")
        fill(page, continuity.inspect(folder))
    return page.write(out or folder / "report.html", figures=False)


def watch(
    folder: str | Path,
    out: str | Path | None = None,
    *,
    seconds: float = 10,
    tell: Callable[[str], object] = lambda line: None,
) -> Path:
    """Write the curves of a run anew whenever it has recorded something, until it ends; then all of `report_of`. The run of another
    trainer (`gnomon.integrations`) does not tell when it ends, and is followed until this is stopped.

    A browser that has the page open loads it again every `seconds`; what was chosen on the page is kept.

    Raises:
        UserError: no run folder; the extra `report` is not installed.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in (RECIPE, SETTINGS)):
        raise UserError(f"no run folder at {folder}: it has no {RECIPE}. Start the run first: gnomon train --out {folder}")
    path, before = Path(out or folder / "report.html"), None
    while True:
        size = (folder / METRICS).stat().st_size if (folder / METRICS).is_file() else 0
        # Before the first step, and while a line is being written, there is nothing new to read.
        if size and size != before:
            (run,) = report.read_runs([folder])
            state = report.summary(run)["state"]
            if not state.startswith("at step"):
                return report_of(folder, path)
            page = report.run_page([run])
            page.subtitle, page.refresh = f"{state}; this page loads itself anew every {seconds:g} seconds", max(1, round(seconds))
            page.write(path, figures=False)
            if before is None:
                tell(f"wrote {path}, and writes it again until the run ends (Ctrl-C stops this, not the run)")
            before = size
        time.sleep(seconds)
