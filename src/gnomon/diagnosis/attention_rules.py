"""Rules that look at attention: its logits, the matrices that make them, and where it goes."""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.diagnosis.readings import by_block, by_place, ratio, role
from gnomon.diagnosis.rule import Record, Rule, Scores

WINDOW = 10
"""Measured records that growth is counted over, at most."""

SMALL_LOGIT = 10.0
"""Softmax of logits up to this has a gradient to speak of whatever they do."""


def largest_logit(records: Sequence[Record]) -> Scores:
    return by_place(records[-1], "attention_logit_max")


def joint_growth(records: Sequence[Record]) -> Scores:
    """By block, over the window: growth of sigma(query) sigma(key), or of the largest logit, whichever is less."""
    # Of a model that has been trained: against its init all of learning would count as growth.
    trained = [record for record in records[-WINDOW:] if record["step"] > 0] or records[-1:]
    now, before = trained[-1], trained[0]
    logits = {place.rpartition(".")[0]: pair for place, pair in _pairs(now, before, "attention_logit_max").items()}
    found = {}
    for block, (sigma, sigma_before) in _sigma_pairs(now, before).items():
        logit, logit_before = logits.get(block, (0.0, 0.0))
        if logit >= SMALL_LOGIT:
            found[block] = min(ratio(sigma, sigma_before), ratio(logit, logit_before))
    return found


def paid_to_the_first(records: Sequence[Record]) -> Scores:
    return by_place(records[-1], "attention_sink")


def entropy(records: Sequence[Record]) -> Scores:
    return by_place(records[-1], "attention_entropy")


def _pairs(now: Record, before: Record, key: str) -> dict[str, tuple[float, float]]:
    old = by_place(before, key)
    return {place: (value, old[place]) for place, value in by_place(now, key).items() if place in old}


def _sigma_pairs(now: Record, before: Record) -> dict[str, tuple[float, float]]:
    """By block: sigma_max(query) sigma_max(key), now and before."""
    pairs = {place: pair for place, pair in _pairs(now, before, "sigma_max").items() if role(place) in ("query", "key")}
    new, old = ({place: pair[i] for place, pair in pairs.items()} for i in (0, 1))
    product = lambda values: values[0] * values[1] if len(values) == 2 else values[0]  # noqa: E731
    return {block: (value, by_block(old, product)[block]) for block, value in by_block(new, product).items()}


SATURATION = Rule(
    "saturation",
    ("attention_logit_max",),
    largest_logit,
    limit=60.0,
    lasting=1,
    what="the largest attention logit of {where} is {value:.3g} (limit {limit:g})",
    why="A softmax over such logits is one-hot: it passes no gradient on, and the loss jumps when the one changes (arXiv 2309.14322)",
    remedy="bound the logits: model.qk_norm, model.attention_softcap, or query and key on Stiefel (assignment stiefel, hetero), whose "
    "singular values stay 1; QK-clip (optim.logit_clip) mends a run that goes on; or lower the rate",
)

GROWING_LOGITS = Rule(
    "growing-logits",
    ("attention_logit_max", "sigma_max"),
    joint_growth,
    limit=8.0,
    lasting=1,
    what="singular values of query and key and the attention logits of {where} grow together, by {value:.3g} within ten measurements",
    why="Logits are bounded by the product of these singular values alone, which nothing bounds under AdamW and Muon",
    remedy="query and key on Stiefel or a spectral cap (assignment stiefel, hetero; optim.dgram_cap), QK-clip (optim.logit_clip), more "
    "weight decay, or a lower rate",
)

ONE_TOKEN = Rule(
    "one-token",
    ("attention_entropy",),
    entropy,
    limit=0.1,
    below=True,
    what="attention of {where} looks at one token (entropy {value:.2g} nats, mean over heads)",
    why="Entropy collapse goes before divergence (arXiv 2303.06296): where every row is one-hot, query and key learn nothing more",
    remedy="as for saturation: model.qk_norm, model.attention_softcap, query and key on Stiefel, or a lower rate",
)

SINK = Rule(
    "sink",
    ("attention_sink",),
    paid_to_the_first,
    limit=0.6,
    level="remark",
    what="{where} pays {value:.0%} of its attention to the first token",
    why="These heads do nothing for most tokens; usual in trained models (arXiv 2309.17453), costly for quantisation and long contexts",
    remedy="nothing, for the loss; a stream of bounded norm (residual bounded-sphere) has nothing to feed them from",
)

RULES = (SATURATION, GROWING_LOGITS, ONE_TOKEN, SINK)
