"""A series of layers as a whole: means with their null levels, and every layer against every other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gnomon.anatomy import ROLES
from gnomon.continuity.one_pass import Measured
from gnomon.continuity.pair_measures import undefined
from gnomon.report import Bar

# The measures of a pair, in the order they are shown: key of the value -> prefix of its _null and _z.
MEASURES = {"v1_cos": "v1", "u1_cos": "u1"} | {
    key: key for key in "subspace_v subspace_u weighted_v weighted_u gram_v gram_u frobenius".split()
}
_COLUMNS = {"stack": "stack", "role": "role", "defined": "pairs"}
_COLUMNS |= {"v1_cos": "|cos v1|", "v1_z": "z", "u1_cos": "|cos u1|", "u1_z": "z "}
_COLUMNS |= {"subspace_v": "subspace v", "subspace_u": "subspace u", "gap_min": "gap ≥"}
_COLUMNS |= {"weighted_v": "weighted v", "weighted_u": "weighted u", "gram_v": "Gram v", "gram_u": "Gram u"}
_SHUFFLES = 2000
# Fewer layers have too few orders for a shuffled level to mean anything.
_MIN_LAYERS = 5


@dataclass(frozen=True)
class LayerMap:
    """|cos| of the leading vectors of every layer with every other: rows and columns are `layers`.

    None for a side on which the layers have different widths. `stream`: "reads", "writes" or "", as of a `Part`.
    """

    stack: str
    role: str
    stream: str
    layers: tuple[int, ...]
    v1: torch.Tensor | None
    u1: torch.Tensor | None
    subspace_v: torch.Tensor | None
    subspace_u: torch.Tensor | None


def summarise(rows: Sequence[dict[str, Any]], heats: Sequence[LayerMap]) -> list[dict[str, Any]]:
    """One row per stack and role: the mean of each measure over the pairs where that measure is defined.

    `*_z` compares that mean with the closed-form null: z = (mean - null) sqrt(pairs) / sd. `*_shuffled` is
    the mean over random orders of the same layers, and `*_shuffled_z` how far the true order stands above
    them: a trained model has directions that all layers share, and only what exceeds this depends on being
    neighbours.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["stack"], row["role"]), []).append(row)
    by_role = {(heat.stack, heat.role): heat for heat in heats}
    summary = []
    for (stack, role), members in sorted(groups.items(), key=lambda item: role_order(*item[0])):
        # Pairs across a hole are no neighbours.
        near = [row for row in members if not row["missing"]]
        defined = [row for row in near if row["defined"]]
        line: dict[str, Any] = {"stack": stack, "role": role, "stream": members[0]["stream"]}
        line |= {"pairs": len(members), "defined": len(defined)}
        for key, prefix in MEASURES.items():
            # Near-equal sigma1 and sigma2 spoil v1 and u1, and leave the subspace and the basis-free measures.
            usable = defined if key in ("v1_cos", "u1_cos") else [row for row in near if row["subspace_defined"]]
            values = [row for row in usable if row.get(key) is not None]
            line[key] = _mean([row[key] for row in values])
            line[f"{prefix}_null"] = _mean([row[f"{prefix}_null"] for row in values])
            zs = [row[f"{prefix}_z"] for row in values if row[f"{prefix}_z"] is not None]
            # Each z has sd 1 under the null, so the mean of n of them has sd 1 / sqrt(n).
            line[f"{prefix}_z"] = sum(zs) / math.sqrt(len(zs)) if zs else None
        line["gap_min"] = min((row["gap"] for row in members if row.get("gap") is not None), default=None)
        heat = by_role.get((stack, role))
        comparable = heat is not None and {row["lag"] for row in members} == {1}
        for key in ("v1", "u1"):
            cosines = getattr(heat, key, None)
            shuffled = shuffle(cosines) if comparable and cosines is not None else None
            line[f"{key}_shuffled"], line[f"{key}_shuffled_z"] = shuffled or (None, None)
        summary.append(line)
    return summary


def role_order(stack: str, role: str) -> tuple[str, int]:
    """Sorting key: roles in the order a block uses them, stack by stack."""
    return stack, list(ROLES).index(role)


def heats(measured: Sequence[Measured], k: int) -> list[LayerMap]:
    """Every layer against every other, for each role with one matrix a layer (experts are left out)."""
    series: dict[tuple[Any, ...], list[Measured]] = {}
    for one in measured:
        if one.at is not None and one.part.expert is None and not undefined(one.at):
            series.setdefault((one.part.stack, one.part.role, one.part.inner), []).append(one)
    found: dict[tuple[str, str], LayerMap] = {}
    for (stack, role, _), members in series.items():
        members.sort(key=lambda one: one.part.layer or 0)
        layers = tuple(one.part.layer or 0 for one in members)
        if len(set(layers)) < max(2, len(layers)):
            continue
        ats = [one.at for one in members if one.at is not None]
        (v1, subspace_v), (u1, subspace_u) = (_against([x[:k] for x in side]) for side in (
            [at.V_kN for at in ats], [at.U_kM for at in ats]
        ))  # fmt: skip
        heat = LayerMap(stack, role, members[0].part.stream, layers, v1, u1, subspace_v, subspace_u)
        if (stack, role) not in found or len(found[stack, role].layers) < len(layers):
            found[stack, role] = heat
    return sorted(found.values(), key=lambda heat: role_order(heat.stack, heat.role))


def shuffle(C_LL: torch.Tensor, seed: int = 0) -> tuple[float, float | None] | None:
    """Mean neighbour value over random orders of the layers, and the z of the true order among them."""
    L = len(C_LL)
    if L < _MIN_LAYERS:
        return None
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(_SHUFFLES, L, generator=generator).argsort(1)
    means = C_LL[order[:, :-1], order[:, 1:]].mean(1)
    true, sd = float(C_LL.diagonal(1).mean()), float(means.std())
    return float(means.mean()), (true - float(means.mean())) / sd if sd > 0 else None


def _against(vectors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    if len({rows.shape[1] for rows in vectors}) > 1:
        return None, None
    L, k = len(vectors), min(len(rows) for rows in vectors)
    stacked = torch.cat([rows[:k] for rows in vectors])
    C_LkLk = (stacked @ stacked.T).reshape(L, k, L, k)
    return C_LkLk[:, 0, :, 0].abs(), C_LkLk.square().sum((1, 3)) / k


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def columns_and_formats(summary: Sequence[dict[str, Any]]) -> tuple[dict[str, str], dict[str, Any]]:
    """Columns of the summary table and their formats; those without a value are left out."""
    columns = {key: head for key, head in _COLUMNS.items() if any(line.get(key) is not None for line in summary)}
    if len({line["stack"] for line in summary}) == 1:
        columns.pop("stack", None)
    bars = {key: Bar(null=f"{prefix}_null") for key, prefix in MEASURES.items() if key in columns}
    return columns, bars | {"v1_z": "+.1f", "u1_z": "+.1f", "gap_min": ".3f"}
