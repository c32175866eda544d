"""Weights stored as small numbers with scales beside them: fp8, int8 and MXFP4, turned back when read.

A scale is one number, one a row (M) or (M, 1), one a column (1, N), or one a block of the matrix
(ceil(M/b), ceil(N/b)); for experts all of that with a leading axis. Layouts: DeepSeek-V3
(`weight_scale_inv`, which multiplies all the same), compressed-tensors (`weight_scale`), bitsandbytes (`SCB`,
to be divided by 127), others (`qweight` with `scale`), gpt-oss (`_blocks` with `_scales`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gnomon.checkpoints.checkpoint import Buffer, Checkpoint, Entry, size_text
from gnomon.errors import UserError

_BLOCK = 128
_SCALED = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8")
_SCALES = (".weight_scale_inv", "_scale_inv", ".weight_scale", "_scale", ".scales", ".scale", ".SCB")
# The sixteen values of a 4-bit float (E2M1), by code; OCP Microscaling Formats 1.0, table 5.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with every quantised weight seen as the float matrix it stands for.

    Scales leave the list of tensors. A weight whose scale is missing or does not fit stays in it and raises
    when it is read.
    """
    raw = checkpoint.entries
    scales: dict[str, str] = {}
    renamed: dict[str, str] = {}
    for name, entry in raw.items():
        if entry.dtype in _SCALED and len(entry.shape) >= 2:
            base = name.removesuffix(".weight").removesuffix(".qweight")
            options = [base + end for end in _SCALES] + [name + end for end in ("_scale_inv", "_scale")]
            scale = next((option for option in options if option in raw), None)
            logical = base + ".weight" if name.endswith(".qweight") else name
            renamed[logical] = name
            if scale:
                scales[logical] = scale
        elif name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in raw:
            logical = name.removesuffix("_blocks")
            renamed[logical], scales[logical] = name, logical + "_scales"
    if not renamed:
        return checkpoint

    stored_as = {stored: logical for logical, stored in renamed.items()}
    used = set(scales.values())
    entries: dict[str, Entry] = {}
    for name, entry in raw.items():
        logical = stored_as.get(name, name)
        if name in used:
            continue
        both = entry.nbytes + (raw[scales[logical]].nbytes if logical in scales else 0)
        mxfp4 = name.endswith("_blocks") and name in stored_as
        shape = _unpacked_shape(entry.shape) if mxfp4 else entry.shape
        entries[logical] = entry._replace(shape=shape, nbytes=both)
    block = _block_size(checkpoint.config)

    def load(name: str, buffer: Buffer | None, index: int | None) -> Tensor:
        stored = renamed.get(name)
        if stored is None:
            return checkpoint.load(name, buffer, index)
        weight = checkpoint.load(stored, buffer, index)
        entry = raw[stored]
        if name not in scales:
            if entry.dtype == "I8":
                raise UserError(
                    f"{entry.file}: {stored!r} is int8 and has no scale beside it (looked for "
                    f"{', '.join(_SCALES)}); its numbers cannot be known."
                )
            return weight.float()
        per_entry = index is not None and len(raw[scales[name]].shape) >= 1 and raw[scales[name]].shape[0] > 1
        scale = checkpoint.load(scales[name], None, index if per_entry else None)
        if stored.endswith("_blocks"):
            return from_mxfp4(weight, scale)
        unit = 127.0 if scales[name].endswith(".SCB") else 1.0
        return scaled(weight, scale, block, f"{entry.file}: {stored!r}") / unit

    return dataclasses.replace(checkpoint, entries=entries, load=load)


def scaled(weight: Tensor, scale: Tensor, block: tuple[int, int], what: str) -> Tensor:
    """weight x scale in fp32, whatever the scale is for: tensor, rows, columns or blocks.

    Raises:
        UserError: the shape of the scale fits none of these.
    """
    weight, scale = weight.float(), scale.float()
    *lead, M, N = weight.shape
    if scale.numel() == 1:
        return weight * scale.reshape(())
    if tuple(scale.shape) == (*lead, M):
        return weight * scale.unsqueeze(-1)
    if scale.ndim == weight.ndim and all(have in (1, want) for have, want in zip(scale.shape, weight.shape)):
        return weight * scale
    if scale.ndim == weight.ndim and tuple(scale.shape[:-2]) == tuple(lead):
        rows, columns = (_side(size, count, b) for size, count, b in zip((M, N), scale.shape[-2:], block))
        if rows and columns:
            wide = scale.repeat_interleave(rows, -2)[..., :M, :].repeat_interleave(columns, -1)[..., :N]
            return weight * wide
    raise UserError(
        f"{what} ({size_text(weight.shape)}) has a scale of shape {size_text(scale.shape)}, which is neither "
        f"one number, nor one a row or column, nor one a block of {block[0]} x {block[1]}."
    )


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """gpt-oss: bytes (E, rows, groups, 16) and exponents (E, rows, groups) -> fp32 (E, columns, rows).

    A byte holds two 4-bit floats, and a group of 32 shares an exponent. The low half of a byte comes
    first; the exponent is biased by 127. The result is in x out, as the model keeps its experts.
    """
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    pairs = torch.stack((table[(blocks & 0x0F).long()], table[(blocks >> 4).long()]), dim=-1)
    values = torch.ldexp(pairs.flatten(-2), (scales.int() - 127).unsqueeze(-1))
    return values.flatten(-2).mT


def _unpacked_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    *lead, rows, groups, size = blocks
    return (*lead, groups * size * 2, rows)


def _side(size: int, count: int, block: int) -> int | None:
    """How many entries one scale covers along one side, or None when no such number is known."""
    for length in (block, _BLOCK):
        if math.ceil(size / length) == count:
            return length
    return size // count if count and size % count == 0 else None


def _block_size(config: Mapping) -> tuple[int, int]:
    given = (config.get("quantization_config") or {}).get("weight_block_size") or (_BLOCK, _BLOCK)
    return int(given[0]), int(given[1])
