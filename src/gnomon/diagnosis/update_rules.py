"""Rules that look at gradients and steps: their size, by role, and whether they reach the weights at all."""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.diagnosis.readings import by_place, by_role, ratio, root_sum, usual
from gnomon.diagnosis.rule import Record, Rule, Scores

HISTORY = 10
"""Measured records before the newest that give the usual size of a gradient."""

LEAST = 3
"""Records that a usual size is taken of, at least."""


def relative_update(records: Sequence[Record]) -> Scores:
    """By role: the median over its matrices of ||dW|| / ||W||."""
    return by_role(by_place(records[-1], "update"), usual)


def lost(records: Sequence[Record]) -> Scores:
    """By role: the mean over its matrices."""
    return by_role(by_place(records[-1], "lost_to_rounding"), lambda values: sum(values) / len(values))


def against_usual(records: Sequence[Record]) -> Scores:
    """By role: the norm of its gradient over the median of those before."""
    past = [by_role(by_place(record, "gradient_norm"), root_sum) for record in records[-1 - HISTORY : -1]]
    now = by_role(by_place(records[-1], "gradient_norm"), root_sum)
    known = {name: [norms[name] for norms in past if name in norms] for name in now}
    return {name: ratio(norm, usual(known[name])) for name, norm in now.items() if len(known[name]) >= LEAST}


def not_finite(records: Sequence[Record]) -> Scores:
    return by_place(records[-1], "gradient_overflow")


LARGE_UPDATE = Rule(
    "large-update",
    ("update",),
    relative_update,
    limit=0.3,
    lasting=1,
    what="a step changes {where} matrices by {value:.0%} of their norm",
    why="Steps of this size leave the region in which the gradient says anything; healthy ones are a hundredth, or a seventh where Muon "
    "is at its peak",
    remedy="a lower rate or a longer warm-up; a manifold on which the rate is the relative step (assignment sphere)",
)

LOST_UPDATE = Rule(
    "lost-update",
    ("lost_to_rounding",),
    lost,
    limit=0.5,
    what="{value:.0%} of the entries of {where} do not change: the step is below half a unit in their last place",
    why="The weights cannot move that little in their number format, so they do not learn, however long the run",
    remedy="keep the weights in fp32 (compute.precision=bf16 does, and computes in bf16), round stochastically, or raise the rate",
)

GRADIENT_JUMP = Rule(
    "gradient-jump",
    ("gradient_norm",),
    against_usual,
    limit=15.0,
    what="the gradient of {where} is {value:.3g} times its usual norm",
    why="A gradient that grows in some roles and not in others announces a spike of the loss (arXiv 2309.14322)",
    remedy="clip (optim.clip=1), lower the rate, or take the role off the stream's free norm (residual bounded-sphere; Stiefel)",
    lasting=1,
)

NOT_FINITE = Rule(
    "overflow",
    ("gradient_overflow",),
    not_finite,
    limit=1.0,
    what="{value:.0f} gradient entries of {where} are not finite",
    why="The next step destroys the weights",
    remedy="leave this step out; then an fp32 stream (model.stream=float32), loss scaling under fp16, or bounded logits",
    lasting=1,
)

RULES = (LARGE_UPDATE, LOST_UPDATE, GRADIENT_JUMP, NOT_FINITE)
