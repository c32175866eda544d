"""Parameter groups of ManifoldMuon, and how they say which part of which tensor is on which manifold.

Everything that must survive a checkpoint, a deepcopy or a pickle is plain data in the group, as JSON has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.anatomy import Block, Cut
from gnomon.geometry.manifolds import Manifold, from_dict
from gnomon.optim.rules import Assignment, label


def from_assignment(assignment: Assignment) -> list[dict[str, Any]]:
    """One group for each pair of learning rate and weight decay, matrices before AdamW's parameters with and without
    decay, so that a scheduler keeps their ratios."""
    groups: dict[tuple, dict[str, Any]] = {}
    for entry in assignment:
        name, matrix = entry.part.name, entry.manifold is not None
        decay = entry.weight_decay
        if not matrix and decay is None and entry.parameter.ndim < 2:
            decay = 0.0
        options = {key: value for key, value in (("lr", entry.lr), ("weight_decay", decay)) if value is not None}
        group = groups.setdefault((not matrix, *sorted(options.items())), {"params": {}, "parts": {}, **options})
        group["params"][name] = entry.parameter
        if matrix:
            group["parts"].setdefault(name, []).append((entry.part.block, entry.manifold))
    ordered = [groups[key] for key in sorted(groups, key=lambda key: key[0])]
    for group in ordered:
        group["params"] = list(group["params"].items())
        if not group["parts"]:
            del group["parts"]
    return ordered


def to_plain(parts: Mapping[str, list[tuple[Block, Manifold]]]) -> dict[str, list]:
    """Blocks and manifolds as JSON has them."""

    def cut(c: Cut | None) -> list[int] | None:
        return None if c is None else [c.period, c.start, c.stop]

    return {
        name: [[[b.index, b.transposed, cut(b.rows), cut(b.columns)], manifold.to_dict()] for b, manifold in found]
        for name, found in parts.items()
    }


def from_plain(plain: list) -> list[tuple[Block, Manifold]]:
    def cut(values: list[int] | None) -> Cut | None:
        return None if values is None else Cut(*values)

    return [(Block(i, t, cut(rows), cut(columns)), from_dict(data)) for (i, t, rows, columns), data in plain]


def describe(group: Mapping[str, Any], name: str) -> str:
    """What a group says of a parameter, for comparing checkpoints."""
    if group.get("manifolds") is None:
        return "AdamW"
    return " and ".join(f"{label(manifold)} at {block}" for block, manifold in from_plain(group["manifolds"][name]))
