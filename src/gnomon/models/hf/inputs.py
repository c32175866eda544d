"""What callers of a Hugging Face model say about its tokens, as `Stack.through` takes it: where they lie, and who sees whom.

Legend: B batch (or 1 for all), T tokens, S tokens seen (T plus those in the cache), H query heads, D channels of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gnomon.errors import UserError
from gnomon.models.transformer import causal_mask, places

_PACKING = ("seq_idx", "cu_seq_lens_q")
# What trainers and collators send along and changes nothing here.
_WITHOUT_EFFECT = ("cu_seq_lens_k", "max_length_q", "max_length_k", "output_router_logits", "num_items_in_batch", "is_causal")


def check_names(others: Mapping[str, Any]) -> None:
    """Refuse an argument without a meaning here.

    Raises:
        UserError: it is named.
    """
    if others.get("is_causal") is False:
        raise UserError("is_causal=False: a gnomon model looks back only")
    for name in others.keys() - {*_PACKING, *_WITHOUT_EFFECT}:
        raise UserError(f"a gnomon model has no argument {name!r}")


def places_and_mask(
    T: int,
    held: int,
    context: int,
    device: torch.device,
    mask: Tensor | None,
    place: Tensor | None,
    others: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Positions, (T,) or (B, T), and mask, or None where all before are seen, which is faster.

    Args:
        T, held: tokens given, and in the cache.
        context: how many positions there are.
        device: of the tokens.
        mask, place, others: `attention_mask`, `position_ids` and the rest of what `GnomonModel` was given.

    Raises:
        UserError: a position beyond the context, a mask of another shape, or a mask or cache together with packing.
    """
    packing = next((name for name in _PACKING if others.get(name) is not None), None)
    if packing and (mask is not None or held):
        raise UserError(f"{packing}: packed sequences have no padding and no cache; leave out attention_mask and cache")
    found = keep_BS = None
    if mask is None and not held:
        segment_BT = _segments(T, place, others)
        if segment_BT is not None:
            found = causal_mask(T, T, device) & (segment_BT[:, None, :, None] == segment_BT[:, None, None, :])
            if place is None:
                # A segment begins where its number is first reached.
                place = torch.arange(T, device=device) - torch.searchsorted(segment_BT, segment_BT)
    elif mask is not None and mask.ndim == 4 and mask.shape[2:] == (T, held + T):
        found = mask if mask.is_floating_point() else _seeing(mask.bool())
    elif mask is not None and mask.ndim == 2 and mask.shape[1] == held + T:
        # Looking costs a wait for the device, and saves the fused kernel's causal form.
        if torch.compiler.is_compiling() or not bool(mask.all()):
            keep_BS = mask.bool()
            found = causal_mask(T, held + T, device, keep_BS)
    elif mask is not None:
        raise UserError(
            f"attention_mask must be (batch, {held + T}), 0 for padding, or (batch, heads, {T}, {held + T}); "
            f"got {tuple(mask.shape)}"
        )
    if place is None:
        needed = held + T
    else:
        needed = 0 if torch.compiler.is_compiling() else int(place.max()) + 1
    if needed > context:
        raise UserError(f"{needed} tokens do not fit the context of {context}")
    return places(T, held, device, keep_BS) if place is None else place, found


def kept(h_BTD: Tensor, which: int | Tensor) -> Tensor:
    """`logits_to_keep`: the last so many (0 for all), those at (N,) or at (B, N) places, or where (B, T) is True."""
    if isinstance(which, int):
        return h_BTD[:, slice(-which, None)]
    if which.ndim == 1:
        return h_BTD[:, which]
    return h_BTD[which] if which.dtype == torch.bool else torch.take_along_dim(h_BTD, which[..., None], dim=1)


def _segments(T: int, place: Tensor | None, others: Mapping[str, Any]) -> Tensor | None:
    """Which of several packed sequences a token belongs to, (B, T), rising; None for one sequence."""
    if (number_BT := others.get("seq_idx")) is not None:
        return number_BT
    if (ends := others.get("cu_seq_lens_q")) is not None:
        return torch.searchsorted(ends[1:], torch.arange(T, device=ends.device, dtype=ends.dtype), right=True)[None]
    if place is None:
        return None
    begins_BT = torch.diff(place, prepend=place[:, :1] - 1) != 1
    return begins_BT.cumsum(-1) if torch.compiler.is_compiling() or bool(begins_BT.any()) else None


def _seeing(mask: Tensor) -> Tensor:
    """Rows that may look at nothing look at themselves: a softmax over nothing is NaN."""
    T, S = mask.shape[-2:]
    own_TS = torch.ones(T, S, dtype=torch.bool, device=mask.device).tril(S - T).triu(S - T)
    return mask | (own_TS & ~mask.any(-1, keepdim=True))
