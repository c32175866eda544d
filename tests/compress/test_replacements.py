"""What a linear becomes: every kind of term against the matrix it stands for, written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gnomon.compress.replacements import Replacement, Term, numel, ranges, rounded
from gnomon.models.hf.compressed_linear import CompressedLinear, numbers, swap

M, N, R = 6, 5, 2


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def written_out(term, shape):
    """The matrix of a term, entry by entry."""
    W = np.zeros(shape)
    A, B = term.A_MR.numpy(), None if term.B_RN is None else term.B_RN.numpy()
    columns = range(shape[1]) if term.columns is None else term.columns
    for i, row in enumerate(range(shape[0]) if term.rows is None else term.rows):
        for j, column in enumerate(columns):
            W[row, column] += A[i, j] if B is None else A[i] @ B[:, j]
    for i, row in enumerate(term.pivots or ()):
        for j, column in enumerate(columns):
            W[row, column] += B[i, j]
    return W


TERMS = {
    "dense": Term(drawn(M, N)),
    "factored": Term(drawn(M, R), drawn(R, N)),
    "rows": Term(drawn(3, N), rows=(0, 1, 4)),
    "columns": Term(drawn(M, 2), columns=(1, 3)),
    "rows and columns": Term(drawn(3, R), drawn(R, 4), rows=(1, 2, 5), columns=(0, 1, 2, 4)),
    "pivots": Term(drawn(4, R), drawn(R, N), rows=(0, 2, 3, 5), pivots=(1, 4)),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", TERMS)
def test_a_term_is_the_matrix_it_stands_for(kind, bias):
    made = Replacement((M, N), (TERMS[kind],), drawn(M) if bias else None)
    expected = torch.from_numpy(written_out(TERMS[kind], (M, N))).float()
    torch.testing.assert_close(made.W_MN, expected)
    x = drawn(2, 3, N)
    torch.testing.assert_close(made.module()(x), nn.functional.linear(x, expected, made.bias_M))
    assert made.is_dense is (kind == "dense")


def test_terms_of_a_fused_linear_add_up():
    terms = [TERMS["pivots"].placed(tuple(range(1, 13, 2))), TERMS["rows"].placed(tuple(range(0, 12, 2)))]
    made = Replacement((12, N), tuple(terms))
    expected = np.zeros((12, N))
    expected[1::2], expected[::2] = written_out(TERMS["pivots"], (M, N)), written_out(TERMS["rows"], (M, N))
    torch.testing.assert_close(made.W_MN, torch.from_numpy(expected).float())


def test_what_is_shared_counts_once():
    shared = drawn(R, N)
    two = [Replacement((M, N), (Term(drawn(M, R), shared, B_shared="up 0"),)) for _ in range(2)]
    assert numel(two) == 2 * M * R + R * N
    assert numel([Replacement((M, N), (Term(drawn(M, R), shared),))] * 2) == 2 * (M * R + R * N)


def test_ranges():
    assert ranges((0, 1, 2, 7, 9, 10)) == "0-2,7,9-10" and ranges(None) == ""
    assert numbers("0-2,7,9-10").tolist() == [0, 1, 2, 7, 9, 10] and numbers("") is None


def test_swapped_models_share_what_is_shared():
    model = nn.ModuleDict({name: nn.Linear(N, M) for name in "ab"})
    shared = drawn(R, N)
    made = {name: Replacement((M, N), (Term(drawn(M, R), shared, B_shared="x"),), drawn(M)) for name in "ab"}
    swap(model, {name: one.spec({"terms.0.B": "a.terms.0.B"} if name == "b" else None) for name, one in made.items()})
    assert isinstance(model["b"], CompressedLinear) and model["a"].terms[0].B is model["b"].terms[0].B
    assert model.all_tied_weights_keys == {"b.terms.0.B": "a.terms.0.B"}
    assert sum(p.numel() for p in model.parameters()) == numel(made.values()) + 2 * M


def test_rounding_keeps_places():
    made = rounded(Replacement((M, N), (TERMS["pivots"],), drawn(M)), torch.bfloat16)
    assert made.tensors()["terms.0.A"].dtype == torch.bfloat16 == made.bias_M.dtype
    torch.testing.assert_close(made.W_MN.numpy(), written_out(TERMS["pivots"], (M, N)).astype("float32"), rtol=2e-2, atol=2e-2)
