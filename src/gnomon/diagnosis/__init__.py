"""Warnings before the crash: rules that read the records of a run. No torch here, and no state but the records."""

from __future__ import annotations

from gnomon.diagnosis.diagnosis import RULES, Diagnosis, course, diagnose
from gnomon.diagnosis.rule import Rule, RunWarning

__all__ = ["RULES", "Diagnosis", "Rule", "RunWarning", "course", "diagnose"]
