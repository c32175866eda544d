"""ManifoldMuon: each weight matrix takes spectral-norm steps on its own manifold; AdamW moves the rest.

One step on a matrix W with gradient G (arXiv 2606.13276):

    U <- momentum of G, or Adam's update                 `gnomon.optim.updates`
    W <- advance(W, U)                                   `gnomon.optim.matrix_step`

Fused tensors are cut into the parts of their `Assignment`. Everything that must survive a checkpoint, a deepcopy or a
pickle lives in `param_groups` and `state`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon import sharding
from gnomon.anatomy import Block
from gnomon.errors import UserError, check_name, suggest
from gnomon.geometry import steepest
from gnomon.geometry.manifolds import Sphere, named
from gnomon.optim import ownership
from gnomon.optim.groups import Parts, from_plain, groups_of, matched, to_plain
from gnomon.optim.matrix_step import SCALES, Matrix, advance_all, sized
from gnomon.optim.placement import place, warn_of
from gnomon.optim.rules import Assignment, label, more
from gnomon.optim.updates import DIRECTIONS, updates


def quiet_step(optimizer: torch.optim.Optimizer) -> None:
    """A step of an optimizer that is part of another, without hooks: whoever listens to all optimizers hears one."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


class ManifoldMuon(torch.optim.Optimizer):
    """Spectral-norm steepest descent on a manifold for each matrix, AdamW for everything else.

    >>> optimizer = gnomon.ManifoldMuon(gnomon.assign(model, "hetero"), lr=0.02)

    At construction weights are put on their manifolds; `placed` reports by how much that changed each, and a change of more
    than half is warned of: a fresh model does not mind, a trained one loses what it knew. A gradient that is not finite
    raises before anything is touched. Parameters whose gradient is None are left as they are. Matrices in bf16 or fp16 keep
    an fp32 master copy, since such weights would swallow small steps; what others write into the weight holds.

    Args:
        assignment: from `gnomon.assign`; or parameter groups, dicts with "params" (of (name, parameter) pairs) and
            "manifold" (a manifold or its name; None for AdamW).
        lr: peak learning rate of the matrices: the spectral norm of a step, times `scale`. Euclidean matrices step as
            torch.optim.Muon's do at the same lr with scale="muon". On Sphere it is the relative length of a step, whatever `scale`.
        momentum, nesterov: as torch.optim.Muon.
        direction: "msign", the steepest descent of the manifold; or "adam", for matrices on Sphere: Adam's update, with
            adamw_betas and adamw_eps (AdamH of arXiv 2606.16899).
        weight_decay: of the matrices; see `gnomon.optim.advance` for what it means where.
        scale: how lr depends on the shape, a key of `SCALES`.
        steps: refinements of the direction, 0 … 10; see `gnomon.geometry.steepest.direction`.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: for the rest; decay touches matrices (ndim >= 2) only.
        check_finite: look for NaN and infinity in gradients (one wait for the device a step).
        compile: compile the step of each shape; learning rates are tensors then, so schedules do not recompile.

    Raises:
        UserError: groups without names, a matrix that its manifold cannot hold, weights that are not finite.
    """

    def __init__(
        self,
        assignment: Assignment | Iterable[Mapping[str, Any]],
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        direction: str = "msign",
        weight_decay: float = 0.0,
        scale: str = "none",
        steps: int = 0,
        adamw_lr: float = 6e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.1,
        check_finite: bool = True,
        compile: bool = False,
    ):
        check_name("scale", scale, SCALES)
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("adamw_lr", adamw_lr), ("steps", steps)):
            if value < 0:
                raise UserError(f"{name} must not be negative, got {value}")
        if not 0 <= momentum < 1:
            raise UserError(f"momentum must lie in [0, 1), got {momentum}")
        matrices = dict(
            lr=lr, momentum=momentum, nesterov=nesterov, direction=direction, weight_decay=weight_decay, scale=scale,
            steps=steps,
        )  # fmt: skip
        rest = dict(lr=adamw_lr, betas=adamw_betas, eps=adamw_eps, weight_decay=adamw_weight_decay)
        defaults = matrices | {f"adamw_{key}": value for key, value in rest.items()}
        self.placed: list[dict[str, Any]] = []
        super().__init__(groups_of(assignment), defaults | dict(check_finite=check_finite, compile=compile))
        self._link()

    def _options(self, matrices: bool) -> dict[str, Any]:
        """What a group of matrices, or one of AdamW's, holds where it does not say otherwise."""
        d = self.defaults
        if matrices:
            own = ("lr", "momentum", "nesterov", "direction", "weight_decay", "scale", "steps")
            adam = {key: d[f"adamw_{key}"] for key in ("betas", "eps")}
            return {**{key: d[key] for key in own}, **adam, "step": 0, "unplaced": []}
        adamw = torch.optim.AdamW([torch.zeros(1)]).defaults
        return {key: d.get(f"adamw_{key}", value) for key, value in adamw.items()} | {"manifolds": None}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with "params" of (name, parameter) pairs and "manifold" (None, or absent: AdamW).

        Raises:
            UserError: parameters without names or with another's, an unknown option, or a parameter that is no matrix on
                a manifold.
        """
        group = dict(param_group)
        pairs = group["params"] = list(group["params"])
        if not pairs:
            group["param_names"] = []
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise UserError(
                "ManifoldMuon needs names: give (name, parameter) pairs as model.named_parameters() yields them. Checkpoints "
                "find their state by name; by order, two matrices of one shape could swap theirs."
            )
        names = [name for g in self.param_groups for name in g["param_names"]] + [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"two parameters have the name {twice!r}; a checkpoint could not tell their state apart")
        manifold, parts = group.pop("manifold", None), group.pop("parts", None)
        if manifold is not None:
            parts = {name: [(Block(), named(manifold))] for name, _ in pairs}
        options = self._options(matrices=parts is not None)
        for option in group.keys() - options.keys() - {"params", "param_names", "initial_lr"}:
            raise UserError(
                f"a group of {'matrices' if parts else 'AdamW'} has no option {option!r}; nothing would read it. "
                f"{suggest(option, options)}"
            )
        if parts is not None:
            _check_direction(group.get("direction", options["direction"]), parts)
            options["manifolds"] = to_plain(parts)
        super().add_param_group({**options, **group})
        # The base class fills in the defaults of the other kind of group.
        added = self.param_groups[-1]
        kept = options.keys() | {"params", "param_names", "initial_lr"}
        self.param_groups[-1] = {key: value for key, value in added.items() if key in kept}
        if parts is not None:
            self._place(self.param_groups[-1], parts)
        if hasattr(self, "_adamw"):
            self._link()

    def _place(self, group: dict[str, Any], parts: Parts) -> None:
        fixed = [label(m) for name in group["param_names"] for _, m in parts[name] if not m.decays]
        if group["weight_decay"] and fixed:
            warnings.warn(f"weight decay is a no-op on {' and '.join(dict.fromkeys(fixed))}", stacklevel=5)
        named_parameters = dict(zip(group["param_names"], group["params"]))
        group["unplaced"] = [name for name, p in named_parameters.items() if not p.requires_grad]
        try:
            placed = place(named_parameters, parts)
        except UserError:
            self.param_groups.pop()
            raise
        self.placed += placed
        warn_of(placed)

    def _place_thawed(self, group: dict[str, Any], moving: list[tuple[str, Tensor]]) -> None:
        """Place what was frozen when its group was added and has a gradient now."""
        thawed = {name: p for name, p in moving if name in group["unplaced"]}
        if thawed:
            group["unplaced"] = [name for name in group["unplaced"] if name not in thawed]
            placed = place(thawed, {name: from_plain(group["manifolds"][name]) for name in thawed})
            self.placed += placed
            warn_of(placed)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns the closure's loss, if there is a closure.

        Raises:
            UserError: a gradient is sparse or not finite; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        for group in self.param_groups:
            if group["manifolds"] is not None:
                self._matrix_step(group)
        quiet_step(self._adamw)
        return loss

    def _matrix_step(self, group: dict[str, Any]) -> None:
        live = ownership.live(list(group["params"]))
        moving = [(name, p) for name, p, alive in zip(group["param_names"], group["params"], live) if alive]
        if not moving:
            return
        self._place_thawed(group, moving)
        group["step"] += 1
        found = updates(group, [p for _, p in moving], self.state)
        targets = [self._wide(p) for _, p in moving]
        # Over all that can move, so that an owner stays one when another matrix has no gradient for once.
        costs = [p.numel() * min(p.shape) * p.requires_grad for p in group["params"]]
        chosen = [rank for rank, alive in zip(ownership.owners(costs, ownership.world()), live) if alive]
        wholes = ownership.to_owners(targets, chosen)
        mine = []
        for (name, _), W, U in zip(moving, wholes, ownership.to_owners(found, chosen)):
            if W is not None and U is not None:
                mine += [Matrix(W, U, block, manifold) for block, manifold in from_plain(group["manifolds"][name])]
        advance_all(mine, group, self.defaults["compile"])
        ownership.from_owners(targets, wholes, chosen)
        for (_, p), target in zip(moving, targets):
            if target is not p:
                sharding.local(p).copy_(sharding.local(target))

    def _wide(self, p: Tensor) -> Tensor:
        """The tensor to step: the weight, or its fp32 master where it is narrower.

        Where a weight is not the rounding of its master, somebody else wrote it (QK-clip, a loader), and that holds.
        """
        dtype = torch.promote_types(p.dtype, torch.float32)
        if p.dtype == dtype:
            return p
        if "master" not in self.state[p]:
            self.state[p]["master"] = p.detach().to(dtype)
        master, share = sharding.local(self.state[p]["master"]), sharding.local(p)
        master.copy_(torch.where(master.to(p.dtype) == share, master, share.to(dtype)))
        return self.state[p]["master"]

    def _check_gradients(self) -> None:
        named_gradients = [
            (name, sharding.local(p.grad))
            for group in self.param_groups
            for name, p in zip(group["param_names"], group["params"])
            if p.grad is not None
        ]
        for name, gradient in named_gradients:
            if gradient.layout != torch.strided:
                raise UserError(
                    f"the gradient of {name} is sparse; ManifoldMuon and AdamW need dense ones. Use sparse=False in its "
                    "embedding, or give it an optimizer of its own (torch.optim.SparseAdam)."
                )
        if not self.defaults["check_finite"]:
            return
        norms = torch._foreach_norm([g for _, g in named_gradients]) if named_gradients else [torch.zeros(())]
        if not ownership.ranks_where(~torch.stack([norm.float() for norm in norms]).isfinite().all()):
            return
        # The norm of finite numbers can overflow, so these are looked at one by one, and only now.
        bad = [name for name, g in named_gradients if not g.isfinite().all()]
        if ranks := ownership.ranks_where(torch.tensor(bool(bad), device=norms[0].device)):
            where = f"the gradient of {bad[0]}{more(bad)}" if bad else f"a gradient on process {ranks[0]}"
            raise UserError(
                f"{where} is not finite; no weight was changed. Skip this step, lower the learning rate, or look at the "
                "loss that made it."
            )

    @torch.no_grad()
    def measure(self) -> dict[str, dict[str, float]]:
        """How the matrices and their last updates fare: `feasibility` (violation), and `tangency` and `alignment` of the
        direction the momentum gives now, by parameter and part. Takes singular value decompositions: for probes only.
        """
        found: dict[str, dict[str, float]] = {"feasibility": {}, "tangency": {}, "alignment": {}}
        for group in self.param_groups:
            if (manifolds := group["manifolds"]) is None:
                continue
            for name, p in zip(group["param_names"], group["params"]):
                parts = from_plain(manifolds[name])
                full = sharding.whole(p)
                momentum = self.state[p].get("momentum") if p in self.state else None
                for number, (block, manifold) in enumerate(parts):
                    key = name.removesuffix(".weight") + (f"[{number}]" if len(parts) > 1 else "")
                    W = block.take(full).float()
                    found["feasibility"][key] = float(manifold.violation(W))
                    if momentum is None or manifold.free:
                        continue
                    U = sized(block.take(sharding.whole(momentum)), manifold, group["momentum"])
                    direction = steepest.direction(W, U, manifold, steps=group["steps"])
                    found["tangency"][key] = float(direction.tangency)
                    found["alignment"][key] = float(direction.alignment)
        return {key: values for key, values in found.items() if values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made with the same assignment.

        Raises:
            UserError: parameters, their order, or the manifold of one differ; the message names the first.
        """
        saved: dict[int, dict[str, Any]] = {}
        order: list[list[int]] = []

        def compare(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            found = matched(given, self.param_groups)
            saved.update(found["state"])
            order.extend(group["params"] for group in given["param_groups"])
            return found

        def widen(_: torch.optim.Optimizer) -> None:
            """The base class gave every buffer its parameter's dtype; momenta and masters of narrow weights are wide."""
            for group, ids in zip(self.param_groups, order):
                for p, index in zip(group["params"], ids) if group["manifolds"] is not None else ():
                    dtype = torch.promote_types(p.dtype, torch.float32)
                    for key, value in saved.get(index, {}).items():
                        self.state[p][key] = value.to(device=p.device, dtype=dtype)

        # Last before loading and first after it: hooks of others may mend the names, and see what is right.
        handles = self.register_load_state_dict_pre_hook(compare), self.register_load_state_dict_post_hook(widen, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("placed", [])
        self._link()

    def _link(self) -> None:
        """An AdamW over our own groups and state: what it keeps is ours to save."""
        self._adamw = torch.optim.AdamW([torch.zeros(1)])
        self._adamw.param_groups = [group for group in self.param_groups if group["manifolds"] is None]
        self._adamw.state = self.state


def _check_direction(direction: str, parts: Parts) -> None:
    check_name("direction", direction, DIRECTIONS)
    others = [(name, m) for name, found in parts.items() for _, m in found if not isinstance(m, Sphere)]
    if direction == "adam" and others:
        name, manifold = others[0]
        raise UserError(
            f"direction='adam' is for matrices on Sphere, which gives a step its length; {name} is on {label(manifold)}. Put it on "
            "gnomon.Sphere(), leave direction='msign', or give it to AdamW (manifold None)."
        )
