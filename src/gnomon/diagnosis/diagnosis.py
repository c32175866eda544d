"""A run under the eyes of all rules: record after record goes in, warnings come out when they begin."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from gnomon.diagnosis import attention_rules, loss_rules, state_rules, update_rules
from gnomon.diagnosis.rule import Record, Rule, RunWarning, Scores

RULES: tuple[Rule, ...] = attention_rules.RULES + state_rules.RULES + update_rules.RULES + loss_rules.RULES

CONSTANTS = ("unigram",)
"""What is so for a whole run, and stands in some of its records only."""


class Diagnosis:
    """What rules say of a run so far.

    >>> diagnosis = Diagnosis()
    >>> for record in records:
    ...     for warning in diagnosis.take(record):       # those that begin with this record
    ...         print(warning)
    >>> diagnosis.holding                                # those that still hold

    Nothing is kept but what rules look back at. A resumed run takes its old records first.
    """

    def __init__(self, rules: Sequence[Rule] = RULES):
        self._eyes = [_Eye(rule) for rule in rules]
        self._constants: dict[str, Any] = {}

    def take(self, record: Record) -> list[RunWarning]:
        """Look at one record, as in `metrics.jsonl`; returns the warnings that begin with it, worst kind first."""
        self._constants |= {key: record[key] for key in CONSTANTS if key in record}
        return _in_order(found for eye in self._eyes if (found := eye.take({**self._constants, **record})) is not None)

    @property
    def holding(self) -> list[RunWarning]:
        """What held when it was last looked at."""
        return _in_order(eye.holds for eye in self._eyes if eye.holds is not None)


def course(records: Iterable[Record], rule: Rule) -> list[tuple[int, Scores]]:
    """(step, the rule's statistic by place) over a run, where there is one."""
    diagnosis = Diagnosis([rule])
    (eye,) = diagnosis._eyes
    found = []
    for record in records:
        diagnosis.take(record)
        if eye.scores:
            found.append((record["step"], eye.scores))
    return found


class _Eye:
    """One rule over one run."""

    def __init__(self, rule: Rule):
        self.rule = rule
        self.holds: RunWarning | None = None
        self.scores: Scores = {}
        self._seen: deque[Record] = deque(maxlen=rule.memory)
        self._streak, self._since = 0, 0

    def take(self, record: Record) -> RunWarning | None:
        rule, step = self.rule, record["step"]
        self.scores = {}
        if any(record.get(key) is None for key in rule.reads):
            return None
        self._seen.append({key: record[key] for key in ("step", *rule.reads)})
        scores = self.scores = rule.statistic(list(self._seen))
        if not any(map(rule.reached, scores.values())):
            self._streak, self.holds = 0, None
            return None
        self._since = self._since if self._streak else step
        self._streak += 1
        if self._streak >= rule.lasting:
            self.holds = rule.warning(scores, step, self._since)
        return self.holds if self._streak == rule.lasting else None


def diagnose(records: Iterable[Record], rules: Sequence[Rule] = RULES) -> list[RunWarning]:
    """Every warning of a run, when it began; a rule that falls silent and speaks again is there twice.

    Args:
        records: oldest first, as lines of `metrics.jsonl`; rules pass over those that lack the series they read.
    """
    diagnosis = Diagnosis(rules)
    return [found for record in records for found in diagnosis.take(record)]


def _in_order(found: Iterable[RunWarning]) -> list[RunWarning]:
    return sorted(found, key=lambda one: one.level != "warning")
