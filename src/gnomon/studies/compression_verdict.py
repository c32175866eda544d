"""What the lines of `gnomon study compression` say: tables and claims, pure functions of numbers.

Losses are compared as differences, in nats a token, from the whole model or between two methods on the same calibration sample of the
same model; their intervals are Student's t over samples, and over models whose names differ after ", seed". The ratio of two
perplexities is e to the difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gnomon.studies.verdict import LEVEL, Verdict, compare, t_quantile

Line = Mapping[str, Any]
ALL = "all models"
BY_ROLE = {role: "input" for role in ("query", "key", "gate", "up")} | {role: "output" for role in ("output", "down")}
"""The side on which a role should share (arXiv 2605.04971)."""
OTHER = {"input": "output", "output": "input"}
PREDICTORS = {
    "pairs": {"continuity": -1, "tail": 1},
    "blocks": {"continuity": -1, "change": 1, "calibration": 1},
}
"""Part -> what may predict a cost, and the sign it should have."""


class Correlation(NamedTuple):
    """Spearman's rank correlation with a 95 % interval (Fisher's z; Bonett and Wright, Psychometrika 65, 2000)."""

    rho: float
    low: float
    high: float
    count: int


def family(line: Line) -> str:
    """The name of the model without the number of its seed."""
    return str(line["model"]).partition(", seed")[0]


def place(line: Line) -> tuple[Any, ...]:
    """The model, and how it was measured: only lines of one place are compared."""
    return line["model"], *(line.get(key) for key in ("calibration", "tokens", "length", "sequential"))


def families(lines: Sequence[Line]) -> list[str]:
    """In the order of the file."""
    return list(dict.fromkeys(map(family, lines)))


def table(lines: Sequence[Line], name: str) -> list[dict[str, Any]]:
    """A family's methods: what is left, and what it costs on every text against the whole model."""
    own = [line for line in lines if family(line) == name and "losses" in line]
    used = {place(line) for line in own if line["method"] != "whole"}
    whole = {place(line): line for line in own if line["method"] == "whole" and place(line) in (used or {place(line)})}
    texts = list(next(iter(whole.values()))["losses"]) if whole else []
    first = next(iter(whole.values()), None)
    rows = []
    if first is not None:
        rows.append({"method": "whole", "keep": "", "weights": 1.0, "bytes": 1.0, "cells": len(whole)}
                    | {text: f"{statistics.fmean(one['losses'][text] for one in whole.values()):.3f} nats" for text in texts})  # fmt: skip
    for method, keep in dict.fromkeys((line["method"], line["keep"]) for line in own if line["method"] != "whole"):
        cells = [line for line in own if (line["method"], line["keep"]) == (method, keep) and place(line) in whole]
        if not cells:
            continue
        row: dict[str, Any] = {"method": method, "keep": keep, "cells": len(cells)}
        for share in ("weights", "bytes"):
            row[share] = round(statistics.fmean(line[share] / whole[place(line)][share] for line in cells), 3)
        for text in texts:
            row[text] = spelled([line["losses"][text] - whole[place(line)]["losses"][text] for line in cells])
        rows.append(row)
    return sorted(rows, key=lambda row: -row["keep"] if row["keep"] != "" else -2)


