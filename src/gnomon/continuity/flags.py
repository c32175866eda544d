"""What a reader must know before believing a number: one dict a remark, with tensor, kind and message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gnomon.anatomy import Anatomy, Pair, Part
from gnomon.checkpoints.checkpoint import Checkpoint
from gnomon.continuity.one_pass import Measured
from gnomon.continuity.pair_measures import GAP_FRAGILE, undefined


def of_model(
    checkpoint: Checkpoint, anatomy: Anatomy, parts: Sequence[Part], pairs: Sequence[Pair]
) -> list[dict[str, Any]]:
    """Remarks about the files and about what is left out."""
    found = [flag("note", message) for message in (*checkpoint.notes, *anatomy.notes)]
    found += [flag("contradiction", message) for message in anatomy.warnings]
    layers = len({(part.stack, part.layer) for part in parts})
    if not pairs:
        what = f"{layers} layer(s) with matrices of known role" if layers else "no layers were recognised"
        found.append(flag("nothing", f"{what}: there is nothing to compare"))
    doubts: dict[tuple[str, str], list[Part]] = {}
    for part in anatomy.unknown:
        doubts.setdefault((part.role, part.doubt), []).append(part)
    for (role, doubt), members in doubts.items():
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        why = doubt or "not recognised"
        found.append(flag("unknown", f"{members[0].name}{more}: {why}; left out", members[0], role=role))
    tied = [part for part in anatomy if part.tied_to and part.layer is not None]
    for part in tied[:20]:
        found.append(flag("tied", f"{part.name} is the same parameter as {part.tied_to}; left out", part))
    return found


def of_matrix(one: Measured, fold_norms: bool) -> list[dict[str, Any]]:
    """Remarks about one matrix."""
    part, at = one.part, one.at
    if at is None:
        return [flag("unreadable", one.error, part)]
    found = []
    if why := undefined(at):
        kind = "zero" if at.norm == 0 else "degenerate"
        found.append(flag(kind, f"{part.name} ({part.role}): {why}", part))
    elif at.gap < GAP_FRAGILE:
        message = f"{part.name} ({part.role}): sigma1/sigma2 = {at.gap:.4f}; v1 turns easily"
        found.append(flag("fragile", message, part))
    if float(at.residual_k.max()) > 1e-3:
        message = f"{part.name} ({part.role}): stopped at residual {float(at.residual_k.max()):.1e}"
        found.append(flag("unconverged", message, part))
    if fold_norms and not one.folded and (part.reads_stream or part.role in ("cross_key", "cross_value")):
        found.append(flag("unfolded", f"{part.name} ({part.role}): no norm gain is known for it; measured raw", part))
    return found


def flag(kind: str, message: str, part: Part | None = None, **more: Any) -> dict[str, Any]:
    where = {"tensor": part.name, "stack": part.stack, "role": part.role, "layer": part.layer} if part else {}
    return {"kind": kind, **where, **more, "message": message}
