"""The evidence that comes with the package, from the outcomes of `gnomon study map`:

    python -m gnomon.studies.map_evidence docs/results/outcomes/map-tiny.jsonl --data runs/data/eltec --text "English novels, bytes"

Rows of that text are made anew, those of others stay. Outcomes are known by their recipes, which name the data, so `--data` must read
as it did for the study; the tokens need not be there.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from gnomon import studies
from gnomon.command import end
from gnomon.errors import UserError
from gnomon.files import check_readable
from gnomon.studies.outcomes import OutcomesFile
from gnomon.studies.results import Results
from gnomon.studies.standing import settle
from gnomon.studies.study import Study, Variant
from gnomon.train import evidence
from gnomon.train.asking import optimizer_name
from gnomon.train.evidence import Row

LEAST = 3
"""Compared seeds below which a point is no evidence."""

AXES = ("centre", "depth", "width", "steps", "tokens", "rate")


def rows(results: Results, text: str) -> list[Row]:
    """Every contestant at every point where it was compared with its baseline on enough seeds that both have."""
    made = (_row(results, variant, text) for variant in results.study.variants if results.compared(variant.name))
    return [row for row in made if row is not None]


def place(variant: Variant) -> tuple[str, str, str]:
    """Contestant, block and axis; the axis is "" for a variant that is no point of the map."""
    block = "modern" if variant.group.startswith("modern") else "plain"
    axis = variant.group.removeprefix("modern").strip() or "centre"
    return (variant.like or variant.name).removesuffix(", modern"), block, axis if axis in AXES else ""


def _row(results: Results, variant: Variant, text: str) -> Row | None:
    """None for what is no point of the map, and where too little is measured."""
    contestant, block, axis = place(variant)
    against = None if variant.baseline is None else results.against(variant.name, variant.baseline)
    seeds = len(results.compared(variant.name)) if against is None else against.pairs
    if not axis or seeds < LEAST:
        return None
    verdict = results.row(variant.name)
    recipe, tuned = results.settled(variant.name), _tuned(results.study, variant)
    difference, low, high = (_rounded(verdict[key]) for key in ("difference", "low", "high"))
    kind, options = _short(recipe.model.residual, dict(recipe.model.residual_options))
    values = {path: getattr(recipe.optim, path.removeprefix("optim.")) for path in tuned if path.startswith("optim.")}
    return Row(
        contestant=contestant, axis=axis, block=block, text=text, layers=recipe.model.layers, width=recipe.model.width,
        steps=recipe.steps, tokens=recipe.tokens_per_step, residual=kind, residual_options=options,
        assignment=optimizer_name(recipe),
        settings={path: value for path, value in values.items() if value is not None} | {"model.head_bias": recipe.model.head_bias},
        warmup=float(f"{recipe.schedule.warmup / recipe.steps:.2g}"), factor=variant.rates[0] if axis == "rate" else 1.0,
        seeds=seeds, diverged=verdict["diverged"], mean=round(verdict["mean"], 5),
        difference=difference, low=low, high=high, word=verdict["verdict"],
    )  # fmt: skip


def _tuned(study: Study, variant: Variant) -> Iterable[str]:
    """Paths that the search of the contestant moves."""
    return next(one.space or () for one in study.variants if one.name == (variant.like or variant.name))


def _short(kind: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A residual by its shortest name."""
    from gnomon.residual import BOUNDED

    return ("bounded-sphere", {}) if (kind, options) == ("proj-spheret", BOUNDED) else (kind, options)


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


def main(outcomes: Positional[Path], /, text: str, data: str | None = None, out: Path = evidence.FILE) -> None:
    """Make the table of `gnomon advise` from the outcomes of `gnomon study map`.

    Args:
        outcomes: the study's file.
        text: the text in words.
        data: as the study was given it.
        out: the table.
    """
    check_readable(outcomes)
    made = from_outcomes(outcomes, data, text)
    if not made:
        raise UserError(
            f"{outcomes} has no contestant that was compared on {LEAST} seeds. Outcomes are known by their recipes: "
            f"is --data what the study was given? (got {data})"
        )
    others = [row for row in evidence.load(out) if row.text != text] if out.exists() else []
    commands = evidence.made_by(out) if out.exists() else {}
    told = ["python", "-m", "gnomon.studies.map_evidence", str(outcomes), *(["--data", data] if data else []), "--text", text]
    evidence.save((*others, *made), commands | {text: shlex.join(told)}, out)
    print(f"wrote {out}: {len(made)} rows of {text}, {len(others)} of other texts")


if __name__ == "__main__":
    end(main, "gnomon.studies.map_evidence")
