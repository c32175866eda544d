"""`gnomon study compression`: what each way to make a model smaller costs, and what tells beforehand.

    gnomon study compression --data CALIBRATION --set model=FOLDER texts=A.txt,B.txt [name=… keep=0.8,0.6 length=512 …]

A trained model is the given thing here, not what is trained; so the study has cells and not runs. A cell is one smaller model, fitted on
one sample of the calibration text (sample i is its i-th stretch), whose loss is measured on every evaluation text. Parts beside the
methods: "roles", one role at a time that shares an input basis, an output basis or none; "pairs", each pair of neighbours that shares,
with what predicts its cost; "blocks", each block left out, with what predicts that. All goes to one file as it is measured, and what is
on file is not measured again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnomon.errors import UserError
from gnomon.files import append_line, spelled
from gnomon.progress import tell
from gnomon.studies.compression_cells import Cell, Setup, cells


def left(setup: Setup, file: Path) -> list[dict[str, Any]]:
    """The cells that are not on file."""
    there = {cell_of(line) for line in lines(file, setup)}
    return [cell._asdict() for cell in cells(setup) if cell not in there]


def run(setup: Setup, file: Path) -> list[dict[str, Any]]:
    """Measure what is not on file; all lines of this study.

    Raises:
        UserError: the model cannot be run, or a text is too short for the samples.
    """
    missing = [Cell(**cell) for cell in left(setup, file)]
    if missing:
        from gnomon.studies.compression_bench import Bench

        bench = Bench(setup)
        for number, cell in enumerate(missing, 1):
            began = time.process_time()
            found = bench.measure(cell)
            line = setup.same | cell._asdict() | found | {"seconds": round(time.process_time() - began, 1)}
            append_line(file, json.dumps(spelled(line), allow_nan=False))
            tell(f"{number} of {len(missing)}: {cell.method}, keep {cell.keep:g}, sample {cell.sample} {found.get('losses', '')}")
    return lines(file, setup)


def lines(file: Path, setup: Setup | None = None) -> list[dict[str, Any]]:
    """The lines of a file; those of a study only. A last line cut short by a kill is left out.

    Raises:
        UserError: another line is none of this study's.
    """
    found = []
    text = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for number, line in enumerate(text, 1):
        try:
            record = json.loads(line)
            cell_of(record)
            found.append(record)
        except (ValueError, KeyError, TypeError) as error:
            if number < len(text):
                raise UserError(f"{file}, line {number}, is no cell of the study of compression ({error!r}); remove that line") from error
    return [record for record in found if setup is None or all(record.get(key) == value for key, value in setup.same.items())]


def cell_of(line: Mapping[str, Any]) -> Cell:
    """What a line is about."""
    return Cell(line["method"], line["keep"], line["sample"])
