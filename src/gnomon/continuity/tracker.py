"""Continuity while a model is trained: do gradients agree between neighbours, and does it reach the weights?

The order of events claimed by arXiv:2605.04971 is: gradients of neighbouring layers agree right after the start
(the identity of the residual passes them on); once ||dW|| outgrows ||W_0|| the weights follow the summed
gradient; a nonlinearity keeps the layers from drifting apart. Each claim is one of the series below.

    gradient_v1, _u1      |cos| of the leading vectors of this step's gradients, layer l against l + 1
    accumulated_v1, _u1   the same of the sum of all gradients since the start
    weight_v1, _u1        the same of the weights
    delta_gw_v1, _u1      accumulated - weight: coherence of the gradients that has not reached the weights
    change                ||W - W_0|| / ||W_0||
    turn_v1               angle of v_1 from its own at the reference step, degrees
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gnomon import anatomy
from gnomon.anatomy import Part
from gnomon.continuity.pair_measures import undefined
from gnomon.errors import UserError
from gnomon.geometry import subspace
from gnomon.geometry.subspace import Singular
from gnomon.sharding import shard_like, whole

Series = dict[str, dict[str, float]]


class Tracker:
    """Measures on a schedule; between two measurements it only adds each gradient to a sum.

    >>> tracker = Tracker(model, every=100)
    >>> for step, batch in enumerate(batches):
    ...     loss(model(batch)).backward()
    ...     tracker.before_step(step)                 # after backward, before clipping and the optimizer
    ...     optimizer.step(); optimizer.zero_grad()
    ...     record.update(tracker.after_step(step))   # {} unless the schedule asks

    A record maps each series to `{"text.3.query": value, …}`, the layer being the first of the pair; pairs whose
    leading vectors are not defined are left out. It is plain JSON.

    Memory: two copies of the matrices watched (W_0 on the CPU, the sum of gradients beside them in fp32);
    `accumulate=False` saves the second.

    Args:
        model: an `nn.Module`, sharded (FSDP2) or not; under sharding every process must make the same calls.
        every: steps between two measurements; step 0 is measured.
        reference: the step from which the turning of v_1 counts.
        roles: watch only these; None for all matrices inside layers.
        accumulate: keep the sum of gradients.
        config: what a Hugging Face config would say, for models whose fused weights need it.
        start: W_0 by parameter, where somebody keeps it already; None to copy the weights as they are now.

    Raises:
        UserError: no matrices of known role in neighbouring layers, or an argument is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        *,
        reference: int = 0,
        roles: Iterable[str] | None = None,
        accumulate: bool = True,
        config: Any = None,
        start: dict[str, Tensor] | None = None,
    ):
        if every < 1 or reference < 0:
            raise UserError(f"every must be at least 1 and reference at least 0; got {every} and {reference}")
        self.every: int = every
        self.reference: int = reference
        found = anatomy.read(model, config)
        chosen = set(roles) if roles is not None else None
        self._pairs = [pair for pair in found.layer_pairs() if chosen is None or pair.first.role in chosen]
        if not self._pairs:
            names = ", ".join(sorted({part.role for part in found.layer_matrices()})) or "none"
            raise UserError(f"there are no neighbouring matrices to watch (roles found: {names})")
        self._parts = list(dict.fromkeys(part for pair in self._pairs for part in (pair.first, pair.second)))
        parameters = dict(model.named_parameters())
        self._parameters = {part.name: parameters[part.name] for part in self._parts}
        self._start = start or {name: whole(p).cpu().clone() for name, p in self._parameters.items()}
        self._sum: dict[str, Tensor] = {}
        self._accumulate = accumulate
        self._first: dict[Part, Tensor] = {}
        self._last: dict[Part, Tensor] = {}
        self._pending: Series = {}

    def due(self, step: int) -> bool:
        """Whether this step is measured."""
        return step % self.every == 0

    @torch.no_grad()
    def before_step(self, step: int) -> Series:
        """Take this step's gradients in; call between backward and the optimizer. {}: `after_step` tells what was found."""
        grads = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        for name, grad in grads.items() if self._accumulate else ():
            if name not in self._sum:
                self._sum[name] = torch.zeros_like(grad, dtype=torch.float32)
            self._sum[name].add_(grad)
        if self.due(step):
            self._pending = self._neighbours("gradient", self._leading(grads))
            if self._accumulate:
                self._pending |= self._neighbours("accumulated", self._leading(self._sum))
        return {}

    @torch.no_grad()
    def after_step(self, step: int) -> Series:
        """Everything measured at this step; call after the optimizer. Empty unless the schedule asks."""
        if not self.due(step):
            return {}
        at = self._leading(self._parameters, self._last)
        record = self._pending | self._neighbours("weight", at)
        for side in ("v1", "u1"):
            gathered, weight = record.get(f"accumulated_{side}", {}), record[f"weight_{side}"]
            both = [name for name in gathered if name in weight]
            if both:
                record[f"delta_gw_{side}"] = {name: gathered[name] - weight[name] for name in both}
        if not self._first and step >= self.reference:
            self._first = {part: one.V_kN[0].clone() for part, one in at.items() if not undefined(one)}
        turns = {part: _turn(self._first[part], at[part]) for part in self._first if part in at}
        record["turn_v1"] = {part.place: turn for part, turn in turns.items()}
        record["change"] = {part.place: value for part in self._parts if (value := self._change(part)) is not None}
        self._last = {part: one.V_kN for part, one in at.items()}
        self._pending = {}
        return {
            key: {name: float(f"{x:.6g}") for name, x in series.items()} for key, series in record.items() if series
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same series."""
        vectors = {part.place: vector for part, vector in self._first.items()}
        return {"start": self._start, "sum": {k: whole(x).cpu() for k, x in self._sum.items()}, "first": vectors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        by_name = {part.place: part for part in self._parts}
        self._start = dict(state["start"])
        self._first = {by_name[name]: vector for name, vector in state.get("first", {}).items()}
        for name, value in state.get("sum", {}).items():
            at = self._parameters[name]
            self._sum[name] = shard_like(value.to(at.device), at)

    def _leading(self, tensors: dict[str, Any], start: dict[Part, Tensor] | None = None) -> dict[Part, Singular]:
        found: dict[Part, Singular] = {}
        for name, parts in self._by_tensor().items():
            if name not in tensors:
                continue
            full = whole(tensors[name])
            for part in parts:
                W_MN = part.block.take(full)
                if torch.isfinite(W_MN).all():
                    found[part] = subspace.leading(W_MN, 2, start=(start or {}).get(part))
        return found

    def _by_tensor(self) -> dict[str, list[Part]]:
        grouped: dict[str, list[Part]] = {}
        for part in self._parts:
            grouped.setdefault(part.name, []).append(part)
        return grouped

    def _neighbours(self, what: str, at: dict[Part, Singular]) -> Series:
        series: Series = {f"{what}_v1": {}, f"{what}_u1": {}}
        for pair in self._pairs:
            a, b = at.get(pair.first), at.get(pair.second)
            if a is None or b is None or undefined(a) or undefined(b):
                continue
            for side, A, B in (("v1", a.V_kN, b.V_kN), ("u1", a.U_kM, b.U_kM)):
                if A.shape[1] == B.shape[1]:
                    series[f"{what}_{side}"][pair.first.place] = abs(float(A[0] @ B[0]))
        return series

    def _change(self, part: Part) -> float | None:
        now = part.block.take(whole(self._parameters[part.name])).float()
        start = part.block.take(self._start[part.name]).to(now)
        norm = float(start.norm())
        return float((now - start).norm()) / norm if norm > 0 else None


def _turn(reference: Tensor, at: Singular) -> float:
    angle = subspace.principal_angles(reference[None].to(at.V_kN), at.V_kN[:1])
    return float(torch.rad2deg(angle)[0])