def spelled(differences: Sequence[float]) -> str:
    """ "+0.120 ± 0.013": mean and half the 95 % interval; the mean alone of a single one."""
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return f"{mean:+.4f}"
    half = t_quantile(0.95, len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return f"{mean:+.4f} ± {half:.4f}"


def claims(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Every claim about every family that the lines can judge; of several, the axis rule over all models as well."""
    own = {name: [line for line in lines if family(line) == name] for name in families(lines)}
    rows = [{"model": name, **found} for name, some in own.items() for judge in _JUDGES for found in judge(some)]
    return rows + ([{"model": ALL, **found} for found in _roles(lines)] if len(own) > 1 else [])


def spearman(x: Sequence[float], y: Sequence[float]) -> Correlation:
    """Of at least four pairs; NaN where one of the two does not vary."""
    a, b = ranks(x), ranks(y)
    if len(set(a)) < 2 or len(set(b)) < 2 or len(a) < 4:
        return Correlation(math.nan, math.nan, math.nan, len(a))
    rho = statistics.correlation(a, b)
    half = statistics.NormalDist().inv_cdf(1 - LEVEL / 2) * math.sqrt((1 + rho**2 / 2) / (len(a) - 3))
    z = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, rho)))
    return Correlation(rho, math.tanh(z - half), math.tanh(z + half), len(a))


def ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def _roles(lines: Sequence[Line]) -> list[dict[str, str]]:
    """The axis rule, role by role, and that value shares neither way; first text."""
    cells = [line["roles"] for line in lines if "roles" in line]
    pairs: dict[tuple[str, str, str], list[float]] = {}
    for role in cells[0] if cells else ():
        right = BY_ROLE.get(role, "own")
        for wrong in ("own", "input", "output") if role in BY_ROLE else ("input", "output"):
            if wrong != right:
                pairs[role, right, wrong] = [_first(cell[role][right]) - _first(cell[role][wrong]) for cell in cells]
    basis = {"own": "a basis of its own", "input": "a shared input basis", "output": "a shared output basis"}
    said = "{}: {} costs less than {}"
    return [
        _said(said.format(role, basis[one], basis[other]), found) for (role, one, other), found in compare(pairs, noise=0.0).items()
    ]


def _methods(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Methods against the control at the same share, on every text."""
    against = [
        ("shared by role", "private"), ("shared by role", "shared input"), ("shared by role", "shared output"), ("modules", "private"),
        ("modules", "pivoted"), ("shared by role, groups by continuity", "shared by role, groups by random"),
        ("depth by continuity", "depth by random"), ("depth by continuity", "depth by change"), ("depth by change", "modules"),
    ]  # fmt: skip
    losses = {(x["method"], x["keep"], place(x), x["sample"]): x["losses"] for x in lines if "losses" in x}
    pairs: dict[tuple[str, str, float, str], list[float]] = {}
    for (method, keep, where, sample), found in losses.items():
        for one, other in against:
            if method == one and (there := losses.get((other, keep, where, sample))):
                for text in found:
                    pairs.setdefault((one, other, keep, text), []).append(found[text] - there[text])
    return [
        _said(f"{one} costs less than {other}, {keep:g} kept, {text}", found)
        for (one, other, keep, text), found in compare(pairs, noise=0.0).items()
    ]


def _predictions(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Rank correlations within each model's first sample, told one by one and not pooled: layers of one model are not runs."""
    rows = []
    for part, predictors in PREDICTORS.items():
        for line in lines:
            if part not in line or line["sample"]:
                continue
            cost = costs(line)
            for name, sign in predictors.items():
                known = [(a, b) for a, b in zip(line[part][name], cost) if a is not None]
                found = spearman([sign * a for a, _ in known], [b for _, b in known])
                what = "which neighbours share well" if part == "pairs" else "which blocks can go"
                rows.append(
                    {
                        "claim": f"{name} predicts {what} ({line['model']})",
                        "found": f"rank correlation {found.rho:+.2f} [{found.low:+.2f}, {found.high:+.2f}] over {found.count}",
                        "verdict": "holds" if found.low > 0 else "the reverse" if found.high < 0 else "not seen",
                    }
                )
    return rows


def costs(line: Line) -> list[float]:
    """Of a line of "pairs", how much more sharing costs than bases of their own; of "blocks", how much each block is missed."""
    if "pairs" in line:
        return [a - b for a, b in zip(line["pairs"]["shared"], line["pairs"]["own"])]
    return [loss - line["blocks"]["whole"] for loss in line["blocks"]["without"]]


def _aim(lines: Sequence[Line]) -> list[dict[str, str]]:
    """The best method of 0.8 against the whitened SVD, on every text."""
    cells = {(x["method"], place(x), x["sample"]): x["losses"] for x in lines if "losses" in x and x["keep"] == 0.8}
    above: dict[str, dict[str, list[float]]] = {}
    for (method, where, sample), losses in cells.items():
        if method != "private" and (control := cells.get(("private", where, sample))):
            for text in losses:
                above.setdefault(method, {}).setdefault(text, []).append(losses[text] - control[text])
    if not above:
        return []
    mean = {method: {text: statistics.fmean(found) for text, found in texts.items()} for method, texts in above.items()}
    best = min(mean, key=lambda method: sum(mean[method].values()))
    ratios = {text: math.exp(found) for text, found in mean[best].items()}
    said = ", ".join(f"{ratio - 1:+.1%} on {text}" for text, ratio in ratios.items())
    return [
        {
            "claim": "the best at 0.8 has 15 % less perplexity than the whitened SVD on every text (our aim)",
            "found": f"{best}: {said}",
            "verdict": "holds" if all(ratio <= 0.85 for ratio in ratios.values()) else "does not hold",
        }
    ]


_JUDGES: tuple[Callable[[Sequence[Line]], list[dict[str, str]]], ...] = (_aim, _roles, _methods, _predictions)


def _first(losses: Mapping[str, float]) -> float:
    return next(iter(losses.values()))


def _said(claim: str, found: Verdict) -> dict[str, str]:
    word = {"better": "holds", "worse": "the reverse", "no difference seen": "not seen", "not comparable": "one cell: no verdict"}
    interval = f" [{found.low:+.4f}, {found.high:+.4f}], {found.pairs} cells" if found.pairs > 1 else ""
    return {"claim": claim, "found": f"{found.mean:+.4f} nats{interval}", "verdict": word[found.word]}
