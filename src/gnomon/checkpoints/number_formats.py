"""From small numbers back to fp32: pure functions, one for each way in which weights are stored.

Legend: M rows (outputs), N columns (inputs), g numbers that share a scale; leading axes (experts) go along.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnomon.checkpoints.checkpoint import size_text
from gnomon.errors import UserError

_BLOCK = 128
# The sixteen values of a 4-bit float (E2M1), by code; OCP Microscaling Formats 1.0, table 5.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# AWQ's kernels want the eight columns of a word in the order 0 2 4 6 1 3 5 7: here is where each column lies.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def scaled(
    weight: Tensor, scale: Tensor, block: tuple[int, int] = (_BLOCK, _BLOCK), zero: Tensor | None = None
) -> Tensor:
    """(weight - zero) scale, whatever the scale is for: the tensor, rows, columns, blocks, or groups of a row.

    Raises:
        UserError: the shape of the scale fits none of these.
    """
    weight = weight.float()
    if zero is not None:
        weight = weight - _spread(zero.float(), weight.shape, block)
    return weight * _spread(as_factor(scale), weight.shape, block)


def as_factor(scale: Tensor) -> Tensor:
    """fp32 of a scale. Bytes are exponents of two, biased by 127 (E8M0, whose 255 is NaN)."""
    return scale.view(torch.float8_e8m0fnu).float() if scale.dtype == torch.uint8 else scale.float()


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    *lead, M, N = shape
    if scale.numel() == 1:
        return scale.reshape(())
    if tuple(scale.shape) == (*lead, M):
        return scale.unsqueeze(-1)
    if scale.ndim == len(shape) and all(have in (1, want) for have, want in zip(scale.shape, shape)):
        return scale
    if scale.ndim == len(shape) and tuple(scale.shape[:-2]) == tuple(lead):
        rows, columns = (_side(size, count, b) for size, count, b in zip((M, N), scale.shape[-2:], block))
        if rows and columns:
            return scale.repeat_interleave(rows, -2)[..., :M, :].repeat_interleave(columns, -1)[..., :N]
    raise UserError(
        f"({size_text(shape)}) has a scale of shape {size_text(scale.shape)}, which is neither one number, nor one a row or "
        f"column, nor one a block of {block[0]} x {block[1]}."
    )


def _side(size: int, count: int, block: int) -> int | None:
    """How many entries one scale covers along one side, or None when no such number is known."""
    for length in (block, _BLOCK):
        if math.ceil(size / length) == count:
            return length
    return size // count if count and size % count == 0 else None


def from_fp4(packed: Tensor, scale: Tensor, factor: Tensor | None = None, divisor: Tensor | None = None) -> Tensor:
    """Two 4-bit floats a byte, the low half first, (…, M, N/2), with scales (…, M, N/g): MXFP4 and its like.

    NVFP4 has one more number for the whole matrix. ModelOpt stores it to multiply (`weight_scale_2`), compressed-tensors to
    divide (`weight_global_scale`).
    """
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    codes = packed.view(torch.uint8)
    values = torch.stack((table[(codes & 0x0F).long()], table[(codes >> 4).long()]), dim=-1).flatten(-2)
    if values.shape[-1] % scale.shape[-1] or values.shape[:-1] != scale.shape[:-1]:
        raise UserError(f"({size_text(values.shape)} 4-bit floats) has scales of shape {size_text(scale.shape)}.")
    values = values * as_factor(scale).repeat_interleave(values.shape[-1] // scale.shape[-1], -1)
    for number, inverse in ((factor, False), (divisor, True)):
        if number is not None:
            number = number.float().reshape(*number.shape, *[1] * (values.ndim - number.ndim)) if number.numel() > 1 else number.float()
            values = values / number if inverse else values * number
    return values


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """gpt-oss: bytes (E, rows, groups, 16) and exponents (E, rows, groups) -> fp32 (E, columns, rows).

    The result is in x out, as the model keeps its experts.
    """
    return from_fp4(blocks.flatten(-2), scales).mT


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of `bits` bits out of 32-bit words (…, n) -> (…, 32 n / bits), the lowest bits first.

    Where `bits` does not divide 32, numbers run on from one word to the next.
    """
    words = words.view(torch.int32).long() & 0xFFFFFFFF
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits)
        return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)
    stream = ((words.unsqueeze(-1) >> torch.arange(32)) & 1).flatten(-2)
    stream = stream[..., : stream.shape[-1] // bits * bits].unflatten(-1, (-1, bits))
    return (stream << torch.arange(bits)).sum(-1)


def from_gptq(
    words: Tensor, zeros: Tensor, scales: Tensor, bits: int, order: Tensor | None = None, version: int | None = None
) -> Tensor:
    """GPTQ: words (N bits/32, M) packed along the inputs, zeros (N/g, M bits/32), scales (N/g, M) -> fp32 (M, N).

    Args:
        order: group of each input (`g_idx`); by default g neighbours share one.
        version: of the format. The first stores zero points minus one. None decides by symmetric zero points, which are one
            number everywhere.

    Raises:
        UserError: nothing tells the version.
    """
    q_NM = unpacked(words.mT, bits).mT
    z_GM = unpacked(zeros, bits)[..., : q_NM.shape[-1]]
    middle = 1 << (bits - 1)
    if bool((z_GM == middle - 1).all()) or bool((z_GM == middle).all()):
        version = 1 if int(z_GM.flatten()[0]) == middle - 1 else 2
    if version is None:
        raise UserError("is GPTQ with zero points of its own, and nothing tells by which version (checkpoint_format) they go.")
    z_GM = (z_GM + 1) & ((1 << bits) - 1) if version == 1 else z_GM
    if order is None:
        order = torch.arange(q_NM.shape[0]) // -(-q_NM.shape[0] // scales.shape[0])
    order = order.long()
    return ((q_NM - z_GM[order]) * scales.float()[order]).mT


def from_awq(words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """AWQ (GEMM): 4-bit words (N, M/8) and zeros (N/g, M/8), both in AWQ's order, scales (N/g, M) -> fp32 (M, N)."""

    def columns(packed: Tensor) -> Tensor:
        return unpacked(packed, 4).unflatten(-1, (-1, 8))[..., _AWQ_PLACES].flatten(-2)

    group = words.shape[0] // scales.shape[0]
    z_NM = columns(zeros).repeat_interleave(group, 0)
    return ((columns(words) - z_NM) * scales.float().repeat_interleave(group, 0)).mT


def from_words(
    words: Tensor,
    scale: Tensor,
    bits: int,
    shape: tuple[int, ...],
    zero: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """compressed-tensors' pack-quantized: signed numbers stored with 2^(bits-1) added, (M, N bits/32) words along a row.

    Zero points, where there are some, are packed the same way along the rows; `order` is the group of each column.
    """
    middle = 1 << (bits - 1)
    q_MN = unpacked(words, bits)[..., : shape[-1]] - middle
    if zero is not None and zero.dtype == torch.int32:
        zero = (unpacked(zero.mT, bits).mT - middle)[..., : shape[-2], :]
    if order is not None and bool((order >= 0).all()):
        scale, zero = scale[..., order.long()], None if zero is None else zero[..., order.long()]
    return scaled(q_MN, scale, zero=zero)


def from_mlx(words: Tensor, scale: Tensor, bias: Tensor, bits: int) -> Tensor:
    """MLX: q scale + bias, unsigned q in words (…, M, N bits/32), scale and bias (…, M, N/g)."""
    q_MN = unpacked(words, bits)
    group = q_MN.shape[-1] // scale.shape[-1]
    return q_MN * scale.float().repeat_interleave(group, -1) + bias.float().repeat_interleave(group, -1)


def from_bitsandbytes(
    packed: Tensor,
    absmax: Tensor,
    table: Tensor,
    shape: tuple[int, ...],
    block: int,
    nested: tuple[Tensor, Tensor, int, float] | None = None,
) -> Tensor:
    """bitsandbytes' nf4 and fp4: table[code] absmax, two codes a byte, the high half first, over the flattened matrix.

    Args:
        absmax: one for each `block` numbers; bytes where it is itself quantised.
        nested: table, absmax, block and offset of a quantised absmax.
    """
    codes = packed.flatten()
    values = table.float()[torch.stack((codes >> 4, codes & 0x0F), -1).flatten().long()]
    size = math.prod(shape)
    if size > len(values) or absmax.numel() != -(-size // block):
        raise UserError(f"holds {len(values)} numbers in {absmax.numel()} blocks of {block}, and says {size_text(shape)}.")
    if nested is not None:
        inner, largest, length, offset = nested
        group = torch.arange(absmax.numel()) // length
        absmax = inner.float()[absmax.flatten().long()] * largest.float()[group] + offset
    block = min(block, size)
    return (values[:size] * absmax.float().repeat_interleave(block)[:size]).reshape(shape)


def from_weight_norm(v: Tensor, lengths: Tensor) -> Tensor:
    """g v / |v|, the norm over all axes along which g is one number (arXiv:1602.07868, equation 2)."""
    over = [axis for axis in range(v.ndim) if lengths.ndim == 0 or lengths.shape[axis] == 1]
    norm = v.float().norm(dim=over, keepdim=True)
    return lengths.float() * v.float() / norm.masked_fill(norm == 0, 1)
