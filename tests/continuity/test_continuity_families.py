"""Planted vectors come back from every family, in every layout it is stored in."""

from __future__ import annotations

import math

import anatomy_cases
import pytest
from continuity_cases import TURN_U, TURN_V, as_torch, planted
from safetensors.torch import save_file

from gnomon.continuity import inspect

CASES = [(family, layout) for family in anatomy_cases.FAMILIES for layout in ("disk", "memory")]


@pytest.mark.parametrize("family, layout", CASES)
def test_planted_angles_come_back(family, layout, monkeypatch, tmp_path):
    case = planted(family, layout, monkeypatch)
    save_file(as_torch(case), tmp_path / "model.safetensors")
    report = inspect(tmp_path, k=2, config=case.config)

    layers = {}
    for one in case.planted:
        layers.setdefault((one.role, one.expert, one.matrix.shape), set()).add((one.tensor, one.layer))
    found = {(row["tensor"], row["role"], row["expert"]) for row in report.rows}
    for (role, expert, shape), members in layers.items():
        if min(shape) == 1:
            continue
        stacks = {tensor.split(".")[0] for tensor, _ in members}
        if len({layer for _, layer in members}) > 1 and len(stacks) == 1:
            first = min(members, key=lambda one: one[1])[0]
            assert (first, role, expert) in found
    for row in report.rows:
        M, N = row["shape"]
        if N > 1:
            assert row["v1_cos"] == pytest.approx(abs(math.cos(row["lag"] * TURN_V)), abs=2e-3), row
        if M > 1:
            assert row["u1_cos"] == pytest.approx(abs(math.cos(row["lag"] * TURN_U)), abs=2e-3), row
        assert row["defined"] and row["gap"] is None or row["gap"] > 100
    if family == "albert":
        assert not report.rows and any(flag["kind"] == "nothing" for flag in report.flags)
    else:
        assert report.rows
