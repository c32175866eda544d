"""Warnings before the crash: rules that read the records of a run. No torch here, and no state but the records."""

from __future__ import annotations

from gnomon.diagnosis.diagnosis import RULES as RULES
from gnomon.diagnosis.diagnosis import Diagnosis, course, diagnose
from gnomon.diagnosis.rule import Rule, RunWarning

__all__ = ["Diagnosis", "Rule", "RunWarning", "course", "diagnose"]
