"""What is known about the metrics of a run: title, unit, section of the report, and what its numbers mean."""

from __future__ import annotations

from dataclasses import dataclass

SECTIONS = ["Optimisation", "Hidden states", "Attention", "Weights", "Depth", "Other measures"]


@dataclass(frozen=True)
class Measure:
    """How a metric is shown. `worst` is the extreme, over depth, that tells of trouble: "max" or "min"."""

    title: str
    unit: str = ""
    section: str = SECTIONS[-1]
    caption: str = ""
    worst: str = "max"


_KNOWN = {
    "lr": Measure("Learning rate", "", "Optimisation"),
    "grad_norm": Measure("Gradient norm", "‖g‖", "Optimisation"),
    "tokens_per_second": Measure("Throughput", "tokens/s", "Optimisation"),
    "stream_norm": Measure("Stream norm", "‖h‖", "Hidden states",
                           "Euclidean norm of the hidden state after each sublayer."),
    "stream_coherence": Measure("Coherence of the stream", "|mean of h/‖h‖|", "Hidden states",
                                "Length of the mean unit state over tokens; 1: all states are one point."),
    "angle": Measure("Angle moved", "radians", "Hidden states",
                     "By how much each sublayer turns the hidden state."),
    "step_size": Measure("Step size", "α", "Hidden states",
                         "The factor with which each sublayer's output enters the stream."),
    "attention_logit_max": Measure("Largest attention logit", "logit", "Attention",
                                   "Before the softmax; growth without bound announces instability."),
    "attention_entropy": Measure("Attention entropy", "nats", "Attention",
                                 "Of the softmax over keys; near zero, a head looks at one token.", "min"),
    "sigma_max": Measure("Largest singular value", "σ max", "Weights"),
    "sigma_min": Measure("Smallest singular value", "σ min", "Weights", worst="min"),
    "feasibility": Measure("Feasibility", "", "Weights", "How far a weight is from its manifold."),
    "tangency": Measure("Tangency", "", "Weights", "How far a step is from the tangent space."),
    "alignment": Measure("Alignment", "", "Weights", "How well the step agrees with the gradient.", "min"),
    "change": Measure("Change since the start", "‖W - W₀‖ / ‖W₀‖", "Depth"),
    "turn_v1": Measure("Turn of v1", "degrees", "Depth", "Angle of each weight's v1 from its own at the reference step."),
    **{
        f"{what}_{side}": Measure(f"{title}, {side}", f"|cos {side}|", "Depth",
                                  "Leading directions of a layer against the next.", "min")
        for what, title in (("gradient", "Gradients of neighbours"), ("accumulated", "Summed gradients of neighbours"),
                            ("weight", "Weights of neighbours"))
        for side in ("v1", "u1")
    },
    **{
        f"delta_gw_{side}": Measure(f"Coherence not in the weights, {side}", "", "Depth",
                                    "Summed gradients' less weights'; large: gradients agree, weights do not.")
        for side in ("v1", "u1")
    },
}


def measure(key: str) -> Measure:
    """What is known about a metric; an unknown one gets its key as title."""
    return _KNOWN.get(key) or Measure(key.replace("_", " ").capitalize())


def in_order(keys: list[str]) -> list[str]:
    """Known metrics in the order of this file, then the others as they came."""
    return [key for key in _KNOWN if key in keys] + [key for key in keys if key not in _KNOWN]
