"""Which optimizer and which manifold each parameter gets: ordered rules in, every parameter exactly once out.

>>> assignment = gnomon.assign(model, "hetero")                    # the paper's names
>>> assignment = gnomon.assign(model, attention=gnomon.Stiefel(), mlp=gnomon.DGram(cap=4))
>>> assignment = gnomon.assign(model, "hetero", rules=[Rule("value", gnomon.Euclidean()), Rule("*.0.*", None)])
>>> print(assignment.table())

A fused tensor is assigned part by part (query, key, value; gate, up), so the constraint is on the projection and not on
an accident of storage. Embeddings, heads, tied weights, norms, biases, scalars and convolutions go to AdamW unless a
rule of the user names them; so do adapters (LoRA), which no role names but only a glob over names.
"""

from __future__ import annotations

import fnmatch
import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

from gnomon import anatomy
from gnomon.anatomy import ROLES, Anatomy, Part
from gnomon.errors import UserError, check_name, suggest
from gnomon.geometry.manifolds import DGram, Euclidean, Manifold, SpectralBall, SpectralSphere, Sphere, Stiefel, named
from gnomon.optim.auto import BY_PART

NAMED: dict[str, tuple[Manifold, Manifold]] = {
    "none": (Euclidean(), Euclidean()),
    "stiefel": (Stiefel(), Stiefel()),
    "dgram": (DGram(), DGram()),
    "hetero": (Stiefel(), DGram()),
    "hetero-inv": (DGram(), Stiefel()),
    "sphere": (Sphere(), Sphere()),
    "spectral-ball": (SpectralBall(), SpectralBall()),
    "spectral-sphere": (SpectralSphere(), SpectralSphere()),
}
"""Attention's and the MLP's manifold by name: the five of arXiv 2606.13276, of which "none" is plain Muon; and one norm held
throughout (`gnomon.geometry.norm_manifolds`)."""


@dataclass(frozen=True)
class Rule:
    """What to do with the parameters it matches.

    Args:
        match: a role ("query", "down", "embedding" …), a sublayer ("attention", "mlp"), or a glob over parameter names
            ("blocks.0.*").
        manifold: the manifold of the matrix, or its name; None gives the parameter to AdamW.
        lr: peak learning rate; None for the optimizer's.
        weight_decay: None for the optimizer's.
    """

    match: str
    manifold: Manifold | None
    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if self.manifold is not None:
            object.__setattr__(self, "manifold", named(self.manifold))

    def matches(self, part: Part) -> bool:
        # An adapter has its base layer's role, and starts at zero, which no manifold holds.
        by_role = self.match in (part.role, part.sublayer) and not (part.adapter and self.manifold is not None)
        return by_role or fnmatch.fnmatchcase(part.name, self.match)


@dataclass(frozen=True)
class Entry:
    """One part of one parameter and what it gets. `manifold` None means AdamW."""

    part: Part
    parameter: nn.Parameter = field(compare=False, repr=False)
    manifold: Manifold | None
    lr: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class Assignment:
    """Every parameter of a model exactly once, part by part, in the model's order."""

    entries: tuple[Entry, ...]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def rows(self, lr: float | None = None, adamw_lr: float | None = None) -> list[dict[str, Any]]:
        """name, shape (out x in of a matrix), role, manifold, optimizer, lr and weight decay of every part."""
        return [
            {
                "name": entry.part.name,
                "shape": " x ".join(map(str, entry.part.shape)),
                "role": entry.part.role + (f" ({entry.part.doubt})" if entry.part.doubt else ""),
                "manifold": "" if entry.manifold is None else label(entry.manifold),
                "optimizer": _optimizer(entry),
                "lr": _first(entry.lr, adamw_lr if entry.manifold is None else lr, "default"),
                "weight decay": _first(entry.weight_decay, "default"),
            }
            for entry in self.entries
        ]

    def table(self, lr: float | None = None, adamw_lr: float | None = None) -> str:
        """The rows as a text table."""
        from rich.console import Console

        from gnomon import report

        console = Console(file=io.StringIO(), width=200)
        console.print(report.table(self.rows(lr, adamw_lr)))
        return console.file.getvalue()  # type: ignore[attr-defined]


