"""Inspect a checkpoint and draw from the rows what one wants to see.

    python examples/inspect_and_plot.py CHECKPOINT [OUT.svg]

Needs `pip install "gnomon[report]"`.
"""

from __future__ import annotations

import sys

import gnomon
from gnomon import report


def main(checkpoint: str, out: str = "query.svg") -> list[dict]:
    """Write the picture; returns the rows it is made of."""
    rows = [row for row in gnomon.inspect(checkpoint).rows if row["role"] in ("query", "key") and row["defined"]]
    chance = report.Axis("v1_cos", "|cos| of v1 with that of the next layer", reference={"chance": rows[0]["v1_null"]})
    report.profile(rows, "layer", chance, "role", "What queries and keys read").save(out)
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:3])
