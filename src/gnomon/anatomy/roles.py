"""What a part of a model can be, and what that says about the residual stream.

"Reads" means that the matrix multiplies the residual stream (its columns live in the stream's space),
"writes" that its output is added to the stream (its rows do).
"""

from __future__ import annotations

from typing import NamedTuple


class Role(NamedTuple):
    reads: bool
    writes: bool
    sublayer: str
    meaning: str


ROLES: dict[str, Role] = {
    "query": Role(True, False, "attention", "what a token looks for"),
    "key": Role(True, False, "attention", "what a token offers to be found by"),
    "value": Role(True, False, "attention", "what a token hands over"),
    "query_gate": Role(True, False, "attention", "gate on the attention output, stored beside the query"),
    "output": Role(False, True, "attention", "attention back to the stream"),
    "latent_query": Role(True, False, "attention", "MLA: stream to query latent (q_a)"),
    "latent_key_value": Role(True, False, "attention", "MLA: stream to key-value latent (rows of kv_a)"),
    "key_rope": Role(True, False, "attention", "MLA: stream to the rotary key that all heads share"),
    "cross_query": Role(True, False, "attention", "cross attention: reads the decoder stream"),
    "cross_key": Role(False, False, "attention", "cross attention: reads the encoder's output"),
    "cross_value": Role(False, False, "attention", "cross attention: reads the encoder's output"),
    "cross_output": Role(False, True, "attention", "cross attention: writes the decoder stream"),
    "gate": Role(True, False, "mlp", "the activated half of a gated MLP"),
    "up": Role(True, False, "mlp", "stream to the wide layer"),
    "down": Role(False, True, "mlp", "wide layer back to the stream"),
    "shared_gate": Role(True, False, "mlp", "the same, of an expert every token visits"),
    "shared_up": Role(True, False, "mlp", "the same, of an expert every token visits"),
    "shared_down": Role(False, True, "mlp", "the same, of an expert every token visits"),
    "linear": Role(True, True, "mlp", "one square layer of a residual MLP"),
    "mixer_in": Role(True, False, "mixer", "stream to a state-space, convolution or linear-attention mixer"),
    "mixer_gate": Role(True, False, "mixer", "gate on a mixer's output, stored by itself"),
    "mixer_rates": Role(True, False, "mixer", "how fast a mixer forgets and writes (decay, beta, time step)"),
    "mixer_out": Role(False, True, "mixer", "mixer back to the stream"),
    "router": Role(True, False, "router", "scores of the experts"),
    "shared_router": Role(True, False, "router", "gate of the shared expert"),
    "embedding": Role(False, True, "", "tokens, token types, patches or pixels to the stream"),
    "positions": Role(False, True, "", "learned positions"),
    "head": Role(True, False, "", "stream to logits"),
    "norm": Role(False, False, "", "gain of a normalisation"),
    "bias": Role(False, False, "", "bias"),
    "scalar": Role(False, False, "", "gains, gates and per-head numbers; any other vector"),
    "conv": Role(False, False, "", "convolution kernel"),
    "buffer": Role(False, False, "", "not learned: masks, rotary frequencies, position ids"),
    "scale": Role(False, False, "", "belongs to a quantised weight: see belongs_to"),
    "other": Role(False, False, "", "known, and none of the above"),
    "unknown": Role(False, False, "", "not recognised"),
}

ATTENTION = frozenset(role for role, it in ROLES.items() if it.sublayer == "attention")
MLP = frozenset(role for role, it in ROLES.items() if it.sublayer == "mlp")
