"""What the numbers say, in plain words, and what they do not say."""

from __future__ import annotations

from typing import Any

from gnomon.continuity.measurements import Measurements
from gnomon.errors import printable

# A mean this many null standard deviations up is called a direction that continues.
_CLEAR = 5.0
# Kinds of remarks that come last.
_QUIET = ("note", "fragile", "unfolded")


def stream_side(line: dict[str, Any]) -> str | None:
    """ "v" where inputs are the residual stream, "u" where outputs are, for a row or a line of the summary."""
    return {"reads": "v", "writes": "u"}.get(line["stream"])


def findings(report: Measurements) -> list[str]:
    """One sentence per role, on the side of the stream."""
    found = []
    for line in report.summary:
        side = stream_side(line)
        value, z = line.get(f"{side}1_cos"), line.get(f"{side}1_z")
        if side is None or value is None or z is None:
            continue
        verb = "reads" if side == "v" else "writes"
        what = "continue from layer to layer" if z > _CLEAR else "are not told from chance"
        stack = f" ({line['stack']})" if len({one["stack"] for one in report.summary}) > 1 else ""
        extra = ""
        shuffled, above = line.get(f"{side}1_shuffled"), line.get(f"{side}1_shuffled_z")
        if z > _CLEAR and shuffled is not None and above is not None:
            local = "more than" if above > 2 else "not clearly more than"
            extra = f" Layers in random order give {shuffled:.3f}: neighbours agree {local} any two layers."
        found.append(
            f"**{line['role']}**{stack}: the directions it {verb} most strongly {what}: "
            f"|cos {side}1| = {value:.3f} over {line['defined']} pairs, chance {line[f'{side}1_null']:.3f}, "
            f"z = {z:+.1f}.{extra}"
        )
    return found


def advice(report: Measurements) -> str:
    """What this means for pruning and sharing, and what not to conclude."""
    readers, writers, neither = _sorted_roles(report.summary)
    shared = (
        "**Sharing a basis.** Matrices that read the stream have their inputs in one space, so a shared basis is one of "
        "inputs (stack their rows); those that write it share outputs (stack their columns). In the models of "
        "arXiv:2605.04971 query, key, gate and up continue on the input side, output and down on the output side, value "
        "on neither."
    )
    if readers:
        shared += f" Here the input side continues for {', '.join(readers)}."
    if writers:
        shared += f" The output side continues for {', '.join(writers)}."
    if neither:
        shared += f" Neither is clear for {', '.join(neither)}."
    pruning = (
        "**Pruning.** Continuity is a free look at the weights and can propose layers, nothing more. It knows no data: "
        "score every candidate by the loss on calibration text (arXiv:2402.09025) or by how much the layer changes the "
        "stream (arXiv:2403.03853) before removing it."
    )
    caution = (
        "**What not to conclude.** Leading directions carry a small part of the norm, and high continuity of v1 does not "
        "predict how much a shared basis saves. Gains in weight space have failed to carry over to perplexity "
        "(arXiv:2605.30836)."
    )
    if not report.settings["fold_norms"]:
        caution += " Folding the norm gains in (`fold_norms`) changes these numbers."
    return "\n\n".join([shared, _sharing(report), pruning, caution])


def _sharing(report: Measurements) -> str:
    if not report.sharing:
        return "The full tier (`full=True`) prices a shared basis against a private SVD with as many parameters."
    better = []
    for line in sharing_means(report.sharing):
        best = min(("input", "output"), key=lambda way: line[way])
        word = "saves" if line[best] < line["private"] else "costs"
        change = abs(line[best] / line["private"] - 1)
        better.append(f"- {line['role']}: the {best} basis {word} {change:.1%} of the error of a private SVD")
    keep = report.sharing[0]["keep"]
    head = f"With {keep:.0%} of the parameters kept, neighbours sharing two by two, against private SVDs:"
    return head + "\n\n" + "\n".join(better)


def sharing_means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean of each way over the pairs of a role."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["stack"], row["role"]), []).append(row)
    return [
        {"stack": stack, "role": role, "pairs": len(members)}
        | {way: sum(row[way] for row in members) / len(members) for way in ("private", "input", "output")}
        for (stack, role), members in groups.items()
    ]


def _sorted_roles(summary: list[dict[str, Any]]) -> tuple[list[str], list[str], list[str]]:
    readers, writers, neither = [], [], []
    for line in summary:
        side = stream_side(line)
        z = line.get(f"{side}1_z") if side else None
        if z is None:
            continue
        (neither if z <= _CLEAR else readers if side == "v" else writers).append(line["role"])
    return [list(dict.fromkeys(names)) for names in (readers, writers, neither)]  # type: ignore[return-value]


def remarks(flags: list[dict[str, Any]], limit: int = 8) -> list[str]:
    """Flags as lines: grave ones in full, many of a kind as one line and a count."""
    kinds: dict[str, list[str]] = {}
    for flag in flags:
        kinds.setdefault(flag["kind"], []).append(printable(flag["message"]))
    lines = []
    for kind, messages in sorted(kinds.items(), key=lambda item: item[0] in _QUIET):
        shown = messages[: 2 if kind in _QUIET[1:] else limit]
        lines += [f"{kind}: {message}" for message in shown]
        lines += [f"{kind}: … and {len(messages) - len(shown)} more"] * (len(messages) > len(shown))
    return lines
