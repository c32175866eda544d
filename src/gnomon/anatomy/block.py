"""Where a matrix lies inside the tensor that stores it.

Every fused layout in use is one picture: cut an axis into equal groups of `period`, and keep
`start…stop` of each group.

    thirds (phi3, mpt)           one group      rows [Q … Q K … K V … V]       period = all rows
    per head (gpt_neox, bloom)   nh groups      rows [q k v | q k v | …]       period = 3 hd
    grouped queries (falcon)     nkv groups     rows [q q q k v | …]           period = (nh/nkv + 2) hd
    even and odd (gpt_oss)       I groups       rows [g u | g u | …]           period = 2

Axes are named after y = W x: M rows are outputs, N columns are inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gnomon.errors import UserError


@dataclass(frozen=True, slots=True)
class Cut:
    """Entries `start…stop` of every group of `period` entries along one axis."""

    period: int
    start: int
    stop: int

    def count(self, length: int) -> int:
        """How many entries are kept of an axis of this length."""
        return length // self.period * (self.stop - self.start)

    def part(self, length: int, start: int, size: int) -> Cut:
        """The contiguous run of `size` kept entries that begins at kept entry `start`.

        Raises:
            UserError: the run would straddle two groups, so one cut cannot name it.
        """
        kept = self.stop - self.start
        group, offset = divmod(start, kept)
        if offset + size > kept:
            raise UserError(f"rows {start} to {start + size} lie in two groups of {kept}; no single cut names them")
        first = group * self.period + self.start + offset
        return Cut(length, first, first + size)


@dataclass(frozen=True, slots=True)
class Block:
    """How to cut one matrix (out x in) out of a stored tensor, and how to put it back.

    Works alike on torch tensors and numpy arrays. `Block()` is the whole tensor as it is.

    Attributes:
        index: position along a leading axis of experts; None when there is no such axis.
        transposed: the tensor is stored in x out.
        rows: which outputs belong to the matrix; None for all.
        columns: which inputs belong to the matrix; None for all.
    """

    index: int | None = None
    transposed: bool = False
    rows: Cut | None = None
    columns: Cut | None = None

    def take(self, tensor: Any) -> Any:
        """The matrix W_MN. A view where memory allows (one group), a gathered copy otherwise."""
        cells = self._cells(tensor)
        if self.rows is None and self.columns is None:
            return cells
        return cells.reshape(cells.shape[0] * cells.shape[1], cells.shape[2] * cells.shape[3])

    def put(self, tensor: Any, matrix: Any) -> Any:
        """Write `matrix` (out x in) into its place in `tensor`, in memory; returns `tensor`.

        A tensor that requires gradients is written through its detached storage.

        Raises:
            UserError: `matrix` has another shape than this block takes.
        """
        cells = self._cells(tensor.detach() if hasattr(tensor, "detach") else tensor)
        expected = self.shape(tuple(tensor.shape))
        if tuple(matrix.shape) != expected:
            raise UserError(f"this block holds {expected}, the matrix to put is {tuple(matrix.shape)} (out x in)")
        cells[...] = matrix.reshape(cells.shape)
        return tensor

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape `take` gives for a tensor of shape `stored`."""
        inner = stored if self.index is None else stored[1:]
        if self.transposed:
            inner = inner[::-1]
        if self.rows is None and self.columns is None:
            return tuple(inner)
        m, n = inner
        return (self.rows.count(m) if self.rows else m, self.columns.count(n) if self.columns else n)

    def size(self, stored: tuple[int, ...]) -> int:
        """How many stored numbers the block covers."""
        return math.prod(self.shape(stored))

    def _cells(self, tensor: Any) -> Any:
        # Splitting an axis never copies, whatever the strides: this stays a view, and `put` can write to it.
        matrix = tensor if self.index is None else tensor[self.index]
        if self.transposed:
            matrix = matrix.T
        if self.rows is None and self.columns is None:
            return matrix
        m, n = matrix.shape
        rows, columns = self.rows or Cut(m, 0, m), self.columns or Cut(n, 0, n)
        split = matrix.reshape(m // rows.period, rows.period, n // columns.period, columns.period)
        return split[:, rows.start : rows.stop, :, columns.start : columns.stop]


WHOLE = Block()
