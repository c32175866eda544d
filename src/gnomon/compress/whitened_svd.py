"""Low rank where the inputs are: the matrices of least ‖(W - Ŵ) X‖ over the calibration text, in fp64.

With C = X Xᵀ / T, ‖(W - Ŵ) X‖² / T = tr (W - Ŵ) C (W - Ŵ)ᵀ. Its minimum of rank R projects the outputs on the R leading
eigenvectors U of W C Wᵀ: Ŵ = U Uᵀ W, and what is lost is the sum of the other eigenvalues. That is the truncated SVD of W S with
C = S Sᵀ, multiplied by S⁻¹ (SVD-LLM, arXiv 2403.07378), without the inverse, which does not exist where inputs never go.

Legend: M outputs, N inputs, R rank; lists run over the layers of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def output_basis(W_MN: Sequence[Tensor], C_NN: Sequence[Tensor], rank: int | None = None) -> Tensor:
    """U_MR with orthonormal columns of least Σ ‖(W - U Uᵀ W) X‖², each layer with its own C.

    The first columns are the basis of a smaller rank; None for the largest.
    """
    if len(W_MN) == 1 and W_MN[0].shape[0] > W_MN[0].shape[1]:  # the smaller of the two eigenproblems
        W, S = W_MN[0].double(), root(C_NN[0])
        directions_NR = leading(S @ (W.T @ W) @ S, rank)
        return torch.linalg.qr(W @ (S @ directions_NR)).Q
    return leading(_sum(W.double() @ C.double() @ W.double().T for W, C in zip(W_MN, C_NN)), rank)


def input_basis(W_MN: Sequence[Tensor], C_NN: Sequence[Tensor], rank: int) -> Tensor:
    """B_RN of least Σ ‖(W - A B) X‖² over B and all A, with the mean C in place of each layer's own (Basis Sharing, arXiv 2410.03765).

    With one C the problem is that of the stack of all W, and B spans what `output_basis` of the stack gives: Uᵀ W. Rows orthonormal.
    """
    S = root(_sum(C.double() for C in C_NN) / len(C_NN))
    gram_NN = _sum(W.double().T @ W.double() for W in W_MN)
    return torch.linalg.qr(gram_NN @ (S @ leading(S @ gram_NN @ S, rank))).Q.T


def coefficients(W_MN: Tensor, C_NN: Tensor, B_RN: Tensor) -> Tensor:
    """A_MR of least ‖(W - A B) X‖, with the layer's own C."""
    C = C_NN.double()
    # A pseudo-inverse: a layer's inputs need not reach every direction of a basis it shares.
    return W_MN.double() @ C @ B_RN.T @ torch.linalg.pinv(B_RN @ C @ B_RN.T, rtol=1e-12, hermitian=True)


def lost(W_MN: Tensor, made_MN: Tensor, C_NN: Tensor) -> float:
    """‖(W - Ŵ) X‖² / T."""
    gone = W_MN.double() - made_MN.double()
    return float(((gone @ C_NN.double()) * gone).sum())


def leading(symmetric: Tensor, rank: int | None) -> Tensor:
    """Eigenvectors of the largest eigenvalues, as columns, the largest first; None for all."""
    return torch.linalg.eigh(symmetric).eigenvectors.flip(1)[:, :rank]


def root(C_NN: Tensor) -> Tensor:
    """The symmetric square root of a matrix that is positive semidefinite up to rounding."""
    values, vectors = torch.linalg.eigh(C_NN.double())
    return vectors * values.clamp_min(0).sqrt() @ vectors.T


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)
