"""Serial alignment: what one layer writes against what the next reads, |cos(u_1 of W_l, v_1 of W_l+1)|.

In deep linear nets gradient descent drives it to 1 (Ji & Telgarsky, arXiv:1810.02032); it is another measure
than continuity, which compares equal roles. A writer (attention output, MLP down) is held against the readers
of the next sublayer on the same residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gnomon.continuity.one_pass import Measured
from gnomon.continuity.pair_measures import scored, undefined
from gnomon.geometry import subspace

# Sublayers in the order a block runs them; a parallel block runs both from one input, so there the next layer
# is the next reader, which shapes alone cannot tell: such blocks are read as sequential.
_ORDER = {"attention": 0, "mixer": 0, "mlp": 1, "router": 1}


def rows(measured: Sequence[Measured], k: int) -> list[dict[str, Any]]:
    """One row per writer and reader of the next sublayer; experts are left out."""
    steps: dict[str, dict[tuple[int, int], list[Measured]]] = {}
    for one in measured:
        if one.at is not None and one.part.expert is None and one.part.layer is not None:
            step = (one.part.layer, _ORDER[one.part.sublayer])
            steps.setdefault(one.part.stack, {}).setdefault(step, []).append(one)
    found = []
    for stack in steps.values():
        reading = sorted(step for step, members in stack.items() if any(one.part.reads_stream for one in members))
        for step, members in stack.items():
            after = next((later for later in reading if later > step), None)
            for writer in (one for one in members if one.part.writes_stream):
                for reader in stack.get(after, ()) if after else ():
                    if reader.part.reads_stream and reader.part.shape[1] == writer.part.shape[0]:
                        found.append(_row(writer, reader, k))
    return found


def _row(writer: Measured, reader: Measured, k: int) -> dict[str, Any]:
    assert writer.at is not None and reader.at is not None
    U_kD, V_kD = writer.at.U_kM[:k], reader.at.V_kN[:k]
    dim, k = U_kD.shape[1], min(len(U_kD), len(V_kD))
    doubts = [doubt for doubt in (undefined(writer.at), undefined(reader.at)) if doubt]
    zero = writer.at.norm == 0 or reader.at.norm == 0
    cosine = None if zero else abs(float(U_kD[0].double() @ V_kD[0].double()))
    shared = None if zero else subspace.overlap(U_kD[:k], V_kD[:k])
    return {
        "stack": writer.part.stack,
        "role": writer.part.role,
        "next_role": reader.part.role,
        "layer": writer.part.layer,
        "next_layer": reader.part.layer,
        "tensor": writer.part.name,
        "next_tensor": reader.part.name,
        **scored("uv", cosine, subspace.cosine_null(dim), name="uv_cos"),
        **scored("subspace", shared, subspace.overlap_null(dim, k)),
        "defined": not doubts,
        "reason": "; ".join(doubts),
    }
