"""Which optimizer moves which parameter: the one place that knows what a recipe's optimizer names mean."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gnomon import anatomy
from gnomon.errors import UserError
from gnomon.geometry.manifolds import DGram, Manifold, SpectralBall, SpectralSphere, Stiefel
from gnomon.optim import BY_PART, NAMED, Assignment, ManifoldMuon, PlacementWarning, assign, quiet_step
from gnomon.train.recipe import OptimConfig


def assignment(model: nn.Module, config: OptimConfig) -> Assignment | None:
    """What each part of each parameter gets from ManifoldMuon; None where another optimizer moves the matrices.

    Raises:
        UserError: logits are to be clipped by scaling matrices whose norm is not free.
    """
    if config.name != "manifold-muon":
        return None
    if config.assignment in BY_PART:
        assigned = assign(model, config.assignment)
    else:
        attention, mlp = (_configured(manifold, config) for manifold in NAMED[config.assignment])
        assigned = assign(model, attention=attention, mlp=mlp)
    held = [e.manifold for e in assigned if e.part.role in ("query", "key") and e.manifold and not e.manifold.decays]
    if config.logit_clip is not None and held:
        raise UserError(
            f"optim.logit_clip scales query and key down, which optim.assignment={config.assignment} holds on "
            f"{type(held[0]).__name__}, where norms are fixed: they would leave it and come back. Set optim.logit_clip=null, bound "
            "the logits with model.attention_softcap or model.qk_norm, or take another assignment."
        ).of("main")
    return assigned


def build(model: nn.Module, config: OptimConfig, assigned: Assignment | None = None) -> torch.optim.Optimizer:
    """The optimizer of a recipe over `model`; every group remembers its peak rate as `initial_lr`.

    Parameters are given with their names, so that a checkpoint can tell when they come back in another order.

    Args:
        assigned: where it is known already, the `assignment`.
    """
    if config.name == "manifold-muon":
        with warnings.catch_warnings():
            # A fresh model is drawn to be placed; of a loaded one `init_from.report_init` says how far each matrix moved.
            warnings.simplefilter("ignore", PlacementWarning)
            optimizer = _manifold_muon(assigned or assignment(model, config), config)  # type: ignore[arg-type]
    else:
        optimizer = {"adamw": _adamw, "muon": _muon}[config.name](model, config)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, ratio: float) -> None:
    """Set every group's rate to `ratio` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * ratio


def _adamw(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_adamw_groups(model, config, config.lr, config.weight_decay), **_adamw_options(config))


def _muon(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    hidden = {entry.part.name for entry in assign(model, "none") if entry.manifold is not None}
    muon = torch.optim.Muon(
        [(name, p) for name, p in model.named_parameters() if name in hidden],  # type: ignore[arg-type]
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        # Its default of 1e-7 is a floor under the norm of an update: clipped hard, a gradient would hardly move its matrix.
        eps=1e-30,
    )
    rest = _adamw_groups(model, config, config.adamw_lr, _adamw_decay(config), without=hidden)
    return CombinedOptimizer(muon, torch.optim.AdamW(rest, **_adamw_options(config)))


def _manifold_muon(assigned: Assignment, config: OptimConfig) -> torch.optim.Optimizer:
    entries = [
        entry if entry.manifold is not None else replace(entry, lr=_own_rate(entry.part.role, entry.parameter, config))
        for entry in assigned
    ]
    return ManifoldMuon(
        Assignment(tuple(entries)),
        lr=config.lr,
        momentum=config.momentum,
        direction=config.direction,
        weight_decay=config.weight_decay if config.assignment in ("none", "qk-ball") else config.manifold_decay,
        scale=config.scale,
        steps=config.solver_steps,
        adamw_lr=config.adamw_lr,
        adamw_betas=config.betas,
        adamw_eps=config.eps,
        adamw_weight_decay=_adamw_decay(config),
        # The loop looks at loss and gradient norm before every step.
        check_finite=False,
    )


def _adamw_groups(
    model: nn.Module, config: OptimConfig, lr: float, decay: float, without: Collection[str] = ()
) -> list[dict[str, Any]]:
    """One group for each pair of rate and weight decay, matrices before what has one axis and never decays."""
    roles = {part.name: part.role for part in anatomy.read(model)}
    groups: dict[tuple[float, float], list[tuple[str, nn.Parameter]]] = {}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and name not in without]
    for name, p in sorted(named, key=lambda pair: pair[1].ndim < 2):
        own = _own_rate(roles[name], p, config)
        groups.setdefault((lr if own is None else own, decay if p.ndim >= 2 else 0.0), []).append((name, p))
    return [{"params": params, "lr": rate, "weight_decay": share} for (rate, share), params in groups.items()]


def _own_rate(role: str, parameter: nn.Parameter, config: OptimConfig) -> float | None:
    """The rate that a recipe gives parameters of this kind; None for AdamW's."""
    if parameter.ndim < 2:
        return config.vector_lr
    return {"embedding": config.embedding_lr, "positions": config.embedding_lr, "head": config.head_lr}.get(role)


def _adamw_decay(config: OptimConfig) -> float:
    return config.weight_decay if config.adamw_weight_decay is None else config.adamw_weight_decay


def _adamw_options(config: OptimConfig) -> dict[str, Any]:
    return {"betas": config.betas, "eps": config.eps, "fused": True}


def _configured(manifold: Manifold, config: OptimConfig) -> Manifold:
    if isinstance(manifold, DGram):
        return DGram(cap=config.dgram_cap, paper=config.paper)
    if isinstance(manifold, SpectralBall | SpectralSphere):
        return type(manifold)(radius=config.spectral_radius)
    return Stiefel(paper=config.paper) if isinstance(manifold, Stiefel) else manifold


class CombinedOptimizer(torch.optim.Optimizer):
    """Several new optimizers as one: their own groups, in order, and one state for all; a step is a step of each."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        super().__init__([group for o in optimizers for group in o.param_groups], {})
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What torch calls at the end of `load_state_dict`: groups and state may be other objects now."""
        super().__setstate__(state)
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            quiet_step(optimizer)
        return loss
