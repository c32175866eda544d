"""Seeing an attention while it is computed, however it is: torch's kernel, a softmax, or a kernel that transformers names.

Queries and keys are taken as the kernel gets them, and the kernel runs as it would have.

Legend: B sequences, H heads, K key heads, T queries, S keys, C channels of a head.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gnomon.monitor import attention_rows
from gnomon.monitor.attention_rows import Rows

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


@dataclass(frozen=True)
class Attended:
    """One attention of B sequences of T queries; `logits` gives the chosen rows of it, (b, H, R, S)."""

    B: int
    T: int
    device: torch.device
    logits: Callable[[Rows], Tensor]


Look = Callable[[Attended], None]


class AttentionCalls(TorchFunctionMode):
    """While open, shows `look` the first attention that is computed.

    Args:
        heads: how many there are, for code that folds them into the batch.
    """

    def __init__(self, look: Look, heads: int | None):
        super().__init__()
        self._look, self._heads, self._seen = look, heads, False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._seen:
            if func is F.scaled_dot_product_attention:
                self._kernel(*args, **kwargs)
            elif func in _SOFTMAX:
                self._softmax(*args)
            elif func is F.multi_head_attention_forward:
                with self._inside_torch():
                    return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _kernel(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> None:  # fmt: skip
        if query.ndim == 4:
            self.show(query, key, scale=scale, mask=attn_mask, causal=is_causal)

    def _softmax(self, logits: Tensor, *_: Any) -> None:
        if logits.ndim == 3 and self._heads:
            logits = logits.unflatten(0, (-1, self._heads))
        if logits.ndim == 4:
            self._seen = True
            self._look(Attended(logits.shape[0], logits.shape[2], logits.device, lambda rows: attention_rows.take_rows(logits, rows)))

    def show(self, q_BHTC: Tensor, k_BKSC: Tensor, **how: Any) -> None:
        """Let `look` see queries and keys; `how` as for `attention_rows.logits_of`."""
        self._seen = True
        B, _, T, _ = q_BHTC.shape
        self._look(Attended(B, T, q_BHTC.device, lambda rows: attention_rows.logits_of(q_BHTC, k_BKSC, rows, **how)))

    @contextlib.contextmanager
    def _inside_torch(self) -> Iterator[None]:
        """torch's own attention module is one call to a mode like this, which is closed while it runs."""
        kernel, softmax = F.scaled_dot_product_attention, F.softmax

        def seen(plain: Any, look: Any) -> Any:
            return lambda *args, **kwargs: (self._seen or look(*args, **kwargs), plain(*args, **kwargs))[1]

        F.scaled_dot_product_attention = seen(kernel, self._kernel)
        F.softmax = seen(softmax, lambda logits, **_: self._softmax(logits))
        try:
            yield
        finally:
            F.scaled_dot_product_attention, F.softmax = kernel, softmax


@contextlib.contextmanager
def seen(module: nn.Module, look: Look, heads: int | None = None) -> Iterator[None]:
    """While open, `look` sees the attention that `module` computes."""
    calls = AttentionCalls(look, heads)
    with calls, _named_kernel(module, calls):
        yield


@contextlib.contextmanager
def _named_kernel(module: nn.Module, calls: AttentionCalls) -> Iterator[None]:
    """Kernels that transformers calls by name and torch knows nothing of: FlashAttention, flex attention, one's own."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    transformers = sys.modules.get("transformers.modeling_utils")
    if name in (None, "eager", "sdpa") or transformers is None or name not in transformers.ALL_ATTENTION_FUNCTIONS:
        yield
        return
    interface = transformers.ALL_ATTENTION_FUNCTIONS
    plain, local = interface[name], dict(interface._local_mapping)

    def wrapper(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        may = _may_look(query, key, mask, causal, kwargs.get("sliding_window"))
        scale = kwargs.get("scaling")
        calls.show(query, key, scale=scale, mask=may, cap=kwargs.get("softcap"))
        return plain(module, query, key, value, mask, *args, **kwargs)

    interface[name] = wrapper
    try:
        yield
    finally:
        interface._local_mapping.clear()
        interface._local_mapping.update(local)


def _may_look(q_BHTC: Tensor, k_BKSC: Tensor, mask: Any, causal: bool, window: int | None) -> Tensor:
    """What such a kernel does with its arguments, as a mask: (B, H or 1, T, S) given, padding (B, S), or none."""
    T, S = q_BHTC.shape[2], k_BKSC.shape[2]
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return mask
    if hasattr(mask, "mask_mod"):
        from torch.nn.attention.flex_attention import create_mask

        return create_mask(mask.mask_mod, q_BHTC.shape[0], q_BHTC.shape[1], T, S, device=str(q_BHTC.device))
    may = torch.ones(1, 1, T, S, dtype=torch.bool, device=q_BHTC.device)
    if causal:
        may = may.tril(S - T)
    if window is not None:
        may = may.triu(S - T - window + 1)
    return may if mask is None else may & mask[:, None, None, -S:].bool()
