"""What a study measured, asked by variant name; comparisons and claims judged."""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

from gnomon.errors import UserError
from gnomon.files import read_json, restored
from gnomon.run_folder import read_metrics
from gnomon.studies import verdict
from gnomon.studies.study import Claim, Measured, Outcome, Study, at_edge, best_rate, tuned, wanted
from gnomon.studies.verdict import Verdict

REPRODUCED, NOT, UNTESTABLE, NOT_RUN = "reproduced", "not reproduced", "not testable", "not run"


class Results:
    """What a study measured, asked by variant name."""

    def __init__(self, study: Study, measured: Measured):
        self.study: Study = study
        self.measured: Measured = measured
        self._variants = {variant.name: variant for variant in study.variants}
        self._rates: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._variants

    def recipe(self, name: str) -> Any:
        """What the variant runs, at its first guess of a rate."""
        return self._variants[name].recipe

    def settled(self, name: str) -> Any:
        """What the compared runs of the variant are, but for their seeds."""
        return wanted(self.study, self._variants[name], self.measured)[-1].recipe

    def rate(self, name: str) -> float:
        """The tuned learning rate."""
        if name not in self._rates:
            self._rates[name] = best_rate(self.study, self._variants[name], self.measured)
        return self._rates[name]

    def tuned_settings(self, name: str) -> dict[str, Any]:
        """What the search changed in the variant's recipe; empty where it is best as it stands, or only a rate was tuned."""
        return dict(tuned(self.study, self._variants[name], self.measured) or ())

    def compared(self, name: str) -> dict[int, Outcome]:
        """Seed -> outcome of the compared runs."""
        found = {run.seed: outcome for run, outcome in self.measured.items() if run.variant == name and not run.tuning}
        return {seed: found[seed] for seed in self.study.seeds if seed in found}

    def tuned(self, name: str) -> dict[float, Outcome]:
        """Rate -> outcome of the tuning runs."""
        found = {run.rate: outcome for run, outcome in self.measured.items() if run.variant == name and run.tuning}
        return dict(sorted(found.items()))

    def values(self, name: str) -> dict[int, float]:
        """Seed -> final value of the compared runs that did not diverge."""
        return {seed: out.value for seed, out in self.compared(name).items() if out.fate != "diverged"}

    def mean(self, name: str) -> float:
        """Mean final value over seeds; NaN when all diverged."""
        return statistics.fmean(found) if (found := list(self.values(name).values())) else math.nan

    def fates(self, name: str, fate: str) -> int:
        """How many compared runs met that fate."""
        return sum(outcome.fate == fate for outcome in self.compared(name).values())

    @functools.cached_property
    def verdicts(self) -> dict[tuple[str, str], Verdict]:
        """Every comparison of the study, paired by the seeds on which neither side diverged."""
        pairs = {}
        for name, baseline in self.study.comparisons:
            ours, theirs = self.values(name), self.values(baseline)
            pairs[name, baseline] = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
        return verdict.compare(pairs)

    def against(self, name: str, baseline: str) -> Verdict:
        """The comparison of a variant with another, corrected for all that the study makes.

        Raises:
            UserError: it is not one of `study.comparisons`.
        """
        if (name, baseline) not in self.verdicts:
            raise UserError(f"{name!r} is not compared with {baseline!r}: name it in the `pairs` of a Claim, so that it is counted")
        return self.verdicts[name, baseline]

    def row(self, name: str) -> dict[str, Any]:
        """The variant's line in the table."""
        variant, values = self._variants[name], list(self.values(name).values())
        row: dict[str, Any] = {
            "variant": name,
            "lr": self.rate(name),
            "edge": at_edge(self.study, variant, self.measured),
            "seeds": len(self.compared(name)),
            "mean": self.mean(name),
            "sd": verdict.spread(values),
            "diverged": self.fates(name, "diverged"),
            "stalled": self.fates(name, "stalled"),
            "baseline": variant.baseline,
            "difference": None,
            "low": None,
            "high": None,
            "p": None,
            "verdict": "baseline" if variant.baseline is None else None,
        }
        if variant.baseline is not None and variant.baseline in self._variants:
            found = self.against(name, variant.baseline)
            row |= {"difference": found.mean, "low": found.low, "high": found.high, "p": found.p, "verdict": found.word}
        return row

    def rows(self) -> list[dict[str, Any]]:
        """The lines of all variants of which something was compared. A page asks for them several times, and each needs many recipes."""
        return [dict(row) for row in self._rows]

    @functools.cached_property
    def _rows(self) -> list[dict[str, Any]]:
        return [self.row(variant.name) for variant in self.study.variants if self.compared(variant.name)]

    def claims(self) -> list[dict[str, str]]:
        """One row for each claim: claim, paper's number, ours, seeds, verdict."""
        rows = []
        for claim in self.study.claims:
            ours, word = judged(claim, self)
            seeds = min((len(self.compared(name)) for name in claim.needs if name in self), default=0)
            rows.append({"claim": claim.text, "paper": claim.paper, "ours": ours, "seeds": str(seeds), "verdict": word})
        return rows


def judged(claim: Claim, results: Results) -> tuple[str, str]:
    """Our finding in words, and one of `REPRODUCED`, `NOT`, `UNTESTABLE`, `NOT_RUN`."""
    absent = [name for name in claim.needs if name not in results and name not in results.study.left_out]
    if absent:
        return f"no variant {absent[0]!r} at this scale", UNTESTABLE
    if not all(name in results and results.compared(name) for name in claim.needs):
        return "", NOT_RUN
    found = claim.judge(results)
    if not all(map(math.isfinite, found.figures)):
        return f"{found.said} (a figure is missing)", UNTESTABLE
    return found.said, REPRODUCED if found.holds else NOT


_metrics = functools.cache(read_metrics)  # a page asks for each many times


def curve(outcome: Outcome) -> list[dict[str, Any]]:
    """The metric records of a finished run, as far as they are here: of one made elsewhere what its line in the outcomes file has."""
    if found := _metrics(outcome.folder):
        return found
    losses = [{"step": step, "tokens": tokens, "val_loss": value} for step, tokens, value in outcome.points]
    return sorted([*losses, *map(dict, outcome.records)], key=lambda record: record["step"])


@functools.cache
def after_training(outcome: Outcome) -> dict[str, Any]:
    """What was measured on the trained model (`mechanism.json`); {} where nothing was."""
    file = outcome.folder / "mechanism.json"
    return restored(read_json(file)) if file.exists() else {}
