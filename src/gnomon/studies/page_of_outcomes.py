"""The page of a study that is under way, or ran elsewhere, from its outcomes; nothing is run:

    python -m gnomon.studies.page_of_outcomes map docs/results/outcomes/map-tiny.jsonl --data runs/data/eltec --out runs/map-page
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gnomon import studies
from gnomon.studies import runner, study_page
from gnomon.studies.results import Results


def main(argv: list[str] | None = None) -> None:
    """Write `report.html`, its figures, `results.csv` and `results.md`."""
    told = argparse.ArgumentParser(prog="python -m gnomon.studies.page_of_outcomes", description="A study's page from its outcomes.")
    told.add_argument("name", help="of the study")
    told.add_argument("outcomes", type=Path)
    told.add_argument("--out", type=Path, required=True, help="folder of the page")
    told.add_argument("--scale", default="tiny")
    told.add_argument("--data", help="as the study was given it")
    given = told.parse_args(argv)
    study = studies.load(given.name, given.scale, data=given.data)
    results = Results(study, runner.known(study, given.out, given.outcomes))
    print(f"wrote {study_page.write(results, given.out)}, results.csv and results.md")


if __name__ == "__main__":
    main()