def assign(
    model: nn.Module,
    name: str | None = None,
    *,
    attention: Manifold | str | None = None,
    mlp: Manifold | str | None = None,
    rules: Sequence[Rule] = (),
    per_head: bool = False,
    parts: Anatomy | None = None,
    config: Any = None,
) -> Assignment:
    """Decide for every parameter of `model`.

    The first matching rule wins; after the user's rules come attention's and the MLP's manifold, then AdamW.

    Args:
        model: any module whose anatomy is known (ours, the usual Hugging Face decoders), with its parameters.
        name: one of the paper's five, "none", "stiefel", "dgram", "hetero", "hetero-inv"; or "sphere", "spectral-ball",
            "spectral-sphere"; or "auto" and "qk-ball" (`gnomon.optim.auto`), which look at each matrix.
        attention: manifold of the attention projections, in place of the name's.
        mlp: manifold of the MLP's projections.
        rules: ordered rules of the user, before these.
        per_head: constrain every head's query, key, value and output by itself.
        parts: the anatomy, where it was read already.
        config: what config.json would say, for a model without a `.config`; see `gnomon.anatomy.read`.

    Warns:
        UserWarning: matrices of attention or MLP are left to AdamW, since they could not be told apart or are adapters.

    Raises:
        UserError: an unknown name; a rule that matches nothing (with the nearest names); a manifold for something that
            is no matrix; a tensor split between AdamW and a manifold; a model in which no attention or MLP was found.
    """
    if parts is not None and config is not None:
        raise UserError("give `parts` or `config`: an anatomy that was read already reads no config")
    parts = anatomy.read(model, config) if parts is None else parts
    if name is not None:
        check_name("assignment", name, (*NAMED, *BY_PART))
    automatic = BY_PART[name](parts) if name in BY_PART else None
    usual = NAMED[name if name in NAMED else "none"]
    chosen = [usual[i] if given in (None, "none") else named(given) for i, given in enumerate((attention, mlp))]
    wanted = [*rules, Rule("attention", chosen[0]), Rule("mlp", chosen[1])]
    parameters = dict(model.named_parameters())
    used: set[int] = set()
    entries: list[Entry] = []
    unasked: list[Part] = []
    for part in parts:
        if part.tied_to is not None or part.name not in parameters:
            continue
        index = next((i for i, rule in enumerate(wanted) if _applies(rule, part, explicit=i < len(rules))), None)
        if index is not None:
            used.add(index)
        if index is None or index >= len(rules):
            unasked.append(part)
        rule = Rule("", None) if index is None else wanted[index]
        if automatic and index is not None and index >= len(rules) and (attention, mlp)[index - len(rules)] is None:
            rule = Rule(rule.match, automatic(part))
        if rule.manifold is not None and not part.is_matrix:
            raise UserError(
                f"rule {rule.match!r} puts {part.name} ({part.role}, shape {tuple(part.shape)}) on {label(rule.manifold)}; a manifold "
                "here holds matrices only. Narrow the rule, or give it manifold=None for AdamW."
            )
        split = parts.heads(part) if per_head and rule.manifold is not None and part.heads else (part,)
        entries += [Entry(p, parameters[part.name], rule.manifold, rule.lr, rule.weight_decay) for p in split]
    _check_rules(rules, used, parts)
    assignment = Assignment(tuple(entries))
    _check_cover(assignment, parameters)
    _tell_left_out([p for p in unasked if parameters[p.name].requires_grad])
    if not any(entry.manifold is not None for entry in assignment):
        raise UserError(
            f"no attention or MLP matrix was recognised in this {type(model).__name__} (family {parts.family!r}), so nothing "
            "would get a manifold. Name them: rules=[Rule('layers.*.weight', gnomon.Stiefel())]."
        )
    return assignment


