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

from gnomon.studies.compression_cells import HEALED
from gnomon.studies.verdict import LEVEL, Verdict, compare, t_quantile

Line = Mapping[str, Any]
ALL = "all models measured alike"
LAMBADA = "LAMBADA, nats a last word"
ACCURACY = "LAMBADA, last words said (%)"
BYTES = "share of the bytes"
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


def tables(lines: Sequence[Line], name: str) -> dict[str, list[dict[str, Any]]]:
    """What a family's methods cost against the whole model: for each thing that is measured a table, with a row for each method and a
    column for each share of the block weights that stays."""
    own = [line for line in lines if family(line) == name and nats(line)]
    used = {place(line) for line in own if line["method"] != "whole"}
    whole = {place(line): line for line in own if line["method"] == "whole" and place(line) in (used or {place(line)})}
    cells: dict[str, dict[float, list[Line]]] = {}
    for line in (line for line in own if place(line) in whole):
        cells.setdefault(line["method"], {}).setdefault(line["keep"], []).append(line)

    def cost(what: str) -> Callable[[Line], float | None]:
        def found(line: Line) -> float | None:
            own, there = nats(line).get(what), nats(whole[place(line)]).get(what)
            return own if line["method"] == "whole" or own is None or there is None else own - there

        return found

    found = {what: _by_keep(cells, cost(what), "{:+.4f}", "{:.4f}") for what in dict.fromkeys(key for line in own for key in nats(line))}
    found[ACCURACY] = _by_keep(cells, lambda line: 100 * line["lambada"]["accuracy"] if "lambada" in line else None, "{:.1f}")
    found[BYTES] = _by_keep(cells, lambda line: line["bytes"] / whole[place(line)]["bytes"], "{:.3f}", half=False)
    return {title: rows for title, rows in found.items() if rows}


def _by_keep(
    cells: Mapping[str, Mapping[float, Sequence[Line]]],
    value: Callable[[Line], float | None],
    form: str,
    form_of_whole: str = "",
    half: bool = True,
) -> list[dict[str, Any]]:
    """Methods without a value are left out."""
    rows = {}
    for method, by_keep in cells.items():
        known = {keep: [one for line in some if (one := value(line)) is not None] for keep, some in by_keep.items()}
        one_form = form_of_whole if method == "whole" and form_of_whole else form
        rows[method] = {keep: spelled(found, one_form, half) for keep, found in known.items() if found}
    keeps = sorted({keep for row in rows.values() for keep in row}, reverse=True)
    return [{"method": name} | {f"{100 * keep:g} %": row.get(keep, "") for keep in keeps} for name, row in rows.items() if row]


def nats(line: Line) -> dict[str, float]:
    """What a cell loses: on each text for a token, on LAMBADA for a last word."""
    return dict(line.get("losses", {})) | ({LAMBADA: line["lambada"]["nats"]} if "lambada" in line else {})


def spelled(values: Sequence[float], form: str = "{:+.4f}", half: bool = True) -> str:
    """ "+0.120 ± 0.013 (3)": mean, half its 95 % interval, and of how many; the mean alone of a single one."""
    mean = form.format(statistics.fmean(values))
    if len(values) < 2 or not half:
        return mean
    width = t_quantile(0.95, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {form.replace('+', '').format(width)} ({len(values)})"


def claims(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Every claim about every family that the lines can judge; of several measured alike, the axis rule over all of them as well."""
    own = {name: [line for line in lines if family(line) == name] for name in families(lines)}
    rows = [{"model": name, **found} for name, some in own.items() for judge in _JUDGES for found in judge(some)]
    alike: dict[tuple[Any, ...], list[Line]] = {}
    for line in (line for line in lines if "roles" in line):
        # Nats of other tokens, or of rows of another length, are another measure.
        alike.setdefault(tuple(line.get(key) for key in ("calibration", "tokens", "length")), []).append(line)
    several = [some for some in alike.values() if len({family(line) for line in some}) > 1]
    return rows + [{"model": ALL, **found} for some in several for found in _roles(some)]


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
        ("merge by continuity", "merge by random"), ("merge by continuity", "merge by change"), ("merge by change", "depth by change"),
        ("mlp", "private"), ("mlp", "modules"),
    ]  # fmt: skip
    losses = {(x["method"], x["keep"], place(x), x["sample"]): nats(x) for x in lines if nats(x)}
    pairs: dict[tuple[str, str, float, str], list[float]] = {}
    for (method, keep, where, sample), found in losses.items():
        for one, other in against:
            if method == one and (there := losses.get((other, keep, where, sample))):
                for text in (one for one in found if one in there):
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
    """The best method of 0.8 against the whitened SVD, on every text; neither is healed."""
    at = [x for x in lines if "losses" in x and x["keep"] == 0.8 and HEALED not in x["method"]]
    cells = {(x["method"], place(x), x["sample"]): x["losses"] for x in at}
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


def _whitening(lines: Sequence[Line]) -> list[dict[str, str]]:
    """The whitened SVD against the plain one, matrix by matrix: a sum of squares that the first makes least."""
    pairs = [pair for line in lines for role in line.get("whitening", {}).values() for pair in zip(role["whitened"], role["plain"])]
    if not pairs:
        return []
    # Factors are stored in fp32, which a matrix that loses nothing either way shows.
    least = sum(whitened <= plain + 1e-6 for whitened, plain in pairs)
    mean = [statistics.fmean(some) for some in zip(*pairs)]
    return [
        {
            "claim": "the whitened SVD loses no more of any matrix's outputs than the plain one, at equal rank",
            "found": f"in {least:,} of {len(pairs):,} matrices; in the mean {mean[0]:.1%} against {mean[1]:.1%} of their energy",
            "verdict": "holds" if least == len(pairs) else "does not hold",
        }
    ]


_JUDGES: tuple[Callable[[Sequence[Line]], list[dict[str, str]]], ...] = (_aim, _roles, _methods, _predictions, _whitening)


def _first(losses: Mapping[str, float]) -> float:
    return next(iter(losses.values()))


def _said(claim: str, found: Verdict) -> dict[str, str]:
    word = {"better": "holds", "worse": "the reverse", "no difference seen": "not seen", "not comparable": "one cell: no verdict"}
    interval = f" [{found.low:+.4f}, {found.high:+.4f}], {found.pairs} cells" if found.pairs > 1 else ""
    return {"claim": claim, "found": f"{found.mean:+.4f} nats{interval}", "verdict": word[found.word]}
