"""Rules that look at the loss together with what is inside: a stall that will last, a spike that is coming."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from gnomon.diagnosis.readings import by_place, ratio, usual
from gnomon.diagnosis.rule import Record, Rule, Scores

NEAR = 0.1
"""Nats around the entropy of single tokens within which a loss that stands still is a stall there."""

STALL_STEPS = 40
"""Steps over which progress is counted, at least; later a quarter of those so far, as far back as the rule's memory goes."""

LEAST = 8
"""Losses that progress is counted from, at least."""

HISTORY = 20
"""Records before the newest that give the usual gradient norm."""


def progress_at_unigram(records: Sequence[Record]) -> Scores:
    """By how much the loss may have fallen, where it is about the entropy of single tokens or above: from the first half of the
    last steps to the second, and two standard errors more."""
    now = records[-1]
    begin = max(now["step"] - max(STALL_STEPS, now["step"] / 4), records[0]["step"])
    window = [record["loss"] for record in records if record["step"] > begin]
    if now["step"] - begin < STALL_STEPS or len(window) < LEAST or statistics.fmean(window) < now["unigram"] - NEAR:
        return {}
    half = len(window) // 2
    first, second = window[:half], window[half:]
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(second) / len(second))
    return {"run": statistics.fmean(first) - statistics.fmean(second) + 2 * error}


def gradient_and_logits(records: Sequence[Record]) -> Scores:
    """The gradient norm over its usual one, or the growth of the largest logit over the same records, whichever is less."""
    past = records[-1 - HISTORY : -1]
    if len(past) < 3:
        return {}
    logits = [max(by_place(record, "attention_logit_max").values()) for record in (past[0], records[-1])]
    norm = ratio(records[-1]["grad_norm"], usual([record["grad_norm"] for record in past]))
    return {"run": min(norm, ratio(logits[1], logits[0]))}


STALL = Rule(
    "stall",
    ("loss", "unigram"),
    progress_at_unigram,
    limit=0.1,
    below=True,
    what="the loss stands at the entropy of single tokens (within the last steps it fell by {value:.2g} nats at most)",
    why="The model knows how frequent tokens are and nothing of their order; runs that stand here seldom leave it",
    remedy="model.head_bias=true, a bounded turn on the sphere (residual bounded-sphere), a longer warm-up, a lower rate",
    lasting=5,
    memory=400,
)

SPIKE = Rule(
    "spike-coming",
    ("grad_norm", "attention_logit_max"),
    gradient_and_logits,
    limit=5.0,
    what="gradient norm and attention logits have grown {value:.3g}-fold together",
    why="The two rise together before the loss does (arXiv 2309.14322)",
    remedy="bound the logits (model.qk_norm, Stiefel on query and key, optim.logit_clip), clip harder, or lower the rate now",
    lasting=1,
)

RULES = (STALL, SPIKE)
