"""What docs/results/warnings.md says of the records beside it, made from them alone.

    python -m gnomon.studies.warning_page docs/results/outcomes/warnings.jsonl.gz              judge again, and print
    python -m gnomon.studies.warning_page FILE runs/study-warnings-tiny                        put a study's runs into the file first
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tyro.conf import Positional

from gnomon import report
from gnomon.command import end
from gnomon.diagnosis import RULES, Rule, course
from gnomon.studies import warning_records, warning_verdict, warnings_study
from gnomon.studies.warning_verdict import Judged, WatchedRun

PARTS = (
    ("fresh", "Runs that no limit was fixed on"),
    ("judged", "Runs that the first limits were judged on, and three then moved by"),
    ("set", "Runs that the first limits were fixed on"),
)


def text(runs: Sequence[WatchedRun]) -> str:
    """Shares, tables and, rule by rule, the evidence; Markdown."""
    judged = warning_verdict.judge(runs)
    parts = []
    for half, title in PARTS:
        at = warning_verdict.shares(judged, half)
        parts += [
            f"## {title}",
            f"{at['failed']} runs failed, {at['healthy']} were healthy. **Caught before the loss shows it: {at['caught']:.0%}**, by a "
            f"median of {at['lead']:g} steps (before the run fell behind its twin for good, which only the twin tells: "
            f"{at['ahead']:.0%}). **False alarms: {at['false']:.1%}** of the healthy runs.",
            report.markdown(warning_verdict.by_kind(judged, half)),
        ]
        if rows := warning_verdict.missed(judged, half):
            parts += ["Missed, warned of for nothing, or not failed though they were made to:", report.markdown(rows)]
    parts += ["## Rule by rule", report.markdown(warning_verdict.by_rule(judged))]
    for rule in RULES:
        parts += [f"### {rule.name}", _evidence(rule, judged)]
    return "\n\n".join(parts) + "\n"


def _evidence(rule: Rule, judged: Sequence[Judged]) -> str:
    """How far healthy runs are from the limit, where the rule spoke, and what it said there first."""
    said = [f"{rule.why}."]
    healthy = [extreme(rule, one.run) for one in judged if one.fate == "healthy"]
    if found := [value for value in healthy if value is not None]:
        worst = (min if rule.below else max)(found)
        rows = f", {rule.lasting} measurements in a row" * (rule.lasting > 1)
        said.append(f"Of {len(found)} healthy runs that it looked at, the worst came to {worst:.3g}{rows}; the limit is {rule.limit:g}.")
    spoke = [(one, next((w for w in one.warnings if w.rule == rule.name), None)) for one in judged]
    kinds: dict[str, int] = {}
    for one, warning in spoke:
        if warning is not None:
            kinds[one.run.kind] = kinds.get(one.run.kind, 0) + 1
    first = next(((one, warning) for one, warning in spoke if warning is not None), None)
    if first is None:
        return " ".join([*said, "It spoke in none of these runs: what shows that it can is its test alone."])
    said.append("It spoke in " + ", ".join(f"{count} of “{kind}”" for kind, count in kinds.items()) + ".")
    one, warning = first
    return " ".join(said) + f"\n\n> {one.run.name}, seed {one.run.seed}, step {warning.step}: {warning.what}."


def extreme(rule: Rule, run: WatchedRun) -> float | None:
    """The statistic of a run that is nearest the limit, or furthest beyond, for as long as the rule asks; None where it saw nothing."""
    values = [(min if rule.below else max)(scores.values()) for _, scores in course(run.records, rule)]
    lasting = [(max if rule.below else min)(values[i : i + rule.lasting]) for i in range(len(values) - rule.lasting + 1)]
    return (min if rule.below else max)(lasting) if lasting else None


def main(records: Positional[Path], folder: Positional[Path | None] = None, /) -> None:
    """Judge the warnings of watched runs again, and print what there is to say as Markdown.

    Args:
        records: the file of their records.
        folder: of a study whose runs are put into the file first.
    """
    if folder is not None:
        known = warning_records.unpack(records) if records.exists() else []
        new = list(warnings_study.runs_in(folder))
        again = {(run.name, run.seed) for run in new}
        warning_records.pack([run for run in known if (run.name, run.seed) not in again] + new, records)
    print(text(warning_records.unpack(records)))


if __name__ == "__main__":
    end(main, "gnomon.studies.warning_page")
