"""When a loss or gradient is not finite: stop before the update and say which tensor went first, and why, likely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.errors import UserError
from gnomon.files import write_json
from gnomon.models.transformer import Transformer
from gnomon.run_folder import POSTMORTEM
from gnomon.series import over_depth
from gnomon.sharding import whole
from gnomon.train.device import Autocast
from gnomon.train.distributed import ALONE, Ranks, uncompiled


class NonFinite(UserError):
    """Training stopped before an update that would have destroyed the weights; every process raises it."""

    told_by = "main"


def write_postmortem(
    folder: Path,
    step: int,
    model: Transformer,
    batches: Sequence[tuple[Tensor, Tensor]],
    recent: list[dict[str, Any]],
    cast: Autocast,
    ranks: Ranks = ALONE,
) -> NonFinite:
    """Write `postmortem.json` and return the error to raise.

    Args:
        folder: the run folder.
        step: the update that was not made, from 1.
        model: with the gradients of that step.
        batches: tokens and targets of its micro-batches, which are replayed.
        recent: the last metric records.
        cast: what a forward pass runs under in training, and in the replay.
        ranks: the processes; all look at their own rows, one writes.
    """
    # What went bad in one process is in everybody's gradients by now, so the earliest kind of finding counts.
    seen = [found for found in ranks.all(first_not_finite(model, batches, cast)) if found is not None]
    first = min(seen, key=lambda found: KINDS.index(found.split("'")[0].strip()), default=NOWHERE)
    cause = likely_cause(first, recent, largest_weight(model))
    path = folder / POSTMORTEM
    if ranks.main:
        write_json(path, {"step": step, "first_bad": first, "likely_cause": cause, "recent": recent[-50:]})
    return NonFinite(
        f"step {step}: not finite, first in {first}. Likely cause: {cause}. Stopped before the update; the weights "
        f"of the last checkpoint are sound. Details: {path}"
    )


KINDS = ("the weight", "the output of", "the loss", "the gradient of")
NOWHERE = "no tensor of the replayed batch (a sum that overflowed, or numbers that came out otherwise)"


@torch.no_grad()
def first_not_finite(model: Transformer, batches: Sequence[tuple[Tensor, Tensor]], cast: Autocast) -> str | None:
    """The first tensor that is not finite: a weight, else a module's output in order of execution, else a gradient in
    the order of the backward pass. Nothing is skipped on the way, since sharded models need all processes at each."""
    weights = [name for name, p in model.named_parameters() if not whole(p).isfinite().all()]
    # The backward pass runs from the head to the embedding.
    gradients = [
        name
        for name, p in reversed(list(model.named_parameters()))
        if p.grad is not None and not whole(p.grad).isfinite().all()
    ]
    found: list[str] = []
    losses = []

    def look(name: str):
        def hook(_module, _inputs, output):
            if isinstance(output, Tensor) and not output.isfinite().all():
                found.append(name)

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with cast(), uncompiled(model):
            losses = [model.loss(*batch) for batch in batches]
    finally:
        for handle in handles:
            handle.remove()
    if weights:
        return f"the weight {weights[0]!r}"
    if found:
        return f"the output of {found[0]!r}"
    if not torch.stack(losses).isfinite().all():
        return "the loss"
    return f"the gradient of {gradients[0]!r}" if gradients else None


@torch.no_grad()
def largest_weight(model: nn.Module) -> float:
    return max((float(whole(p).abs().max()) for p in model.parameters()), default=0.0)


def likely_cause(first: str, recent: list[dict[str, Any]], weight: float = 0.0) -> str:
    """A sentence from what the metrics show, and the size of the largest weight; it says so when they show nothing."""
    if first.startswith("the weight"):
        return "the weights were damaged before this step: a bad checkpoint, or memory errors"
    probed = [over_depth("attention_logit_max", record.get("attention_logit_max")) for record in recent]
    logits = [max(values) for values in probed if all_finite(values)]
    if logits and logits[-1] > 100:
        return (
            f"attention logits reached {logits[-1]:.3g} (from {logits[0]:.3g}), so softmax saturated; lower the "
            "learning rate, or set model.qk_norm or model.attention_softcap"
        )
    losses = [r["loss"] for r in recent if math.isfinite(r.get("loss", math.nan))]
    # Of a few steps only what no noise explains.
    if len(losses) > 1 and losses[-1] > min(losses) + (0.5 if len(losses) > 5 else max(1.0, 0.5 * min(losses))):
        climb = f"from {min(losses):.3g} to {losses[-1]:.3g}"
        return f"the loss had climbed {climb}: the learning rate is too high, or the warm-up too short"
    if weight > 1e3:
        return f"weights had grown to {weight:.3g}: the learning rate is too high, or the warm-up too short"
    norms = [r["grad_norm"] for r in recent if math.isfinite(r.get("grad_norm", math.nan))]
    if len(norms) > 5 and norms[-1] > 10 * sorted(norms)[len(norms) // 2]:
        return (
            f"the gradient norm jumped to {norms[-1]:.3g}, ten times its median: lower the learning rate or clip harder"
        )
    return "not visible in the metrics before it; look at the batch and at the precision"


def all_finite(values: list[float] | None) -> bool:
    return bool(values) and all(math.isfinite(v) for v in values)
