"""The evidence that comes with the package, from the outcomes of `gnomon study map`:

    python -m gnomon.studies.map_evidence docs/results/outcomes/map-tiny.jsonl --data runs/data/eltec --text "English novels, bytes"

Rows of that text are made anew, those of others stay. Outcomes are known by their recipes, which name the data, so `--data` must read
as it did for the study; the tokens need not be there.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from gnomon import residual, studies
from gnomon.studies.map_study import CONTESTANTS, MODERNISED, SPACE, modern
from gnomon.studies.outcomes import OutcomesFile
from gnomon.studies.results import Results
from gnomon.studies.standing import settle
from gnomon.studies.study import Study, Variant
from gnomon.train import evidence
from gnomon.train.asking import optimizer_name
from gnomon.train.evidence import Row

KEPT = ("optim.lr", *(path for path in SPACE if path != "schedule.warmup"))
"""Settings that a row tells; warm-up is told as a share."""

LEAST = 3
"""Compared seeds below which a point is no evidence."""


def rows(results: Results, text: str) -> list[Row]:
    """Every contestant of the map at every point where it was compared with its baseline on enough seeds."""
    named = {name: "plain" for name in CONTESTANTS} | {modern(name): "modern" for name in MODERNISED}
    found = []
    for variant in results.study.variants:
        contestant = variant.like or variant.name
        known = contestant in named and "anchor" not in variant.group
        if known and len(results.compared(variant.name)) >= LEAST:
            found.append(_row(results, variant, contestant.removesuffix(modern("")), named[contestant], text))
    return [row for row in found if row is not None]


def _row(results: Results, variant: Variant, contestant: str, block: str, text: str) -> Row | None:
    """None where the baseline of the point is not measured yet."""
    recipe = results.settled(variant.name)
    verdict = results.row(variant.name)
    if variant.baseline is not None and verdict["verdict"] == "not comparable":
        return None
    kind, options = recipe.model.residual, dict(recipe.model.residual_options)
    if (kind, options) == ("proj-spheret", residual.BOUNDED):
        kind, options = "bounded-sphere", {}
    unread = recipe.optim.unread()
    tuned: dict[str, Any] = {"model.head_bias": True} if recipe.model.head_bias else {}
    tuned |= {path: getattr(recipe.optim, path.removeprefix("optim.")) for path in KEPT if path.removeprefix("optim.") not in unread}
    difference, low, high = (_rounded(verdict[key]) for key in ("difference", "low", "high"))
    return Row(
        contestant=contestant, axis={"modern": "centre", "modern depth": "depth"}.get(variant.group, variant.group), block=block,
        text=text, layers=recipe.model.layers, width=recipe.model.width, steps=recipe.steps, tokens=recipe.tokens_per_step,
        residual=kind, residual_options=options, assignment=optimizer_name(recipe),
        settings={path: value for path, value in tuned.items() if value is not None},
        warmup=float(f"{recipe.schedule.warmup / recipe.steps:.2g}"),
        factor=variant.rates[0] if variant.group == "rate" else 1.0,
        seeds=verdict["seeds"], diverged=verdict["diverged"], mean=round(verdict["mean"], 5),
        difference=difference, low=low, high=high, word=verdict["verdict"],
    )  # fmt: skip


def _rounded(value: Any) -> float | None:
    return None if value is None else round(value, 5)


def from_outcomes(path: Path, data: str | None, text: str, scale: str = "tiny") -> list[Row]:
    """The rows of one file of outcomes.

    Raises:
        UserError: a line of the file is no outcome.
    """
    study: Study = studies.load("map", scale, data=data)
    file = OutcomesFile(path)
    return rows(Results(study, settle(study, lambda run: file.outcome(run, Path()))), text)


def main(argv: list[str] | None = None) -> None:
    """Make the table."""
    told = argparse.ArgumentParser(prog="python -m gnomon.studies.map_evidence", description="Make the table of `gnomon advise`.")
    told.add_argument("outcomes", type=Path)
    told.add_argument("--data", help="as the study was given it")
    told.add_argument("--text", required=True, help="the text in words")
    told.add_argument("--out", type=Path, default=evidence.FILE)
    given = told.parse_args(argv)
    made = from_outcomes(given.outcomes, given.data, given.text)
    others = [row for row in evidence.load(given.out) if row.text != given.text] if given.out.exists() else []
    spelled = shlex.join(["python", "-m", "gnomon.studies.map_evidence", *(sys.argv[1:] if argv is None else argv)])
    evidence.save((*others, *made), spelled, given.out)
    print(f"wrote {given.out}: {len(made)} rows of {given.text}, {len(others)} of other texts")


if __name__ == "__main__":
    main()
