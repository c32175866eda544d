"""The page of a study that is under way, or ran elsewhere, from its outcomes; nothing is run:

    python -m gnomon.studies.page_of_outcomes map docs/results/outcomes/map-tiny.jsonl --data runs/data/eltec --out runs/map-page
"""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from gnomon import studies
from gnomon.command import end
from gnomon.files import check_readable
from gnomon.studies import runner, study_page
from gnomon.studies.results import Results


def main(name: Positional[str], outcomes: Positional[Path], /, out: Path, scale: str = "tiny", data: str | None = None) -> None:
    """Write `report.html`, its figures, `results.csv` and `results.md` of a study from its outcomes.

    Args:
        name: of the study.
        outcomes: its file.
        out: folder of the page.
        scale: as the study was given it.
        data: as the study was given it.
    """
    check_readable(outcomes)
    study = studies.load(name, scale, data=data)
    results = Results(study, runner.known(study, out, outcomes))
    print(f"wrote {study_page.write(results, out)}, results.csv and results.md")


if __name__ == "__main__":
    end(main, "gnomon.studies.page_of_outcomes")
