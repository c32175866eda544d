"""Which optimizer moves which weight, and how: assignment of manifolds, and ManifoldMuon."""

from __future__ import annotations

from gnomon.optim.auto import BY_PART
from gnomon.optim.clip import clip_logits
from gnomon.optim.matrix_step import SCALES, advance
from gnomon.optim.muon import ManifoldMuon, quiet_step
from gnomon.optim.placement import PlacementWarning
from gnomon.optim.rules import NAMED, Assignment, Entry, Rule, assign, retarget

__all__ = [
    "BY_PART",
    "NAMED",
    "SCALES",
    "Assignment",
    "Entry",
    "ManifoldMuon",
    "PlacementWarning",
    "Rule",
    "advance",
    "assign",
    "clip_logits",
    "quiet_step",
    "retarget",
]
