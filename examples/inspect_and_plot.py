"""Inspect and plot: what one wants to see of a checkpoint, drawn from the rows.

    python examples/inspect_and_plot.py CHECKPOINT [OUT.svg]

A row is one matrix beside the next of its role: how much their leading input directions (`v1`) and output directions (`u1`) agree, and
how much they would by chance. Needs `pip install "gnomon[report]"`.
"""

from __future__ import annotations

import sys

import gnomon
from gnomon import report


def main(checkpoint: str, out: str = "query.svg") -> list[dict]:
    """Write the picture; returns the rows it is made of."""
    rows = [row for row in gnomon.inspect(checkpoint).rows if row["role"] in ("query", "key") and row["defined"]]
    report.show(rows, ["layer", "role", "v1_cos", "v1_null", "u1_cos", "u1_null"])
    chance = report.Axis("v1_cos", "|cos| of v1 with that of the next layer", reference={"chance": rows[0]["v1_null"]})
    report.profile(rows, "layer", chance, "role", "What queries and keys read").save(out)
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:3])
