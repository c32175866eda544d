"""ManifoldMuon: each weight matrix takes spectral-norm steps on its own manifold; AdamW moves the rest.

One step on a matrix W with gradient G (arXiv 2606.13276; `advance` below is the whole of it):

    buffer <- mu buffer + (1 - mu) G                     momentum, as torch.optim.Muon
    U      <- mu buffer + (1 - mu) G                     Nesterov: look one step ahead
    A      <- argmax <U, A> over tangent A, |A|_2 <= 1   `gnomon.geometry.steepest`
    W      <- retract(decay(W) - lr scale A)             `gnomon.geometry.manifolds`

Fused tensors are cut into the parts of their `Assignment`; parts of equal shape on the same manifold step as one batch.
Everything that must survive a checkpoint, a deepcopy or a pickle lives in `param_groups` and `state`.

Legend: W_MN a matrix, outputs x inputs; mu momentum.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gnomon import sharding
from gnomon.anatomy import Block
from gnomon.errors import UserError, check_name
from gnomon.geometry import steepest
from gnomon.geometry.manifolds import Euclidean, Manifold
from gnomon.geometry.polar import spectral_norm
from gnomon.optim import ownership
from gnomon.optim.groups import describe, from_assignment, from_plain, to_plain
from gnomon.optim.rules import Assignment, label

SCALES: dict[str, Callable[[int, int], float]] = {
    "none": lambda out, into: 1.0,
    "spectral": lambda out, into: math.sqrt(out / into),
    "rms": lambda out, into: 0.2 * math.sqrt(max(out, into)),
    "muon": lambda out, into: math.sqrt(max(1.0, out / into)),
}
"""Factors on lr by shape, for learning-rate transfer: "none" (lr is the spectral norm of the step, arXiv 2606.13276),
"spectral" (arXiv 2310.17813), "rms" (steps as long as AdamW's, arXiv 2502.16982), "muon" (torch.optim.Muon's default)."""


def advance(
    W_MN: Tensor,
    U_MN: Tensor,
    manifold: Manifold,
    lr: float | Tensor,
    factor: float = 1.0,
    *,
    weight_decay: float = 0.0,
    steps: int = 0,
    warm: Tensor | None = None,
    near: bool = True,
    paper: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """One step of W_MN (..., M, N), which is on `manifold`, along the update U_MN.

    Args:
        lr: learning rate; the step's spectral norm is lr * factor.
        factor: shape factor, see `SCALES`.
        weight_decay: decoupled, with the manifold's meaning: W for Euclidean, column norms for DGram, nothing for Stiefel
            and Oblique.
        steps, warm: accuracy and start of the solver, see `gnomon.geometry.steepest.direction`.
        near: one cubic step brings the result back to the manifold; False iterates to convergence.
        paper: the paper's fixed-step dual in bf16 (20 steps), for reproduction.

    Returns:
        the new W_MN, and the dual variable to start from next time (None where there is none).
    """
    if paper and not isinstance(manifold, Euclidean):
        found = steepest.paper_direction(W_MN, U_MN, manifold)
    else:
        found = steepest.direction(W_MN, U_MN, manifold, steps=steps, warm=warm)
    if weight_decay:
        W_MN = manifold.decay(W_MN, 1 - lr * weight_decay)
    # In place: A is ours, and a fresh temporary of its size costs as much as the arithmetic.
    moved = found.A.to(W_MN.dtype).mul_(-lr * factor).add_(W_MN)
    return manifold.retract(moved, near=near), found.normal


class ManifoldMuon(torch.optim.Optimizer):
    """Spectral-norm steepest descent on a manifold for each matrix, AdamW for everything else.

    >>> optimizer = gnomon.ManifoldMuon(gnomon.assign(model, "hetero"), lr=0.02)

    At construction weights are put on their manifolds; `placed` reports by how much that changed each. A gradient that is
    not finite raises before anything is touched. Parameters whose gradient is None are left as they are. Matrices in bf16
    or fp16 keep an fp32 master copy, since such weights would swallow small steps.

    Args:
        assignment: from `gnomon.assign`; or parameter groups, dicts with "params" (of (name, parameter) pairs) and
            "manifold" (None for AdamW).
        lr: peak learning rate of the matrices: the spectral norm of a step (times `scale`).
        momentum, nesterov: as torch.optim.Muon.
        weight_decay: of the matrices; see `advance` for what it means where.
        steps: refinements of the direction, 0 … 10; see `gnomon.geometry.steepest.direction`.
        warm_start: keep each matrix's dual variable between steps (one more buffer of the short side squared).
        scale: how lr depends on the shape, a key of `SCALES`.
        spectral_cap: bound on the largest singular value of Euclidean matrices (the whole matrix is scaled down); for
            DGram use its own cap.
        polish_every: steps between retractions to convergence; in between one cubic step suffices.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: for the rest; decay touches matrices (ndim >= 2) only.
        check_finite: look for NaN and infinity in gradients (one wait for the device a step).
        compile: compile the step of each shape; learning rates are tensors then, so schedules do not recompile.
        paper: the paper's direction solver, for reproduction; give DGram(paper=True) as well for its retraction.

    Raises:
        UserError: groups without names, a matrix that its manifold cannot hold, weights that are not finite.
    """

    def __init__(
        self,
        assignment: Assignment | Iterable[Mapping[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        weight_decay: float = 0.0,
        steps: int = 0,
        warm_start: bool = False,
        scale: str = "none",
        spectral_cap: float | None = None,
        polish_every: int = 100,
        adamw_lr: float = 6e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.1,
        check_finite: bool = True,
        compile: bool = False,
        paper: bool = False,
    ):
        check_name("scale", scale, SCALES)
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("adamw_lr", adamw_lr), ("steps", steps)):
            if value < 0:
                raise UserError(f"{name} must not be negative, got {value}")
        if not 0 <= momentum < 1:
            raise UserError(f"momentum must lie in [0, 1), got {momentum}")
        defaults = dict(
            lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, steps=steps, warm_start=warm_start,
            scale=scale, spectral_cap=spectral_cap, polish_every=polish_every, adamw_lr=adamw_lr, adamw_betas=adamw_betas,
            adamw_eps=adamw_eps, adamw_weight_decay=adamw_weight_decay, check_finite=check_finite, compile=compile, paper=paper,
        )  # fmt: skip
        self.placed: list[dict[str, Any]] = []
        groups = (
            from_assignment(assignment) if isinstance(assignment, Assignment) else [dict(group) for group in assignment]
        )
        super().__init__(groups, defaults)
        self._link()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with "params" of (name, parameter) pairs and "manifold" (None, or absent: AdamW).

        Raises:
            UserError: parameters without names, an unknown option, or a parameter that is no matrix on a manifold.
        """
        group, d = dict(param_group), self.defaults
        named = list(group["params"])
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
            raise UserError(
                "ManifoldMuon needs names: give (name, parameter) pairs as model.named_parameters() yields them. Checkpoints "
                "find their state by name; by order, two matrices of one shape could swap theirs."
            )
        manifold = group.pop("manifold", None)
        parts = group.pop("parts", None) or ({name: [(Block(), manifold)] for name, _ in named} if manifold else None)
        if parts is None:
            defaults = dict(
                lr=d["adamw_lr"], betas=d["adamw_betas"], eps=d["adamw_eps"], weight_decay=d["adamw_weight_decay"]
            )
            filled = {**torch.optim.AdamW([torch.zeros(1)]).defaults, **defaults, "manifolds": None}
        else:
            own = ("lr", "momentum", "nesterov", "weight_decay", "steps", "warm_start", "scale", "spectral_cap",
                   "polish_every", "paper")  # fmt: skip
            filled = {**{key: d[key] for key in own}, "step": 0, "manifolds": to_plain(parts)}
        unknown = group.keys() - filled.keys() - {"params", "param_names", "initial_lr"}
        if unknown:
            raise UserError(
                f"a group of ManifoldMuon has no option {', '.join(map(repr, sorted(unknown)))}; nothing would read it"
            )
        super().add_param_group({**filled, **group})
        added = self.param_groups[-1]
        # The base class fills in the defaults of the other kind of group.
        self.param_groups[-1] = {
            key: added[key] for key in added if key in filled or key in ("params", "param_names", "initial_lr")
        }
        if parts is not None:
            self._place(self.param_groups[-1], parts)
        if hasattr(self, "_adamw"):
            self._link()

    @torch.no_grad()
    def _place(self, group: dict[str, Any], parts: dict[str, list[tuple[Block, Manifold]]]) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, parameter in zip(group["param_names"], group["params"]):
            if not parameter.requires_grad:
                continue
            full = sharding.whole(parameter)
            for block, manifold in parts[name]:
                W = block.take(full).float().cpu()
                if W.ndim != 2:
                    raise UserError(
                        f"{name} has shape {tuple(W.shape)}; {label(manifold)} holds matrices. Give it to AdamW."
                    )
                if group["weight_decay"] and not manifold.decays:
                    warnings.warn(f"weight decay is a no-op on {label(manifold)} ({name})", stacklevel=4)
                try:
                    new = manifold.project(W, generator=generator)
                except UserError as error:
                    raise UserError(f"{name}: {error}") from error
                change = float((new - W).norm() / W.norm().clamp_min(torch.finfo(W.dtype).tiny))
                self.placed.append(
                    {"name": name, "shape": tuple(W.shape), "manifold": label(manifold), "change": change}
                )
                block.put(full, new.to(full))
            sharding.write(parameter, full)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns the closure's loss, if there is a closure.

        Raises:
            UserError: a gradient is not finite; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.defaults["check_finite"]:
            self._refuse_non_finite()
        for group in self.param_groups:
            if group["manifolds"] is not None:
                self._matrix_step(group)
        self._adamw.step()
        return loss

    def _matrix_step(self, group: dict[str, Any]) -> None:
        live = ownership.live([p for p in group["params"]])
        moving = [(name, p) for name, p, alive in zip(group["param_names"], group["params"], live) if alive]
        if not moving:
            return
        group["step"] += 1
        updates = self._momentum(group, [p for _, p in moving])
        targets = [self.state[p].get("master", p) for _, p in moving]
        # Over all that can move, so that an owner stays one when another matrix has no gradient for once.
        costs = [p.numel() * min(p.shape) * p.requires_grad for p in group["params"]]
        chosen = [rank for rank, alive in zip(ownership.owners(costs, ownership.world()), live) if alive]
        wholes = ownership.to_owners(targets, chosen)
        items = []
        for (name, p), W, U in zip(moving, wholes, ownership.to_owners(updates, chosen)):
            for number, (block, manifold) in enumerate(from_plain(group["manifolds"][name])):
                if W is None or U is None:
                    # Another rank's: only an owner keeps duals, so that a checkpoint holds no stale ones.
                    self.state[p].pop(f"dual.{number}", None)
                else:
                    items.append(_Item(p, W, block, manifold, block.take(W), block.take(U), f"dual.{number}"))
        batches: dict[tuple, list[_Item]] = {}
        for item in items:
            key = (item.manifold, item.W.shape, item.W.dtype, item.W.device)
            batches.setdefault(key, []).append(item)
        for (manifold, shape, *_), batch in batches.items():
            self._batch_step(group, manifold, shape, batch)
        for item in items:
            item.block.put(item.full, item.W)
        ownership.from_owners(targets, wholes, chosen)
        for (_, p), target in zip(moving, targets):
            if target is not p:
                sharding.local(p).copy_(sharding.local(target))

    def _batch_step(
        self, group: dict[str, Any], manifold: Manifold, shape: tuple[int, ...], batch: list[_Item]
    ) -> None:
        W, U = torch.stack([item.W for item in batch]), torch.stack([item.U for item in batch])
        if group["paper"]:
            # Its dual step is fixed, so the size of the update matters: there the buffer is a sum, here it is an average.
            U = U / (1 - group["momentum"])
        factor = SCALES[group["scale"]](*shape)
        lr, radius = group["lr"], getattr(manifold, "radius", 1.0)
        # A cubic step is enough for small steps from the manifold. Columns that start near zero turn by more than that in
        # their first steps; and now and then what cubic steps leave is polished away.
        settled = group["step"] > 10 and group["step"] % group["polish_every"] != 0
        near = settled and float(lr) * factor <= 0.1 * radius
        warm = self._warm(group, batch)
        compiled = self.defaults["compile"]
        call = _compiled_advance() if compiled else advance
        W, dual = call(
            W, U, manifold, torch.as_tensor(lr, dtype=W.dtype, device=W.device) if compiled else lr, factor,
            weight_decay=group["weight_decay"], steps=group["steps"], warm=warm, near=near, paper=group["paper"],
        )  # fmt: skip
        if group["spectral_cap"] is not None and isinstance(manifold, Euclidean):
            W = W * (group["spectral_cap"] / spectral_norm(W).clamp_min(group["spectral_cap"]))
        for item, new in zip(batch, W):
            item.W = new
        if group["warm_start"] and dual is not None:
            for item, new in zip(batch, dual):
                self.state[item.parameter][item.dual] = new.clone()

    def _warm(self, group: dict[str, Any], batch: list[_Item]) -> Tensor | None:
        if not group["warm_start"]:
            return None
        duals = [self.state[item.parameter].get(item.dual) for item in batch]
        return None if any(dual is None for dual in duals) else torch.stack(duals)  # type: ignore[arg-type]

    def _momentum(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        """Advance the momentum buffers and return the updates, in fp32 or wider, never aliasing a buffer or a gradient.

        The average form of momentum differs from the sum by a factor that the direction does not see.
        """
        wide = [torch.promote_types(p.dtype, torch.float32) for p in parameters]
        for p, dtype in zip(parameters, wide):
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p, dtype=dtype)
                if p.dtype != dtype:
                    self.state[p]["master"] = p.detach().to(dtype)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        gradients = [sharding.local(g).to(dtype) for g, dtype in zip(gradients, wide)]
        buffers = [self.state[p]["momentum"] for p in parameters]
        local = [sharding.local(buffer) for buffer in buffers]
        mu = group["momentum"]
        torch._foreach_lerp_(local, gradients, 1 - mu)
        updates = torch._foreach_lerp(gradients, local, mu) if group["nesterov"] else [b.clone() for b in local]
        return [sharding.like(update, buffer) for update, buffer in zip(updates, buffers)]

    def _refuse_non_finite(self) -> None:
        named = [
            (name, sharding.local(p.grad))
            for group in self.param_groups
            for name, p in zip(group["param_names"], group["params"])
            if p.grad is not None
        ]
        norms = (
            torch.stack([n.float() for n in torch._foreach_norm([g for _, g in named])]) if named else torch.zeros(1)
        )
        if ownership.anywhere(~norms.isfinite().all()):
            bad = [name for (name, g) in named if not g.isfinite().all()]
            where = (
                ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "") if bad else "another process"
            )
            raise UserError(
                f"the gradient of {where} is not finite; no weight was changed. Skip this step, lower the learning rate, or "
                "look at the loss that made it."
            )

    @torch.no_grad()
    def measure(self) -> dict[str, dict[str, float]]:
        """How the matrices and their last updates fare: `feasibility` (violation), and `tangency` and `alignment` of the
        direction the momentum gives now, by parameter and part. Takes singular value decompositions: for probes only.
        """
        found: dict[str, dict[str, float]] = {"feasibility": {}, "tangency": {}, "alignment": {}}
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"]) if group["manifolds"] is not None else ():
                parts = from_plain(group["manifolds"][name])
                full = sharding.whole(p)
                momentum = self.state[p].get("momentum") if p in self.state else None
                for number, (block, manifold) in enumerate(parts):
                    label = name.removesuffix(".weight") + (f"[{number}]" if len(parts) > 1 else "")
                    W = block.take(full).float()
                    found["feasibility"][label] = float(manifold.violation(W))
                    if momentum is None or isinstance(manifold, Euclidean):
                        continue
                    U = block.take(sharding.whole(momentum))
                    if group["paper"]:
                        U = U / (1 - group["momentum"])
                    solve = (
                        steepest.paper_direction
                        if group["paper"]
                        else partial(steepest.direction, steps=group["steps"])
                    )
                    direction = solve(W, U, manifold)
                    found["tangency"][label] = float(direction.tangency)
                    found["alignment"][label] = float(direction.alignment)
        return {key: values for key, values in found.items() if values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made with the same assignment.

        Raises:
            UserError: parameters, their order, or the manifold of one differ; the message names the first.
        """
        theirs = {n: describe(g, n) for g in state_dict["param_groups"] for n in g["param_names"]}
        ours = {n: describe(g, n) for g in self.param_groups for n in g["param_names"]}
        for name in [*ours, *theirs]:
            a, b = (side.get(name, "missing") for side in (theirs, ours))
            if a != b:
                raise UserError(
                    f"{name}: the checkpoint has {a}, this optimizer {b}. Build it with the same assignment."
                )
        order = [[g["param_names"] for g in groups] for groups in (state_dict["param_groups"], self.param_groups)]
        if order[0] != order[1]:
            raise UserError("the checkpoint holds the same parameters in another order; their state would be swapped")
        super().load_state_dict(state_dict)
        self._link()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("placed", [])
        self._link()

    def _link(self) -> None:
        """An AdamW over our own groups and state: what it keeps is ours to save."""
        self._adamw = torch.optim.AdamW([torch.zeros(1)])
        self._adamw.param_groups = [group for group in self.param_groups if group["manifolds"] is None]
        self._adamw.state = self.state


class _Item:
    """One part on its way through a step."""

    __slots__ = ("parameter", "full", "block", "manifold", "W", "U", "dual")

    def __init__(
        self, parameter: Tensor, full: Tensor, block: Block, manifold: Manifold, W: Tensor, U: Tensor, dual: str
    ):
        self.parameter, self.full, self.block, self.manifold = parameter, full, block, manifold
        self.W, self.U, self.dual = W, U, dual


_COMPILED: list[Callable] = []


def _compiled_advance() -> Callable:
    if not _COMPILED:
        _COMPILED.append(torch.compile(advance, dynamic=False))
    return _COMPILED[0]
