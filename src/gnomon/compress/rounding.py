"""Fewer bits in place of fewer numbers: rounding to the nearest of 2^bits levels, with every byte counted.

The control of every other method here: a matrix that is factored to a quarter of its bytes has to beat one that is merely rounded.

Legend: M outputs, N inputs, G groups of inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnomon.errors import UserError

SCALE = torch.float16


class Rounded(NamedTuple):
    """A matrix as its codes, scales and zeros make it, in the dtype it had, and how many bytes these take."""

    W_MN: Tensor
    nbytes: int


class Format(NamedTuple):
    """Bits of a code, and how many inputs of a row share a scale; None for the whole row."""

    bits: int
    group: int | None


FORMATS = {"int8": Format(8, None), "int4": Format(4, 128)}
"""The two in widest use: a scale for each output, and one for each 128 numbers."""


def rounded(W_MN: Tensor, form: Format) -> Rounded:
    """Each group between its least and its largest number, zero among the levels: W ~ (code - zero) scale.

    A group has an fp16 scale and a zero of as many bits as a code; the last group of a row may be short. Zero rows stay zero.

    Raises:
        UserError: numbers that are not finite, or too large for the scale.
    """
    if not torch.isfinite(W_MN).all() or W_MN.abs().max() > torch.finfo(SCALE).max:
        raise UserError("a matrix to be rounded holds numbers that are not finite, or above 65504")
    M, N = W_MN.shape
    group = min(form.group or N, N)
    parts = [_levels(part_MG.float(), form.bits) for part_MG in W_MN.split(group, dim=1)]
    groups = M * len(parts)
    bits = (M * N + groups) * form.bits
    return Rounded(torch.cat(parts, dim=1).to(W_MN.dtype), -(-bits // 8) + groups * SCALE.itemsize)


def _levels(W_MG: Tensor, bits: int) -> Tensor:
    top = 2**bits - 1
    low_M1, high_M1 = W_MG.amin(1, keepdim=True).clamp_max(0), W_MG.amax(1, keepdim=True).clamp_min(0)
    # As it is stored; never zero, of which a group of zeros has no use.
    scale_M1 = ((high_M1 - low_M1) / top).to(SCALE).float().clamp_min(torch.finfo(SCALE).tiny)
    zero_M1 = (-low_M1 / scale_M1).round().clamp(0, top)
    return ((W_MG / scale_M1 + zero_M1).round().clamp(0, top) - zero_M1) * scale_M1
