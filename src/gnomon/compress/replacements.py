"""What a linear becomes: a sum of terms, each a small matrix or a product of two, at some rows and columns.

    all of W            Term(W_MN)
    rank R              Term(A_MR, B_RN)                     W = A B
    one basis for many  Term(A_MR, B_RN, B_shared="up 4")    the same B_RN in each layer, stored once
    rows cut away       Term(W_mN, rows=those kept)          the others give 0, so heads and rotary pairs stay at their place
    columns cut away    Term(W_Mn, columns=those kept)
    pivots              Term(A, B_RN, rows, pivots)          R rows of W are B itself, the others combinations of them
    a fused tensor      one or more terms for each part, each with the rows of its part

Legend: M outputs, N inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gnomon.models.hf.compressed_linear import CompressedLinear

Places = tuple[int, ...] | None
"""Numbers of rows or columns, increasing; None for all."""


@dataclass(frozen=True, eq=False)
class Term:
    """With z = B x[columns], adds A z to y[rows] and z to y[pivots].

    Attributes:
        A_MR: (rows, R); (rows, columns) where there is no B.
        B_RN: (R, columns), or None.
        rows, columns: where it stands in the linear's matrix.
        pivots: rows that are B itself; only with `rows` and a B.
        A_shared, B_shared: a name for A or B where several linears hold this very tensor; it is stored and counted once.
    """

    A_MR: Tensor
    B_RN: Tensor | None = None
    rows: Places = None
    columns: Places = None
    pivots: Places = None
    A_shared: str = ""
    B_shared: str = ""

    def placed(self, rows: Places) -> Term:
        """The term of a part of a fused linear, at the part's rows of it."""
        if rows is None:
            return self
        put = tuple(rows if self.rows is None else (rows[row] for row in self.rows))
        return replace(self, rows=put, pivots=None if self.pivots is None else tuple(rows[row] for row in self.pivots))

    @property
    def stored(self) -> dict[str, Tensor]:
        """Its tensors by side, "A" and "B"."""
        return {"A": self.A_MR} | ({} if self.B_RN is None else {"B": self.B_RN})

    @property
    def shared(self) -> dict[str, str]:
        """Side -> the name it is shared under."""
        return {side: name for side, name in (("A", self.A_shared), ("B", self.B_shared)) if name}


@dataclass(frozen=True, eq=False)
class Replacement:
    """A linear as it will be.

    Attributes:
        shape: (M, N); smaller than before where a block's own channels went.
        terms: their sum is its matrix.
        bias_M: None where there is none.
    """

    shape: tuple[int, int]
    terms: tuple[Term, ...]
    bias_M: Tensor | None = None

    @property
    def is_dense(self) -> bool:
        """Whether it is an ordinary linear: one whole matrix."""
        term = self.terms[0]
        return len(self.terms) == 1 and term.B_RN is None and term.rows is None and term.columns is None

    @property
    def W_MN(self) -> Tensor:
        """The matrix it stands for."""
        return self.module().weight.detach()

    def spec(self, tied: Mapping[str, str] | None = None) -> dict[str, Any]:
        """How `CompressedLinear` is built: plain data for config.json.

        Args:
            tied: name of a tensor ("terms.0.B") -> the parameter of another linear that holds it.
        """
        terms = []
        for number, term in enumerate(self.terms):
            places = {name: ranges(getattr(term, name)) for name in ("rows", "columns", "pivots")}
            rank = {} if term.B_RN is None else {"rank": len(term.B_RN)}
            held = {side: (tied or {}).get(f"terms.{number}.{side}") for side in term.stored}
            terms.append({name: value for name, value in (rank | places | held).items() if value})
        return {"shape": list(self.shape), "bias": self.bias_M is not None, "terms": terms}

    def tensors(self) -> dict[str, Tensor]:
        """Name of a parameter of `CompressedLinear` -> its numbers."""
        found = {f"terms.{number}.{side}": tensor for number, term in enumerate(self.terms) for side, tensor in term.stored.items()}
        return found if self.bias_M is None else found | {"bias": self.bias_M}

    def module(self) -> CompressedLinear:
        """The live linear, in fp32."""
        made = CompressedLinear(**self.spec()).requires_grad_(False)
        made.load_state_dict({name: tensor.float() for name, tensor in self.tensors().items()})
        return made


def numel(replacements: Iterable[Replacement]) -> int:
    """How many weights they hold together, biases left out; what is shared counts once."""
    count, seen = 0, set()
    for term in (term for one in replacements for term in one.terms):
        for side, tensor in term.stored.items():
            name = term.shared.get(side)
            count += 0 if name in seen else tensor.numel()
            seen |= {name} - {None}
    return count


def ranges(places: Sequence[int] | None) -> str:
    """0, 1, 2, 7 -> "0-2,7"; nothing for all."""
    runs: list[list[int]] = []
    for place in places or ():
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def rounded(made: Replacement, dtype: torch.dtype) -> Replacement:
    """The same, in the numbers of `dtype`; a tensor shared by several stays one where it has that dtype already."""
    terms = tuple(
        replace(term, A_MR=term.A_MR.to(dtype), B_RN=None if term.B_RN is None else term.B_RN.to(dtype)) for term in made.terms
    )
    return replace(made, terms=terms, bias_M=None if made.bias_M is None else made.bias_M.to(dtype))
