"""Judging claims: a finding in words and a verdict, from the results of a study."""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.studies.study import Results

REPRODUCED, NOT, UNTESTABLE = "reproduced", "not reproduced", "not testable at this scale"


def beats(results: Results, one: str, other: str) -> tuple[str, str]:
    """Whether `one` ends lower than `other` by the study's rule."""
    if not (results.values(one) and results.values(other)) and not results.fates(other, "diverged"):
        return "nothing to compare", UNTESTABLE
    found = results.against(one, other)
    lost = {name: results.fates(name, "diverged") for name in (one, other)}
    said = f"{results.mean(one):.4f} against {results.mean(other):.4f}: {found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
    said += "".join(f"; {count} runs of {name} diverged" for name, count in lost.items() if count)
    if lost[other] and not lost[one]:
        return said, REPRODUCED
    return said, REPRODUCED if found.word == "better" else NOT


def steady(results: Results, name: str) -> tuple[str, str]:
    """Whether runs of `name` diverge, in any compared or tuning run: "reproduced" when a compared one does."""
    lost = results.fates(name, "diverged")
    tuned = sum(outcome.fate == "diverged" for outcome in results.tuned(name).values())
    said = f"{lost} of {len(results.compared(name))} compared runs diverged, {tuned} of {len(results.tuned(name))} tuning runs"
    return said, REPRODUCED if lost else NOT


def ranking(results: Results, names: Sequence[str]) -> tuple[str, str]:
    """The order of the means, beside the order given."""
    present = [name for name in names if name in results]
    order = sorted(present, key=results.mean)
    said = ", ".join(f"{name} {results.mean(name):.4f}" for name in order)
    return said, REPRODUCED if order == present else NOT
