"""Rules that look at hidden states: whether tokens can still be told apart, what is left of the input, what blocks do."""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.diagnosis.readings import by_block, by_place
from gnomon.diagnosis.rule import Record, Rule, Scores


def coherence(records: Sequence[Record]) -> Scores:
    return by_place(records[-1], "stream_coherence")


def input_left(records: Sequence[Record]) -> Scores:
    """After the last sublayer; its sign, which turns of more than a right angle change, says nothing."""
    return {place: abs(kept) for place, kept in list(by_place(records[-1], "input_kept").items())[-1:]}


def turned(records: Sequence[Record]) -> Scores:
    """By block: the angles of its sublayers together."""
    return by_block(by_place(records[-1], "angle"), sum)


def massive(records: Sequence[Record]) -> Scores:
    return by_place(records[-1], "massive")


COLLAPSE = Rule(
    "collapse",
    ("stream_coherence",),
    coherence,
    limit=0.98,
    what="hidden states after {where} are one point (coherence {value:.3f}; 1: all tokens are parallel)",
    why="What follows cannot tell tokens apart: the loss stays at the entropy of single tokens, and the way back has little gradient",
    remedy="model.head_bias=true, so that the stream need not carry token frequencies (docs/log.md, 2026-11-29); on a sphere a "
    "bounded turn (residual bounded-sphere); a lower rate or a longer warm-up",
)

FORGETTING = Rule(
    "forgetting",
    ("input_kept",),
    input_left,
    limit=1e-3,
    below=True,
    level="remark",
    what="of the state that entered, {value:.1g} is left after {where}",
    why="Turns of more than a right angle in sum forget the token; later blocks have to find it by attention alone",
    remedy="turns that are bounded and decay over depth (residual bounded-sphere), or fewer sublayers",
)

IDLE_BLOCKS = Rule(
    "idle-blocks",
    ("angle",),
    turned,
    limit=0.03,
    below=True,
    level="remark",
    what="{where} turns the states by {value:.2g} radians only",
    why="A block that turns nothing can be left out; in Pre-LN the stream outgrows what late blocks add (arXiv 2502.05795)",
    remedy="a branch whose share does not fall with depth (residual layernorm-scaling, peri-norm, bounded-sphere), or fewer layers",
)

MASSIVE = Rule(
    "massive-activations",
    ("massive",),
    massive,
    limit=1000.0,
    level="remark",
    what="one entry of the states after {where} is {value:,.0f} times the median",
    why="Such channels act as constant biases (arXiv 2402.17762): they take the range of low-precision formats, and make heads sinks",
    remedy="a stream of bounded norm (residual bounded-sphere), an fp32 stream (model.stream=float32), model.qk_norm",
)

RULES = (COLLAPSE, FORGETTING, IDLE_BLOCKS, MASSIVE)
