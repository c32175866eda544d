"""Parameter groups of ManifoldMuon, and how they say which part of which tensor is on which manifold.

Everything that must survive a checkpoint, a deepcopy or a pickle is plain data in the group, as JSON has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from gnomon.anatomy import Block, Cut
from gnomon.errors import UserError
from gnomon.geometry.manifolds import Manifold, from_dict
from gnomon.optim.rules import Assignment, label

Parts = dict[str, list[tuple[Block, Manifold]]]

RETIRED = ("polish_every", "warm_start", "spectral_cap", "paper")
"""Options that groups once had; the last two are the manifolds' own now."""

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Steps that torch's wrappers add to parameter names; DDP adds a leading "module"."""


def groups_of(given: Assignment | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What ManifoldMuon was given, as groups.

    Raises:
        UserError: a model, parameters, or anything else that does not say what is on which manifold.
    """
    if isinstance(given, Assignment):
        return from_assignment(given)
    groups = list(given) if isinstance(given, Iterable) and not isinstance(given, (nn.Module, Mapping)) else []
    if not groups or not all(isinstance(group, Mapping) for group in groups):
        what = type(groups[0] if groups else given).__name__
        raise UserError(
            f"ManifoldMuon must be told which matrix is on which manifold, and got {what}. Give it an assignment, "
            'ManifoldMuon(gnomon.assign(model, "hetero"), lr=0.02), or groups such as '
            '{"params": [(name, parameter), …], "manifold": gnomon.Stiefel()}.'
        )
    return [dict(group) for group in groups]


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


def to_plain(parts: Parts) -> dict[str, list[Any]]:
    """Blocks and manifolds as JSON has them."""

    def cut(c: Cut | None) -> list[int] | None:
        return None if c is None else [c.period, c.start, c.stop]

    return {
        name: [[[b.index, b.transposed, cut(b.rows), cut(b.columns)], manifold.to_dict()] for b, manifold in found]
        for name, found in parts.items()
    }


def from_plain(plain: list[Any]) -> list[tuple[Block, Manifold]]:
    def cut(values: list[int] | None) -> Cut | None:
        return None if values is None else Cut(*values)

    return [(Block(i, t, cut(rows), cut(columns)), from_dict(data)) for (i, t, rows, columns), data in plain]


def matched(saved: Mapping[str, Any], own: list[dict[str, Any]]) -> dict[str, Any]:
    """A state_dict as an optimizer with the groups `own` writes it today: its names, and all its options.

    Saved names may lack or have what wrappers add. An option newer than the state keeps the value of `own`.

    Raises:
        UserError: no names; parameters, their order, their groups, or the manifold of one differ. The first is named.
    """
    theirs = [_upgraded(group) for group in saved["param_groups"]]
    if not all("param_names" in group for group in theirs):
        raise UserError(
            "this optimizer state has no parameter names (param_names), so nothing tells which momentum belongs to which "
            "matrix. It was written by another optimizer, or by one that was given parameters without names."
        )
    said, have = ({_plain_name(n): _describe(g, n) for g in groups for n in g["param_names"]} for groups in (theirs, own))
    for name in [*have, *said]:
        a, b = (side.get(name, "missing") for side in (said, have))
        if a != b:
            raise UserError(f"{name}: the checkpoint has {a}, this optimizer {b}. Build it with the same assignment.")
    if list(said) != list(have):
        raise UserError("the checkpoint holds the same parameters in another order; their state would be swapped")
    sizes = [[len(group["param_names"]) for group in groups] for groups in (theirs, own)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the checkpoint has the same parameters in groups of {sizes[0]}, this optimizer in groups of {sizes[1]}. Build "
            "it with the same rules: each pair of lr and weight_decay is a group."
        )
    groups = [
        {**ours, **group, **{key: ours[key] for key in ("param_names", "manifolds", "unplaced") if key in ours}}
        for ours, group in zip(own, theirs)
    ]
    # Dual variables, once kept to start the next solve from, made it worse (docs/log.md).
    state = {index: {key: x for key, x in kept.items() if not key.startswith("dual.")} for index, kept in saved["state"].items()}
    return {**saved, "state": state, "param_groups": groups}


def _upgraded(group: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group without retired options, which say what its manifolds say now."""
    paper, cap = group.get("paper", False), group.get("spectral_cap")

    def now(kind: dict[str, Any]) -> dict[str, Any]:
        if kind["name"] == "euclidean":  # its cap is a manifold of its own now
            radius = kind.get("cap") or cap
            held = {"name": "spectral-ball", "radius": radius} if radius else {"name": "euclidean"}
            return {**held, "columns": kind["columns"]}
        return {**kind, "paper": kind.get("paper") or paper} if kind["name"] in ("stiefel", "dgram", "oblique") else kind

    kept = {key: value for key, value in group.items() if key not in RETIRED}
    if kept.get("manifolds") is not None and "param_names" in kept:
        # In order, since a hook may have renamed parameters where torch keeps their names.
        pairs = zip(kept["param_names"], kept["manifolds"].values())
        kept["manifolds"] = {name: [[block, now(kind)] for block, kind in parts] for name, parts in pairs}
    return kept


def _describe(group: Mapping[str, Any], name: str) -> str:
    """What a group says of a parameter, for comparing checkpoints."""
    if group.get("manifolds") is None:
        return "AdamW"
    return " and ".join(f"{label(manifold)} at {block}" for block, manifold in from_plain(group["manifolds"][name]))


def _plain_name(name: str) -> str:
    steps = [step for step in name.split(".") if step not in WRAPPERS]
    return ".".join(steps[1:] if steps[0] == "module" else steps)
