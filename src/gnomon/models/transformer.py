"""One decoder-only transformer; GPT-2 and Llama are settings of it.

Legend: B batch, T tokens, D channels of the stream, H query heads, K key/value heads, C channels of a head,
S tokens attended to (T plus those in the cache), V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnomon import residual
from gnomon.errors import UserError
from gnomon.geometry.sphere import widen
from gnomon.models.anchor import Anchor
from gnomon.models.config import TransformerConfig
from gnomon.models.mlp import activate
from gnomon.residual.base import WRITERS


class Cache:
    """Keys and values of earlier tokens, (B, K, S, C) each, a pair for every block.

    The two methods are those of transformers' caches, so the model takes either.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[Tensor, Tensor]] = []

    def get_seq_length(self) -> int:
        """S, the number of tokens held."""
        return self.blocks[0][0].shape[2] if self.blocks else 0

    def update(self, k_BKTC: Tensor, v_BKTC: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Append to block `index`; returns everything it now holds."""
        if index == len(self.blocks):
            self.blocks.append((k_BKTC, v_BKTC))
        else:
            k_BKSC, v_BKSC = self.blocks[index]
            self.blocks[index] = (torch.cat((k_BKSC, k_BKTC), dim=2), torch.cat((v_BKSC, v_BKTC), dim=2))
        return self.blocks[index]


@dataclass
class Explicit:
    """Attention by its formula in place of the fused kernel.

    Args:
        weights: a list to which every block adds its weights (B, H, T, S); None when nobody wants them.
    """

    weights: list[Tensor] | None = None


class Embedding(nn.Embedding):
    """Rows by token; the other way round, logits of a stream.

    A tied head is thus a call of the module that owns the matrix: who moves, shards or watches weights by hooks sees it.
    """

    def forward(self, x: Tensor, as_head: bool = False, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, bias) if as_head else super().forward(x)


class Head(nn.Linear):
    """Logits of a stream, with a bias that is not its own."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, bias)


class Stack(nn.Module):
    """What `Transformer` and the class of Hugging Face share: how tokens go through embedding, blocks and exit.

    Attributes:
        config: the settings, or anything with their names.
        embed: of tokens.
        positions, rope: of places; learned rows, or the function that makes the table of rotary ones.
        blocks: each joins the stream twice.
        entry, exit: what the residual wants before and after the blocks.
    """

    config: Any
    embed: nn.Module
    positions: nn.Module | None
    rope: Callable[[Tensor], tuple[Tensor, Tensor]] | None
    blocks: nn.ModuleList
    entry: nn.Module
    exit: nn.Module

    def stream(
        self,
        tokens_BT: Tensor,
        cache: Cache | None = None,
        keep_BS: Tensor | None = None,
        seen: list[Tensor] | None = None,
    ) -> Tensor:
        """The stream (B, T, D) as the head reads it.

        Args:
            tokens_BT: int64 token ids.
            cache: keys and values of earlier tokens; extended in place. None when training.
            keep_BS: False for padding among the tokens, earlier ones included: they are not looked at and not counted in
                positions. None when there is none.
            seen: a list to which the stream is added as it enters the blocks and after each of them.

        Raises:
            UserError: more tokens than the context holds.
        """
        past = 0 if cache is None else cache.get_seq_length()
        T, device = tokens_BT.shape[1], tokens_BT.device
        if past + T > self.config.context:
            raise UserError(f"{past + T} tokens do not fit the context of {self.config.context}")
        place, mask = places(T, past, device, keep_BS), None
        if keep_BS is not None:
            mask = causal_mask(T, past + T, device, keep_BS)
        return self.through(self.embed(tokens_BT), place, mask, cache, seen)

    def through(
        self,
        x_BTD: Tensor,
        place: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        seen: list[Tensor] | None = None,
        explicit: Explicit | None = None,
    ) -> Tensor:
        """The same from embedded tokens.

        Args:
            x_BTD: rows of the embedding, or anything in their place.
            place: the position of each token, (T,) or (B, T).
            mask: which tokens are looked at, broadcast to (B, H, T, S): True or 0 where one may look, False or -inf where
                not; None for all before.
        """
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(place)
        if self.config.stream == "compute" and torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        rope = None if self.rope is None else self.rope(place)
        h_BTD = self.entry(x_BTD)
        start_BTD = h_BTD if self.config.anchor else None
        for index, block in enumerate(self.blocks):
            if seen is not None:
                seen.append(h_BTD)
            h_BTD = block(h_BTD, rope, cache, index, mask, explicit, start_BTD)
        if seen is not None:
            seen.append(h_BTD)
        return self.exit(h_BTD)


class Transformer(Stack):
    """Embedding, `layers` blocks whose sublayers join the stream by the chosen residual, and a head.

    Args:
        config: the settings.
        block: the class of the blocks, made of the settings and an index.
    """

    def __init__(self, config: TransformerConfig, block: Callable[[TransformerConfig, int], nn.Module] | None = None):
        super().__init__()
        self.config = c = config
        self.embed: Embedding = Embedding(c.vocab_size, c.width)
        learned, rotary = c.positions == "learned", partial(rope_table, d_head=c.d_head, base=c.rope_base)
        self.positions: nn.Embedding | None = nn.Embedding(c.context, c.width) if learned else None
        self.rope: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None if learned else rotary
        self.blocks: nn.ModuleList = nn.ModuleList((block or Block)(c, index) for index in range(c.layers))
        self.entry: nn.Module = self.blocks[0].join_attention.entry()
        self.exit: nn.Module = self.blocks[-1].join_mlp.exit()
        # A tied head has no parameter of its own, so there is nothing to save twice or to untie by accident.
        self.head: Head | None = None if c.tied else Head(c.width, c.vocab_size, bias=False)
        self.head_bias: nn.Parameter | None = nn.Parameter(torch.empty(c.vocab_size)) if c.head_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every matrix from N(0, init_std^2) times the factor its residual prescribes for its role, or zero where
        `zero_init` says so.

        Raises:
            UserError: a sublayer that starts at zero would never learn.
        """
        for block in cast("list[Block]", self.blocks):
            for join, branch in ((block.join_attention, block.attention), (block.join_mlp, block.mlp)):
                if self.config.zero_init and not join.learns_from_zero:
                    raise UserError(
                        f"model.zero_init starts every sublayer at zero, and residual {self.config.residual!r} with options "
                        f"{self.config.residual_options} takes only the direction of what a sublayer says: zero has none, sends no "
                        "gradient, and stays zero. Leave zero_init out, or take another residual."
                    )
                for role, linear in branch.named_children():
                    if isinstance(linear, nn.Linear):
                        _init_linear(linear, role, self.config, join.init_scale)
        for module in (self.embed, self.positions, self.head):
            if module is not None:
                nn.init.normal_(module.weight, std=self.config.init_std)
        if self.head_bias is not None:
            nn.init.zeros_(self.head_bias)

    @torch.no_grad()
    def start_at_frequencies(self, counts_V: Tensor) -> None:
        """Set the head's bias to the log frequency of each token (one is added to every count)."""
        counts_V = counts_V.double() + 1
        assert self.head_bias is not None, "model.head_bias"
        self.head_bias.copy_(torch.log(counts_V / counts_V.sum()))

    def forward(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits (B, T, V) of the next token at every position; see `stream` for the arguments."""
        return self.logits(self.stream(tokens_BT, cache))

    def logits(self, h_BTD: Tensor) -> Tensor:
        """What the head makes of the stream: logits (B, T, V)."""
        head = partial(self.embed, as_head=True) if self.head is None else self.head
        # What stands in the head's place, quantised or adapted, may know of no bias.
        logits = head(h_BTD) if self.head_bias is None else head(h_BTD, bias=self.head_bias)
        return soft_cap(logits, self.config.head_softcap)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token, fp32."""
        return F.cross_entropy(self(tokens_BT).float().flatten(0, 1), targets_BT.flatten())


class Block(nn.Module):
    """Attention and MLP, each joining the stream through its own residual."""

    def __init__(self, c: TransformerConfig, index: int):
        super().__init__()
        known = residual.options(c.residual)
        norm = {key: value for key, value in (("norm", c.norm), ("eps", c.norm_eps)) if key in known}
        place: dict[str, Any] = dict(depth=2 * c.layers, **norm, **c.residual_options)
        self.join_attention: residual.Residual = residual.make(c.residual, c.width, index=2 * index, **place)
        self.attention: Attention = Attention(c)
        self.join_mlp: residual.Residual = residual.make(c.residual, c.width, index=2 * index + 1, **place)
        self.mlp: MLP = MLP(c)
        self.anchor_attention: Anchor | None = Anchor(c.residual) if c.anchor else None
        self.anchor_mlp: Anchor | None = Anchor(c.residual) if c.anchor else None

    def forward(
        self,
        h: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        cache: Cache | None,
        index: int,
        mask: Tensor | None = None,
        explicit: Explicit | None = None,
        start: Tensor | None = None,
    ) -> Tensor:
        # Functions, not modules: whoever moves the arguments of a call to its device would move a module's weights.
        h = self.join_attention(h, lambda x: self.attention(x, rope, cache, index, mask, explicit))
        h = h if self.anchor_attention is None else self.anchor_attention(h, start)
        h = self.join_mlp(h, lambda x: self.mlp(x))
        return h if self.anchor_mlp is None else self.anchor_mlp(h, start)


class Attention(nn.Module):
    """Causal self-attention, grouped-query when kv_heads < heads."""

    def __init__(self, c: TransformerConfig):
        super().__init__()
        self.heads: int = c.heads
        self.kv_heads: int = c.n_kv_heads
        self.d_head: int = c.d_head
        self.softcap: float | None = c.attention_softcap
        self.widths: list[int] = [c.heads * c.d_head, c.n_kv_heads * c.d_head, c.n_kv_heads * c.d_head]
        self.fused: bool = c.qkv == "fused"
        if self.fused:
            self.qkv: nn.Linear = nn.Linear(c.width, sum(self.widths), bias=c.bias)
        else:
            self.query: nn.Linear
            self.key: nn.Linear
            self.value: nn.Linear
            self.query, self.key, self.value = (nn.Linear(c.width, width, bias=c.bias) for width in self.widths)
        self.output: nn.Linear = nn.Linear(c.heads * c.d_head, c.width, bias=c.bias)
        self.query_norm: nn.Module = nn.RMSNorm(c.d_head, eps=c.norm_eps) if c.qk_norm else nn.Identity()
        self.key_norm: nn.Module = nn.RMSNorm(c.d_head, eps=c.norm_eps) if c.qk_norm else nn.Identity()

    def forward(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        index: int = 0,
        mask: Tensor | None = None,
        explicit: Explicit | None = None,
    ) -> Tensor:
        B, T, _ = x_BTD.shape
        if self.fused:
            q, k, v = self.qkv(x_BTD).split(self.widths, dim=-1)
        else:
            q, k, v = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        q_BHTC, k_BKTC, v_BKTC = (x.view(B, T, -1, self.d_head).transpose(1, 2) for x in (q, k, v))
        q_BHTC, k_BKTC = self.query_norm(q_BHTC), self.key_norm(k_BKTC)
        if rope is not None:
            q_BHTC, k_BKTC = rotate(q_BHTC, rope), rotate(k_BKTC, rope)
        if cache is not None:
            k_BKTC, v_BKTC = cache.update(k_BKTC, v_BKTC, index)
        y_BHTC = self.attend(q_BHTC, k_BKTC, v_BKTC, mask, explicit)
        return self.output(y_BHTC.transpose(1, 2).reshape(B, T, -1))

    def attend(
        self,
        q_BHTC: Tensor,
        k_BKSC: Tensor,
        v_BKSC: Tensor,
        mask: Tensor | None = None,
        explicit: Explicit | None = None,
    ) -> Tensor:
        """Average the values; `mask` as in `Stack.through`."""
        if self.softcap is not None or explicit is not None:
            weights_BHTS = self.logits(q_BHTC, k_BKSC, mask).softmax(dim=-1).to(v_BKSC.dtype)
            if explicit is not None and explicit.weights is not None:
                explicit.weights.append(weights_BHTS)
            return weights_BHTS @ v_BKSC.repeat_interleave(self.heads // self.kv_heads, dim=1)
        T, S = q_BHTC.shape[2], k_BKSC.shape[2]
        if mask is None and S != T:
            mask = causal_mask(T, S, q_BHTC.device)
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q_BHTC.dtype)
        return F.scaled_dot_product_attention(
            q_BHTC, k_BKSC, v_BKSC, attn_mask=mask, is_causal=mask is None, enable_gqa=self.kv_heads != self.heads
        )

    def logits(self, q_BHTC: Tensor, k_BKSC: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention logits (B, H, T, S) in fp32 or wider, -inf where a token would see the future."""
        k_BHSC = k_BKSC.repeat_interleave(self.heads // self.kv_heads, dim=1)
        with without_autocast(q_BHTC.device):
            logits = (widen(q_BHTC) @ widen(k_BHSC).transpose(-1, -2)) * self.d_head**-0.5
        logits = soft_cap(logits, self.softcap)
        if mask is None:
            mask = causal_mask(q_BHTC.shape[2], k_BKSC.shape[2], q_BHTC.device)
        return logits + mask if mask.is_floating_point() else logits.masked_fill(~mask, float("-inf"))


class MLP(nn.Module):
    """GELU: down(gelu(up(x))); SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: TransformerConfig):
        super().__init__()
        self.activation: str | None = c.activation
        self.gate: nn.Linear | None = nn.Linear(c.width, c.d_mlp, bias=c.bias) if c.mlp == "swiglu" else None
        self.up: nn.Linear = nn.Linear(c.width, c.d_mlp, bias=c.bias)
        self.down: nn.Linear = nn.Linear(c.d_mlp, c.width, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            up = self.up(x)
            return self.down(activate(self.activation, up) if self.activation else F.gelu(up, approximate="tanh"))
        return self.down(activate(self.activation or "silu", self.gate(x)) * self.up(x))


def rope_table(place_T: Tensor, d_head: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin, (T, C) each, of the rotary embedding (arXiv 2104.09864), rotate-half layout, fp32; (B, 1, T, C) where
    every sequence counts its own places.

    Computed anew for each call: a table of a few thousand numbers is cheaper than a buffer a loader must refill.
    """
    rate = base ** (-torch.arange(0, d_head, 2, device=place_T.device, dtype=torch.float32) / d_head)
    if place_T.ndim == 2:
        place_T = place_T[:, None]
    angle = place_T.float()[..., None] * rate
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x_BHTC: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    left, right = x_BHTC.chunk(2, dim=-1)
    return (x_BHTC * cos + torch.cat((-right, left), dim=-1) * sin).to(x_BHTC.dtype)


def places(T: int, past: int, device: torch.device, keep_BS: Tensor | None = None) -> Tensor:
    """The position of each of T tokens behind `past` others: (T,); where there is padding, which counts for none, (B, T)."""
    if keep_BS is None:
        return torch.arange(past, past + T, device=device)
    return (keep_BS.cumsum(1) - 1).clamp_min(0)[:, past:]


def causal_mask(T: int, S: int, device: torch.device, keep_BS: Tensor | None = None) -> Tensor:
    """True where the last T of S tokens may look: at themselves and before, (T, S); less padding, (B, 1, T, S)."""
    mask_TS = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
    if keep_BS is None:
        return mask_TS
    # Padding still looks at itself: a softmax over nothing is NaN.
    own_TS = mask_TS.triu(S - T)
    return mask_TS & (keep_BS[:, None, None, :].bool() | own_TS)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Products in here are of the dtype of their factors."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap), in fp32 or wider; the logits as they are for None."""
    return logits if cap is None else cap * torch.tanh(widen(logits) / cap)


def _init_linear(linear: nn.Linear, role: str, c: TransformerConfig, scale: Callable[[str], float]) -> None:
    """A fused qkv takes the factors of its three parts, drawn row block by row block."""
    kv = c.n_kv_heads * c.d_head
    parts = {"query": c.heads * c.d_head, "key": kv, "value": kv} if role == "qkv" else {role: linear.out_features}
    row = 0
    for part, rows in parts.items():
        # Drawn with zero spread too: all other matrices then are those of the same seed without zero_init.
        factor = 0.0 if c.zero_init and part in WRITERS else scale(part)
        nn.init.normal_(linear.weight[row : row + rows], std=c.init_std * factor)
        row += rows
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
