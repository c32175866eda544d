"""The tables of docs/results/compression.md, made from the outcomes beside it alone:

    python -m gnomon.studies.compression_page docs/results/outcomes/compression.jsonl
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tyro.conf import Positional

from gnomon import report
from gnomon.command import end
from gnomon.files import check_readable
from gnomon.studies import compression_verdict as verdict
from gnomon.studies.compression_study import lines

UNITS = (
    "Columns: the share of the block weights that stays. Losses in nats, of the whole model as they are, of others above it. With ±: the "
    "mean and half its 95 % t-interval over so many (n) calibration samples and models; without: a single one. A loss of x is a perplexity "
    "of e to the x: +0.1 is 10.5 % more. Bytes count 2 for a weight that is not rounded."
)


def text(found: Sequence[verdict.Line]) -> str:
    """For each family of models what methods cost, then what the claims come to; Markdown."""
    parts = [UNITS]
    for name in verdict.families(found):
        own = [line for line in found if verdict.family(line) == name]
        models = ", ".join(dict.fromkeys(line["model"] for line in own))
        parts += [f"## {name}", f"Models: {models}. {_settings(own)}."]
        for title, rows in verdict.tables(own, name).items():
            parts += [f"### {title}", report.markdown(rows).rstrip()]
        if claims := verdict.claims(own):
            shown = [{key: value for key, value in claim.items() if key != "model"} for claim in claims]
            parts += [f"### Claims, {name}", report.markdown(shown).rstrip()]
    if pooled := [claim for claim in verdict.claims(found) if claim["model"] == verdict.ALL]:
        shown = [{key: value for key, value in claim.items() if key != "model"} for claim in pooled]
        parts += ["## All models measured alike: the axis rule", report.markdown(shown).rstrip()]
    return "\n\n".join(parts) + "\n"


def _settings(own: Sequence[verdict.Line]) -> str:
    """Of the tables, and of the parts where those differ."""
    said = {}
    for line in [line for line in own if line["method"] != "whole"]:
        fitted = "each block fitted to what the smaller ones before it give" if line["sequential"] else "fitted to the whole model's inputs"
        texts = f"{line['tokens']:,} tokens of each text in rows of {line['length']}, {line['calibration']:,} of calibration, {fitted}"
        said.setdefault(texts, "methods" if "losses" in line else "parts")
    items = sorted({line["lambada"]["items"] for line in own if "lambada" in line})
    passages = [
        f"LAMBADA: its first {count} passages, of which the standard error of a share is up to {50 / math.sqrt(count):.1f} points"
        for count in items
    ]
    return "; ".join([f"{what}: {texts}" for texts, what in said.items()] + passages)


def main(outcomes: Positional[Path], /) -> None:
    """Print the tables of `gnomon study compression` as Markdown.

    Args:
        outcomes: the study's file.
    """
    check_readable(outcomes)
    print(text(lines(outcomes)))


if __name__ == "__main__":
    end(main, "gnomon.studies.compression_page")
