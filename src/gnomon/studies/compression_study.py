"""`gnomon study compression`: what each way to make a model smaller costs, and what tells beforehand.

    gnomon study compression --data CALIBRATION --set model=FOLDER texts=A.txt,B.txt [name=… keep=0.8,0.6 length=512 …]
        [lambada=FILE.jsonl items=200]

A trained model is the given thing here, not what is trained; so the study has cells and not runs. A cell is one smaller model, fitted on
one sample of the calibration text (sample i is its i-th stretch), whose loss is measured on every evaluation text, and which is asked for
the last words of LAMBADA, where these are given. Parts beside the methods: "roles", one role at a time that shares an input basis, an
output basis or none; "pairs", each pair of neighbours that shares, with what predicts its cost; "blocks", each block left out, with what
predicts that; "whitening", what of each matrix's outputs the whitened and the plain truncated SVD lose at equal rank. All goes to one
file as it is measured, and what is on file is not measured again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnomon.files import append_record, read_records
from gnomon.progress import tell
from gnomon.studies.compression_cells import Cell, Setup, asked, cells
from gnomon.studies.compression_verdict import place


def left(setup: Setup, file: Path) -> list[dict[str, Any]]:
    """The cells that are not on file, and what of them is not ("what")."""
    there = {cell_of(line): line for line in lines(file, setup)}
    found = ((cell, [what for what in asked(setup, cell) if not _has(there.get(cell, {}), what, setup)]) for cell in cells(setup))
    return [cell._asdict() | {"what": what} for cell, what in found if what]


def _has(line: Mapping[str, Any], what: str, setup: Setup) -> bool:
    if what == "losses":
        return setup.named_texts.keys() <= line.get(what, {}).keys()
    return what in line and (what != "lambada" or line[what]["items"] == setup.items)


def run(setup: Setup, file: Path) -> list[dict[str, Any]]:
    """Measure what is not on file; all lines of this study.

    Raises:
        UserError: the model cannot be run, or a text is too short for the samples.
    """
    if missing := left(setup, file):
        from gnomon.studies.compression_bench import Bench

        bench = Bench(setup)
        for number, row in enumerate(missing, 1):
            what, began = row.pop("what"), time.process_time()
            cell = Cell(**row)
            found = bench.measure(cell, what)
            line = setup.same | cell._asdict() | found | {"seconds": round(time.process_time() - began, 1)}
            append_record(file, line)
            shown = " ".join(str(found[one]) for one in ("losses", "lambada") if one in found)
            tell(f"{number} of {len(missing)}: {cell.method}, keep {cell.keep:g}, sample {cell.sample} {shown}")
    return lines(file, setup)


def lines(file: Path, setup: Setup | None = None) -> list[dict[str, Any]]:
    """One record for each cell of a file, of a study only; a later line adds to an earlier one of the same cell, or takes the place of what
    it says. A last line cut short by a kill is left out.

    Raises:
        UserError: another line is none of this study's.
    """
    found: dict[Any, dict[str, Any]] = {}
    for key, record in read_records(file, "cell of the study of compression", lambda record: ((place(record), cell_of(record)), record)):
        found[key] = found.get(key, {}) | record
    return [record for record in found.values() if setup is None or all(record.get(key) == value for key, value in setup.same.items())]


def cell_of(line: Mapping[str, Any]) -> Cell:
    """What a line is about."""
    return Cell(line["method"], line["keep"], line["sample"])
