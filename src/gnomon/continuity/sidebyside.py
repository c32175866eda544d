"""Two reports beside each other: a base and its fine-tune, two steps of a run, two methods."""

from __future__ import annotations

import math
from typing import Any

from gnomon.anatomy import Part
from gnomon.continuity.measurements import Measurements
from gnomon.continuity.pair_measures import undefined
from gnomon.geometry import subspace

_KEYS = ("v1_cos", "u1_cos", "subspace_v", "subspace_u")
COLUMNS = {
    "stack": "stack",
    "role": "role",
    "v1_cos": "|cos v1|",
    "v1_cos_other": "other",
    "u1_cos": "|cos u1|",
    "u1_cos_other": "other ",
    "subspace_v": "subspace v",
    "subspace_v_other": "other  ",
    "subspace_u": "subspace u",
    "subspace_u_other": "other   ",
    "turned_v": "v1 turned (°)",
    "turned_u": "u1 turned (°)",
}
FORMATS = dict.fromkeys(COLUMNS, ".3f") | {"turned_v": ".2f", "turned_u": ".2f"}


def summary(one: Measurements, other: Measurements) -> list[dict[str, Any]]:
    """One row per role that either has: both means, and the angle between v1 (u1) of equal layers (°)."""
    ours = {(line["stack"], line["role"]): line for line in one.summary}
    theirs = {(line["stack"], line["role"]): line for line in other.summary}
    turns = turned(one, other)
    rows = []
    for stack, role in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get((stack, role), {}), theirs.get((stack, role), {})
        row: dict[str, Any] = {"stack": stack, "role": role}
        for key in _KEYS:
            row |= {key: a.get(key), f"{key}_other": b.get(key)}
        members = [turn for turn in turns if (turn["stack"], turn["role"]) == (stack, role) and turn["defined"]]
        for side in "vu":
            angles = [turn[f"turned_{side}"] for turn in members]
            row[f"turned_{side}"] = sum(angles) / len(angles) if angles else None
        rows.append(row)
    return rows


def turned(one: Measurements, other: Measurements) -> list[dict[str, Any]]:
    """For each matrix both models have: the angle between their leading vectors, in degrees."""
    theirs = {_same_matrix(part): at for part, at in other.leading.items()}
    rows = []
    for part, a in one.leading.items():
        b = theirs.get(_same_matrix(part))
        if b is None:
            continue
        k = min(one.settings["k"], len(a.sigma_k), len(b.sigma_k))
        zero = not (a.norm and b.norm)
        row: dict[str, Any] = {
            "stack": part.stack,
            "role": part.role,
            "stream": part.stream,
            "layer": part.layer,
            "tensor": part.name,
        }
        for side, A, B in (("v", a.V_kN, b.V_kN), ("u", a.U_kM, b.U_kM)):
            angle = None if zero else math.degrees(float(subspace.principal_angles(A[:1], B[:1])[0]))
            row[f"turned_{side}"] = angle
            row[f"subspace_{side}"] = None if zero else subspace.overlap(A[:k], B[:k])
        row["norm_ratio"] = None if zero else b.norm / a.norm
        row["defined"] = not (undefined(a) or undefined(b))
        rows.append(row)
    return rows


def _same_matrix(part: Part) -> tuple[Any, ...]:
    return (part.stack, part.role, part.layer, part.expert, part.inner, part.shape)
