"""What a record holds, and what each of its numbers means: the one table that monitor, report, warnings and tests read.

A record is one JSON object a step, a line of `metrics.jsonl`:

    {"step": 50, "loss": 2.31,                                       over "run": one number
     "angle": {"text.0.attention": 0.31, "text.0.mlp": 0.12, …},     over "sublayer", in the order of the model
     "attention_sink": {"text.0.attention": [0.2, 0.7], …},          over "head": a list, one number a head
     "sigma_max": {"text.0.query": 1.7, …},                          over "matrix"
     "weight_v1": {"text.0.query": 0.9, …}}                          over "pair": this layer's matrix and the next one's

A place is `STACK.LAYER.NAME`: `text.3.query`, `text.3.expert7.up`, `text.3.attention`, `text.3.mlp`; `text.3.block` where attention
and MLP join the stream as one. What could not be measured is left out. Runs made before November 2026 hold plain lists over
sublayers, and over blocks with heads already reduced; `over_depth` reads both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

SECTIONS = ["Optimisation", "Hidden states", "Attention", "Weights", "Gradients", "Depth", "Numbers", "Other measures"]

OVER = ("run", "sublayer", "head", "matrix", "pair")


@dataclass(frozen=True)
class Series:
    """One series of a record.

    Args:
        title, unit, section: how it is shown.
        over: one of `OVER`; "" when not known.
        meaning: what the number is.
        source: where its definition comes from, an arXiv id.
        worst: the extreme, over depth, that tells of trouble: "max" or "min".
        heads: what stands for a block, of its heads: their "mean", or their "max".
    """

    title: str
    unit: str = ""
    section: str = SECTIONS[-1]
    over: str = ""
    meaning: str = ""
    source: str = ""
    worst: str = "max"
    heads: str = "mean"


def _optimisation(title: str, unit: str, meaning: str) -> Series:
    return Series(title, unit, "Optimisation", "run", meaning)


def _states(title: str, unit: str, meaning: str, source: str = "", worst: str = "max") -> Series:
    return Series(title, unit, "Hidden states", "sublayer", meaning, source, worst)


def _attention(title: str, unit: str, meaning: str, source: str = "", worst: str = "max", heads: str = "mean") -> Series:
    return Series(title, unit, "Attention", "head", meaning, source, worst, heads)


def _matrix(section: str, title: str, unit: str, meaning: str, source: str = "", worst: str = "max") -> Series:
    return Series(title, unit, section, "matrix", meaning, source, worst)


SERIES: dict[str, Series] = {
    "lr": _optimisation("Learning rate", "", "Of this step."),
    "grad_norm": _optimisation("Gradient norm", "‖g‖", "Of the whole gradient, before clipping."),
    "unigram": _optimisation("Entropy of single tokens", "nats", "Of the training data: the loss of knowing how frequent each token is."),
    "tokens_per_second": _optimisation("Throughput", "tokens/s", "Of training alone."),
    # Hidden states: h before a sublayer, h' after it; means over tokens.
    "stream_norm": _states("Stream norm", "‖h‖", "Root mean square over tokens of the hidden state's norm after each sublayer."),
    "stream_growth": _states("Growth of the stream", "‖h'‖/‖h‖", "Norm after each sublayer over the norm before it."),
    "angle": _states("Angle moved", "radians", "By how much each sublayer turns the hidden state."),
    "input_kept": _states(
        "Input kept by the turns", "∏ cos θ", "Product of the cosines of the mean turns so far: what an isotropic walk on the sphere "
        "leaves of the state that entered.", "2608.02668", "min"),
    "input_cosine": _states(
        "Input still there", "cos(h', h₀)", "Cosine of the state with the one that entered the first sublayer.", worst="min"),
    "stream_coherence": _states("Coherence of the stream", "|mean of h/‖h‖|", "Length of the mean unit state over tokens; 1: all "
                                "states are one point."),
    "effective_rank": _states(
        "Effective rank of the states", "directions", "exp of the entropy of the eigenvalues of mean(u uᵀ), u the unit states of a "
        "sample of tokens.", "2605.04971 Eq. 3", "min"),
    "massive": _states("Massive activations", "max|h|/median|h|", "Largest entry over the median entry.", "2402.17762"),
    "massive_channel": _states("Channel of the largest entry", "channel", "Where the largest entry lies.", "2402.17762"),
    "massive_position": _states("Position of the largest entry", "token", "Where the largest entry lies.", "2402.17762"),
    "kurtosis": _states(
        "Kurtosis over channels", "", "mean(s⁴)/mean(s²)² of the channels' root mean squares s over tokens; 1: all alike, D: one "
        "channel is everything.", "2405.19279"),
    "step_size": _states("Step size", "α", "The factor with which each sublayer's output enters the stream."),
    # Attention: of a sample of rows.
    "attention_logit_max": _attention(
        "Largest attention logit", "logit", "Before the softmax; growth without bound announces instability.", "2309.14322",
        heads="max"),
    "attention_entropy": _attention(
        "Attention entropy", "nats", "Of the softmax over keys; near zero, a head looks at one token.", "2303.06296", "min"),
    "attention_sink": _attention(
        "Attention paid to the first token", "share", "By the tokens of the second half.", "2309.17453"),
    "attention_self": _attention("Attention paid to itself", "share", "By the tokens of the second half."),
    # Weights, after the step.
    "sigma_max": _matrix("Weights", "Largest singular value", "σ max", "Of the weight."),
    "sigma_min": _matrix("Weights", "Smallest singular value", "σ min", "Of the weight; runs made before November 2026.", worst="min"),
    "stable_rank": _matrix("Weights", "Stable rank", "‖W‖²/σ²", "Squared Frobenius norm over squared largest singular value.",
                           worst="min"),
    "update": _matrix("Weights", "Relative update", "‖ΔW‖/‖W‖", "Of this step; healthy steps change a matrix by about a thousandth."),
    "feasibility": _matrix("Weights", "Feasibility", "", "How far a weight is from its manifold."),
    "tangency": _matrix("Weights", "Tangency", "", "How far a step is from the tangent space."),
    "alignment": _matrix("Weights", "Alignment", "", "How well the step agrees with the gradient.", worst="min"),
    "gradient_norm": _matrix("Gradients", "Gradient norm by matrix", "‖g‖", "Frobenius norm, before clipping."),
    "change": _matrix("Depth", "Change since the start", "‖W - W₀‖ / ‖W₀‖", "Since the monitor began.", "2605.04971"),
    "turn_v1": _matrix("Depth", "Turn of v1", "degrees", "Angle of each weight's v1 from its own at the reference step.", "2605.04971"),
    **{
        f"{what}_{side}": Series(f"{title}, {side}", f"|cos {side}|", "Depth", "pair",
                                 "Leading directions of a layer against the next.", "2605.04971 Eq. 1", "min")
        for what, title in (("gradient", "Gradients of neighbours"), ("accumulated", "Summed gradients of neighbours"),
                            ("weight", "Weights of neighbours"))
        for side in ("v1", "u1")
    },
    **{
        f"delta_gw_{side}": Series(f"Coherence not in the weights, {side}", "", "Depth", "pair",
                                   "Summed gradients' less weights'; large: gradients agree, weights do not.", "2605.04971")
        for side in ("v1", "u1")
    },
    # Numbers.
    "lost_to_rounding": _matrix(
        "Numbers", "Updates lost to rounding", "share", "Entries with a gradient that the step leaves exactly as they are, in the format "
        "they are kept in."),
    "lost_in_bf16": _matrix(
        "Numbers", "Updates that bf16 would lose", "share", "Entries with a gradient whose bf16 value the step does not change: it is "
        "below half a unit in the last place."),
    "gradient_overflow": _matrix("Numbers", "Gradient entries not finite", "entries", "NaN or infinite."),
    "gradient_underflow": _matrix("Numbers", "Gradient entries that vanish", "share", "Zero, or below the smallest normal number of "
                                  "their format."),
}  # fmt: skip


def known(key: str) -> Series:
    """What is known about a series; an unknown one gets its key as title."""
    return SERIES.get(key) or Series(key.replace("_", " ").capitalize())


def in_order(keys: list[str]) -> list[str]:
    """Known series in the order of this file, then the others as they came."""
    return [key for key in SERIES if key in keys] + [key for key in keys if key not in SERIES]


def over_depth(key: str, value: Any) -> list[float]:
    """A series over sublayers or blocks as a list from the input to the output; [] for a series of another kind, or nothing.

    Heads are reduced as the table says.
    """
    if isinstance(value, list):
        return value
    if not isinstance(value, Mapping) or known(key).over not in ("sublayer", "head"):
        return []
    reduce = {"max": max, "mean": fmean}[known(key).heads]
    return [reduce(item) if isinstance(item, list) else item for item in value.values()]


def split_place(place: str) -> tuple[str, int, str]:
    """`text.3.query` -> ("text", 3, "query"): stack, layer, and what is there.

    Raises:
        ValueError: it is not the name of a place.
    """
    # A stack's name may hold dots itself: `text[model.layers]`.
    found = re.fullmatch(r"(?P<stack>.+?)\.(?P<layer>\d+)\.(?P<name>[A-Za-z_0-9+.]+)", place)
    if found is None:
        raise ValueError(f"{place!r} is not STACK.LAYER.NAME")
    return found["stack"], int(found["layer"]), found["name"]