def label(manifold: Manifold) -> str:
    """The manifold as one writes it: `Stiefel()`, `DGram(cap=4.0)`."""
    changed = [f for f in fields(manifold) if getattr(manifold, f.name) != f.default]
    return f"{type(manifold).__name__}({', '.join(f'{f.name}={getattr(manifold, f.name)!r}' for f in changed)})"


def _applies(rule: Rule, part: Part, explicit: bool) -> bool:
    """The built-in rules take only what is known to be a matrix of attention or MLP; the user's take what they name.

    A "linear" layer that is not square maps into or out of the stream: it may be a head.
    """
    known = part.is_matrix and not part.doubt and (part.role != "linear" or part.shape[0] == part.shape[1])
    return rule.matches(part) and (explicit or known)


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)


def _optimizer(entry: Entry) -> str:
    if not entry.parameter.requires_grad:
        return "frozen"
    return "AdamW" if entry.manifold is None else "ManifoldMuon"


def _check_rules(rules: Sequence[Rule], used: set[int], parts: Anatomy) -> None:
    for index, rule in enumerate(rules):
        if index in used:
            continue
        tied = [part for part in parts if part.tied_to is not None and rule.matches(part)]
        if tied:
            raise UserError(
                f"rule {rule.match!r} matches only {tied[0].name}, which is tied to {tied[0].tied_to}; name that one instead"
            )
        if any(rule.matches(part) for part in parts):
            raise UserError(f"rule {rule.match!r} is never reached: an earlier rule takes all it matches")
        options = {part.name for part in parts} | {part.role for part in parts} | {"attention", "mlp"} | set(ROLES)
        raise UserError(f"rule {rule.match!r} matches no parameter. {suggest(rule.match, options)}")


def _check_cover(assignment: Assignment, parameters: dict[str, nn.Parameter]) -> None:
    """Every parameter is there once, each of its numbers in one part, and no tensor has two optimizers."""
    by_name: dict[str, list[Entry]] = {}
    for entry in assignment:
        by_name.setdefault(entry.part.name, []).append(entry)
    for name, parameter in parameters.items():
        entries = by_name.get(name, [])
        covered = sum(entry.part.block.size(tuple(parameter.shape)) for entry in entries)
        if covered != parameter.numel():
            raise UserError(
                f"{name}: the anatomy's parts cover {covered} of its {parameter.numel()} numbers. `parts` was read from "
                "another model; leave it out, and it is read from this one."
            )
        if len({entry.manifold is None for entry in entries}) > 1:
            roles = ", ".join(f"{entry.part.role} on {entry.manifold or 'AdamW'}" for entry in entries)
            raise UserError(f"{name} is one tensor, and cannot be split between AdamW and manifolds: {roles}")


def _tell_left_out(unasked: list[Part]) -> None:
    """Warn of what should have a manifold by its role and has none, though no rule of the user said so."""
    inside = [part for part in unasked if part.sublayer in ("attention", "mlp")]
    adapters, doubtful = [p for p in inside if p.adapter], [p for p in inside if p.doubt and not p.adapter]
    for found, why in (
        (adapters, "adapters start at zero, which no manifold holds; a rule over names gives them one"),
        (doubtful, f"{doubtful[0].doubt if doubtful else ''}; give assign that config, or name them in a rule"),
    ):
        if found:
            what = f"{found[0].name} ({found[0].role}){more(found)} left to AdamW"
            warnings.warn(f"{what}: {why}. A rule with None says that this is meant.", UserWarning, stacklevel=3)


def more(rows: Sequence[Any]) -> str:
    """How many there are besides the first."""
    return f" and {len(rows) - 1} more" if len(rows) > 1 else ""


def retarget(assignment: Assignment, model: nn.Module) -> Assignment:
    """The same assignment over the parameters of another copy of the model (a deepcopy, a sharded one), by name.

    Raises:
        UserError: a parameter is missing there.
    """
    parameters = dict(model.named_parameters())
    for entry in assignment:
        if entry.part.name not in parameters:
            raise UserError(f"no parameter {entry.part.name!r} in this model. {suggest(entry.part.name, parameters)}")
    return Assignment(tuple(replace(entry, parameter=parameters[entry.part.name]) for entry in assignment))
