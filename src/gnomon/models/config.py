"""The transformer as settings. GPT-2 and Llama are two corners of one table; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gnomon.errors import UserError, check_name
from gnomon.ranges import Count, NonNegative, Positive, check_ranges

ACTIVATIONS = ("relu", "relu2", "gelu", "silu", "none", "radial")

WITHOUT_NORM = ("geonorm", "ngpt-step", "sphere", "proj-spheret", "cay-spheret", "bounded-sphere")
"""Residuals that have no norm for `norm` and `norm_eps` to describe."""


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer.

    Args:
        vocab_size: rows of the embedding.
        context: longest sequence, in tokens.
        layers: blocks, each an attention and an MLP.
        heads: query heads.
        width: channels of the residual stream, D.
        kv_heads: key and value heads (grouped-query attention); None for as many as query heads.
        head_dim: channels of a head; None for width / heads.
        mlp_width: hidden channels of the MLP; None for 4 D (GELU) or 8/3 D rounded up to a multiple of 64 (SwiGLU).
        positions: "learned" (GPT-2) or "rope" (Llama, rotate-half layout, base `rope_base`).
        norm: "rms", "layer" or "layer-no-bias", for the residuals that have a norm.
        mlp: "gelu" (tanh form, as GPT-2) or "swiglu".
        activation: replaces the nonlinearity of the MLP (of its gate, for "swiglu"): "relu", "relu2" (its square,
            arXiv 2109.08668), "gelu", "silu", "none" or "radial"; None for the one `mlp` names.
        bias: biases on the linear layers.
        qkv: "split" into three matrices, or "fused" into one (rows query, key, value).
        tied: the head shares the embedding matrix.
        head_bias: a bias on the logits, which the trainer starts at the log frequency of each token in the training
            data. Without it the stream itself has to carry that constant; a stream of fixed norm then collapses onto one
            direction before it learns anything else (docs/log.md, 2026-11-29).
        qk_norm: normalise queries and keys per head (RMSNorm with gain).
        attention_softcap: c in c tanh(logits / c) on attention logits; None for none. Costs the fused kernel.
        head_softcap: the same on the output logits.
        residual: how sublayers join the stream, one of `gnomon.residual.names()`.
        residual_options: its options, e.g. {"p": 1.0}.
        anchor: after every sublayer the stream may go back towards the state that entered the blocks, by an amount that is
            learned and starts at 0 (`gnomon.models.anchor`).
        stream: "float32" keeps the stream in fp32 under autocast; "compute" lets it follow the autocast dtype.
        init_std: standard deviation of every matrix before the residual's own factor. GPT-2's 0.02 is about
            1/sqrt(width) of its largest model; narrow models want more.
        zero_init: the matrices that write to the stream (attention's output, the MLP's down) start at zero, whatever the
            residual says, so that every sublayer is silent at first. Refused for residuals and manifolds in which a
            silent sublayer stays silent, or cannot be.
        norm_eps: added to the variance in norms.
    """

    vocab_size: Count
    context: Count
    layers: Count
    heads: Count
    width: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    mlp_width: Count | None = None
    positions: str = "learned"
    rope_base: Positive = 10000.0
    norm: str = "layer"
    mlp: str = "gelu"
    activation: str | None = None
    bias: bool = True
    qkv: str = "split"
    tied: bool = True
    head_bias: bool = False
    qk_norm: bool = False
    attention_softcap: Positive | None = None
    head_softcap: Positive | None = None
    residual: str = "pre-norm"
    residual_options: dict[str, Any] = field(default_factory=dict[str, Any])
    anchor: bool = False
    stream: str = "float32"
    init_std: NonNegative = 0.02
    zero_init: bool = False
    norm_eps: NonNegative = 1e-5

    def __post_init__(self) -> None:
        check_name("positions", self.positions, ("learned", "rope"))
        check_name("norm", self.norm, ("rms", "layer", "layer-no-bias"))
        check_name("mlp", self.mlp, ("gelu", "swiglu"))
        check_name("activation", self.activation or "relu", ACTIVATIONS)
        check_name("qkv", self.qkv, ("split", "fused"))
        check_name("stream", self.stream, ("float32", "compute"))
        check_ranges(self)
        for key, instead in {"norm": "norm", "eps": "norm_eps", "index": "layers", "depth": "layers"}.items():
            if key in self.residual_options:
                raise UserError(f"residual_options has no {key}: that is a matter of the model's {instead}")
        if self.head_dim is None and self.width % self.heads:
            raise UserError(f"width {self.width} is not a multiple of heads {self.heads}; set head_dim or change one")
        if self.heads % self.n_kv_heads:
            raise UserError(f"heads {self.heads} is not a multiple of kv_heads {self.n_kv_heads}")
        if self.positions == "rope" and self.d_head % 2:
            raise UserError(f"rope turns pairs of channels, so head_dim must be even, got {self.d_head}")

    @property
    def n_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def d_head(self) -> int:
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def d_mlp(self) -> int:
        if self.mlp_width is not None:
            return self.mlp_width
        return 4 * self.width if self.mlp == "gelu" else -(-8 * self.width // 3 // 64) * 64

    @property
    def matrix_parameters(self) -> int:
        """Weights in the blocks' matrices, without embeddings, head, biases and norms."""
        attention = self.width * self.d_head * 2 * (self.heads + self.n_kv_heads)
        return self.layers * (attention + (2 if self.mlp == "gelu" else 3) * self.width * self.d_mlp)

    @property
    def flops_per_token(self) -> int:
        """Forward and backward floating-point operations a token: 6 a weight (head included), plus attention's
        12 x context x heads x head_dim a layer (arXiv 2204.02311, appendix B; causal masking not discounted)."""
        weights = self.matrix_parameters + self.vocab_size * self.width
        return 6 * weights + 12 * self.layers * self.context * self.heads * self.d_head


def gpt2(size: str = "small", **changes: Any) -> TransformerConfig:
    """GPT-2 as the papers train it: no biases, tied head, vocabulary padded to 50,304.

    Args:
        size: "small" 12 layers x 768, "medium" 24 x 1024, "large" 36 x 1280; heads of 64 channels.
    """
    layers, width = {"small": (12, 768), "medium": (24, 1024), "large": (36, 1280)}[
        check_name("GPT-2 size", size, ("small", "medium", "large"))
    ]
    settings: dict[str, Any] = dict(
        vocab_size=50304, context=1024, layers=layers, heads=width // 64, width=width, bias=False, norm="layer-no-bias"
    )
    return TransformerConfig(**settings | changes)


def llama_34m(**changes: Any) -> TransformerConfig:
    """The 8-layer, width-256 Llama of arXiv 2605.04971 (34M weights, most of them in untied embeddings)."""
    settings: dict[str, Any] = dict(
        vocab_size=50257,
        context=128,
        layers=8,
        heads=4,
        width=256,
        mlp_width=1024,
        positions="rope",
        norm="rms",
        mlp="swiglu",
        bias=False,
        tied=False,
    )
    return TransformerConfig(**settings | changes)


MODERN: dict[str, Any] = {"activation": "relu2", "zero_init": True, "qk_norm": True, "tied": False}
"""What small-GPT speed runs have settled on since GPT-2, as changes of any model: `tiny(**MODERN)`."""


def tiny(**changes: Any) -> TransformerConfig:
    """A byte-level GPT-2 dialect of 1.9M weights that learns to spell English in a minute on two cores."""
    settings: dict[str, Any] = dict(
        vocab_size=257,
        context=128,
        layers=6,
        heads=4,
        width=160,
        bias=False,
        norm="rms",
        positions="rope",
        head_bias=True,
        init_std=0.08,
    )
    return TransformerConfig(**settings | changes)
