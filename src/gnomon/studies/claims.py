"""The kinds of claims that several studies make."""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.studies.results import Results
from gnomon.studies.study import Claim, Finding


def beats(text: str, paper: str, one: str, other: str) -> Claim:
    """The claim that `one` ends lower than `other`: by the study's rule, or because only `other` diverges."""

    def judge(results: Results) -> Finding:
        found = results.against(one, other)
        lost = {name: results.fates(name, "diverged") for name in (one, other)}
        said = f"{results.mean(one):.4f} against {results.mean(other):.4f}: {found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
        said += "".join(f"; {count} runs of {name} diverged" for name, count in lost.items() if count)
        if lost[other] and not lost[one]:
            return Finding(said, True, [results.mean(one)])
        return Finding(said, found.word == "better", [found.mean, found.low])

    return Claim(text, paper, judge, (one, other), ((one, other),))


def diverges(text: str, paper: str, name: str) -> Claim:
    """The claim that runs of `name` diverge: that a compared one does. Tuning runs are told beside."""

    def judge(results: Results) -> Finding:
        lost = results.fates(name, "diverged")
        tuned = sum(outcome.fate == "diverged" for outcome in results.tuned(name).values())
        said = f"{lost} of {len(results.compared(name))} compared runs diverged, {tuned} of {len(results.tuned(name))} tuning runs"
        return Finding(said, lost > 0, [lost])

    return Claim(text, paper, judge, (name,))


def ranking(text: str, paper: str, names: Sequence[str]) -> Claim:
    """The claim that the means stand in the order of `names`. An order is told, not tested."""

    def judge(results: Results) -> Finding:
        order = sorted(names, key=results.mean)
        means = [results.mean(name) for name in order]
        return Finding(", ".join(f"{n} {mean:.4f}" for n, mean in zip(order, means)), order == list(names), means)

    return Claim(text, paper, judge, tuple(names))
