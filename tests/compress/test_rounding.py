"""Rounding to a few levels: errors within half a level, bytes counted to the last, zeros kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gnomon.compress.rounding import FORMATS, Format, rounded
from gnomon.errors import UserError


def matrix(M=7, N=300, dtype=torch.float32):
    return (torch.randn(M, N, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype)


def theirs(W_MN, bits, group):
    """The same in numpy, group by group."""
    out = np.empty_like(W_MN)
    for row, at in np.ndindex(len(W_MN), -(-W_MN.shape[1] // group)):
        cells = W_MN[row, at * group : (at + 1) * group]
        low, high = min(cells.min(), 0), max(cells.max(), 0)
        scale = np.float32(np.float16((high - low) / np.float32(2**bits - 1)))
        zero = np.round(-low / scale)
        codes = np.clip(np.round(cells / scale + zero), 0, 2**bits - 1)
        out[row, at * group : (at + 1) * group] = (codes - zero) * scale
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_numpy_rounds_the_same(name):
    W_MN, (bits, group) = matrix(), FORMATS[name]
    np.testing.assert_allclose(rounded(W_MN, FORMATS[name]).W_MN.numpy(), theirs(W_MN.numpy(), bits, group or 300), atol=1e-7)


@pytest.mark.parametrize(
    ("form", "shape", "nbytes"),
    [
        (FORMATS["int8"], (4, 300), 4 * 300 + 4 * (1 + 2)),
        (FORMATS["int4"], (4, 300), 4 * 300 // 2 + 4 * 3 // 2 + 4 * 3 * 2),  # 128 + 128 + 44
        (Format(4, 128), (1, 7), 4 + 2),  # seven codes and a zero are four bytes
        (Format(3, 2), (1, 3), 2 + 4),  # (3 + 2) * 3 = 15 bits
    ],
)
def test_every_byte_is_counted(form, shape, nbytes):
    assert rounded(matrix(*shape), form).nbytes == nbytes


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_half_a_level_is_the_error(bits):
    W_MN = matrix(20, 64)
    level_M = (W_MN.amax(1) - W_MN.amin(1)) / (2**bits - 1)
    error_M = (rounded(W_MN, Format(bits, None)).W_MN - W_MN).abs().amax(1)
    # A scale in fp16 moves each level by 2^-11 of its number at most.
    assert (error_M <= level_M * (0.51 + 2**bits * 2**-11)).all() and (error_M > 0.3 * level_M).all()


def test_zeros_stay_and_signs_may_be_one():
    W_MN = torch.zeros(3, 8)
    W_MN[1] = torch.arange(1, 9) / 8
    W_MN[2] = -W_MN[1]
    out = rounded(W_MN, FORMATS["int8"]).W_MN
    assert (out[0] == 0).all() and torch.equal(out[2], -out[1])
    torch.testing.assert_close(out, W_MN, atol=3e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_dtype_stays(dtype):
    assert rounded(matrix(dtype=dtype), FORMATS["int4"]).W_MN.dtype == dtype


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e5])
def test_what_has_no_levels_is_refused(bad):
    W_MN = matrix()
    W_MN[0, 0] = bad
    with pytest.raises(UserError, match="not finite, or above 65504"):
        rounded(W_MN, FORMATS["int4"])
