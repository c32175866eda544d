"""A linear whose weight is a sum of small terms, and a model of transformers with some of its linears made so.

This file also lies beside the weights of a compressed model, where transformers runs it (`trust_remote_code=True`). It needs torch
alone. `config.compressed` says for each linear what it is made of:

    "model.layers.0.mlp.up_proj": {"shape": [M, N], "bias": false, "terms": [{"rank": R}]}

Legend: M outputs, N inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Term(nn.Module):
    """One term of y = W x: with z = B x[columns], it adds A z to y[rows], and z itself to y[pivots].

    Without a rank there is no B, and z is x[columns].
    """

    def __init__(self, shape: tuple[int, int], rank: int | None = None, rows: str = "", columns: str = "", pivots: str = "", **_: Any):
        super().__init__()
        self.rows: Tensor | None = numbers(rows)
        self.columns: Tensor | None = numbers(columns)
        self.pivots: Tensor | None = numbers(pivots)
        M = shape[0] if self.rows is None else len(self.rows)
        N = shape[1] if self.columns is None else len(self.columns)
        self.A = nn.Parameter(torch.zeros(M, N if rank is None else rank))
        self.B = None if rank is None else nn.Parameter(torch.zeros(rank, N))

    def forward(self, x: Tensor, y: Tensor | None, M: int) -> Tensor:
        """`y` with this term added; None stands for zero."""
        z = x if self.columns is None else x.index_select(-1, self.columns.to(x.device))
        z = z if self.B is None else nn.functional.linear(z, self.B)
        more = nn.functional.linear(z, self.A)
        if self.rows is None:
            return more if y is None else y + more
        y = x.new_zeros(*x.shape[:-1], M) if y is None else y
        y = y.index_add(-1, self.rows.to(x.device), more)
        return y if self.pivots is None else y.index_add(-1, self.pivots.to(x.device), z)


class CompressedLinear(nn.Module):
    """y = W x + bias, W the sum of `terms`."""

    def __init__(self, shape: tuple[int, int], terms: list[dict[str, Any]], bias: bool = False):
        super().__init__()
        self.out_features: int
        self.in_features: int
        self.out_features, self.in_features = shape
        self.terms: nn.ModuleList = nn.ModuleList(Term(shape, **term) for term in terms)
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(self.out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y: Any = None
        for term in self.terms:
            y = term(x, y, self.out_features)
        return y if self.bias is None else y + self.bias

    @property
    def weight(self) -> Tensor:
        """W_MN, computed: some models ask a linear for the dtype of its weight."""
        some = next(self.terms.parameters())
        columns: Any = None
        for term in self.terms:
            columns = term(torch.eye(self.in_features, dtype=some.dtype, device=some.device), columns, self.out_features)
        return columns.T


def swap(model: Any, compressed: Mapping[str, Mapping[str, Any]]) -> None:
    """Put a `CompressedLinear` in the place of every linear named in `compressed`.

    A term may name the parameter of another that it shares ("A" or "B"): both are one parameter from then on, and tied as
    transformers ties an embedding and a head.
    """
    tied = {}
    for name, made in compressed.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, CompressedLinear(**made))
        for number, term in enumerate(made["terms"]):
            tied |= {f"{name}.terms.{number}.{side}": term[side] for side in ("A", "B") if term.get(side)}
    for alias, owner in tied.items():
        path, _, side = alias.rpartition(".")
        setattr(model.get_submodule(path), side, model.get_parameter(owner))
    # The first is asked when weights are saved, the second when they are loaded.
    model._tied_weights_keys = (getattr(model, "_tied_weights_keys", None) or {}) | tied
    model.all_tied_weights_keys = getattr(model, "all_tied_weights_keys", {}) | tied


def numbers(ranges: str) -> Tensor | None:
    """ "0-2,7" -> 0, 1, 2, 7; nothing for all."""
    if not ranges:
        return None
    ends = [tuple(map(int, one.split("-"))) for one in ranges.split(",")]
    # On the CPU by name: transformers builds a model it loads on the meta device, where numbers are lost.
    return torch.tensor([number for first, *last in ends for number in range(first, (last or [first])[0] + 1)], device="cpu")
