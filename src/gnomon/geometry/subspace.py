"""Leading singular subspaces of a matrix, angles between subspaces, and what chance would give.

Shapes: W_MN is a weight (M outputs, N inputs). Vectors are *rows*: U_kM holds left singular vectors, V_kN
right ones, so W ~ U^T diag(sigma) V. `leading` is the fast tier, `spectrum` the exact one; the readable form
of both is three lines of `torch.linalg.svd`, which the tests hold them to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gnomon.errors import UserError

# Below this smaller side the exact answer costs no more than the iteration.
_EXACT_BELOW = 192
# Rows converted to fp32 at a time: the panel stays in cache for both products of W^T W x.
_PANEL_ENTRIES = 1 << 19


@dataclass(frozen=True)
class Singular:
    """Singular triplets of W, largest first.

    U_kM, V_kN: unit rows, fp32 on the device of W. sigma_k: fp64, on the CPU, at the scale of W.
    residual_k: ||W^T u_i - sigma_i v_i|| / sigma_1; v_i is off by about residual_i / relative gap
    (radians).
    norm: ||W||_F, exact in either tier.
    """

    U_kM: Tensor
    sigma_k: Tensor
    V_kN: Tensor
    residual_k: Tensor
    norm: float

    def first(self, k: int) -> Singular:
        """The leading k triplets, as copies: what is left out is freed."""
        cut = (x[:k].clone() for x in (self.U_kM, self.sigma_k, self.V_kN, self.residual_k))
        return Singular(*cut, self.norm)

    @property
    def gap(self) -> float:
        """sigma_1 / sigma_2 (inf for rank one). Near 1, v_1 is any vector of a plane; 1 for a zero matrix."""
        first, second = (self.sigma_k.tolist() + [0.0, 0.0])[:2]
        return first / second if second > 0 else (math.inf if first > 0 else 1.0)

    @property
    def stable_rank(self) -> float:
        """||W||_F^2 / sigma_1^2."""
        first = float(self.sigma_k[0])
        return (self.norm / first) ** 2 if first > 0 else 0.0


def leading(
    W_MN: Tensor,
    k: int = 8,
    *,
    tol: float = 1e-4,
    start: Tensor | None = None,
    max_dim: int = 512,
    seed: int = 0,
) -> Singular:
    """The k leading singular triplets by block Krylov, stopped by their residual.

    The basis is span{X, A X, A^2 X, …} with A = W^T W, kept orthonormal in fp32; the projected problem is
    solved in fp64 (Musco & Musco, arXiv:1504.05477, Algorithm 2). A block of k columns is enough
    (arXiv:2508.06486), and a random start makes clusters harmless (arXiv:2507.10144). W is read in panels of
    rows and never converted whole, so bf16 and fp16 cost no more memory than they have.

    Args:
        W_MN: two-dimensional, any float dtype.
        k: triplets wanted; cut to min(M, N).
        tol: largest residual_i allowed, relative to sigma_1. What is reached is in the result.
        start: rows (·, N) that are believed near the answer, e.g. the V_kN of the layer before. The answer
            does not depend on them beyond `tol`.
        max_dim: size at which the basis stops growing, converged or not.
        seed: of the random start; the same matrix always gives the same answer.

    Raises:
        UserError: not a matrix, k < 1, or NaN or infinity inside.
    """
    _check(W_MN, k)
    if W_MN.stride(0) == 1 and W_MN.stride(1) != 1:  # stored transposed: panels of its rows are contiguous
        at = leading(W_MN.T, k, tol=tol, max_dim=max_dim, seed=seed)
        return Singular(at.V_kN, at.sigma_k, at.U_kM, at.residual_k, at.norm)
    M, N = W_MN.shape
    k = min(k, M, N)
    if min(M, N) <= max(_EXACT_BELOW, 4 * k):
        return spectrum(W_MN).first(k)
    norm = _finite_norm(W_MN)
    if norm == 0:
        return _zero(W_MN, k)
    # fp32 squares would leave their range: measure the matrix at unit norm instead.
    if not 1e-12 < norm < 1e12:
        unit = leading((W_MN.double() / norm).float(), k, tol=tol, start=start, max_dim=max_dim, seed=seed)
        return Singular(unit.U_kM, unit.sigma_k * norm, unit.V_kN, unit.residual_k, norm)

    Q_dN, y_kd, residual_kb = _krylov(W_MN, k, tol, start, min(max_dim, M, N), seed)
    V_kN = y_kd.to(Q_dN) @ Q_dN
    # Rayleigh-Ritz once more on W itself: U is then orthonormal and sigma is not squared.
    U_Mk, sigma_k, R_kk = torch.linalg.svd(_times(V_kN, W_MN).double().T, full_matrices=False)
    V_kN = normalize(R_kk @ V_kN.double(), dim=1)
    error_k = (R_kk @ residual_kb.to(R_kk)).norm(dim=1)
    scale_k = sigma_k[0] * sigma_k.clamp_min(1e-2 * float(sigma_k[0]))
    return Singular(U_Mk.T.float().contiguous(), sigma_k.cpu(), V_kN.float(), (error_k / scale_k).cpu(), norm)


def spectrum(W_MN: Tensor) -> Singular:
    """Every singular triplet, by the Gram matrix of the smaller side in fp64 and `eigh`.

    Singular values below 1e-7 of the largest are lost in the square; they are returned as 0 with zero vectors
    on the other side, so they weigh nothing in any measure.

    Raises:
        UserError: not a matrix, or NaN or infinity inside.
    """
    _check(W_MN, 1)
    norm = _finite_norm(W_MN)
    if norm == 0:
        return _zero(W_MN, min(W_MN.shape))
    if W_MN.shape[0] < W_MN.shape[1]:
        at = spectrum(W_MN.T)
        return Singular(at.V_kN, at.sigma_k, at.U_kM, at.residual_k, at.norm)
    G_NN = torch.zeros(W_MN.shape[1], W_MN.shape[1], dtype=torch.float64, device=W_MN.device)
    for rows in _panels(W_MN):
        P_RN = W_MN[rows].double() / norm
        G_NN.addmm_(P_RN.T, P_RN)
    ritz, V_Nk = torch.linalg.eigh(G_NN)
    del G_NN
    V_Nk = V_Nk.flip(1)
    sigma_k = ritz.flip(0).clamp_min(0).sqrt()
    sigma_k = torch.where(sigma_k > 1e-7 * sigma_k[0], sigma_k, 0)
    inverse_k = torch.where(sigma_k > 0, 1 / sigma_k.clamp_min(1e-300), 0)
    U_kM = torch.empty(len(sigma_k), W_MN.shape[0], dtype=torch.float32, device=W_MN.device)
    for rows in _panels(W_MN):
        U_kM[:, rows] = ((W_MN[rows].double() / norm) @ V_Nk * inverse_k).T.float()
    sigma_k = sigma_k.cpu() * norm
    return Singular(U_kM, sigma_k, V_Nk.T.float().contiguous(), torch.zeros_like(sigma_k), norm)


def frobenius(W_MN: Tensor) -> float:
    """||W||_F, fp32 within a row and fp64 over rows; inf or NaN when an entry is."""
    rows = torch.cat([torch.linalg.vector_norm(P_RN, dim=1) for P_RN in _converted(W_MN)])
    norm = float(rows.double().norm())
    if 1e-15 < norm < 1e15:
        return norm
    # Squares left the range of fp32, or an entry is not finite: the slow way tells which.
    rows = torch.cat([torch.linalg.vector_norm(W_MN[rows].double(), dim=1) for rows in _panels(W_MN)])
    return float(rows.norm())


def overlap(A_kN: Tensor, B_kN: Tensor) -> float:
    """||A B^T||_F^2 / k for orthonormal rows: the mean squared cosine of the principal angles, in [0, 1]."""
    return float((A_kN @ B_kN.T).double().square().sum()) / min(len(A_kN), len(B_kN))


def principal_angles(A_kN: Tensor, B_kN: Tensor) -> Tensor:
    """Principal angles in radians (fp64, ascending) between the row spaces of A and B, rows orthonormal.

    The sine comes from the residual B - B A^T A and not from sqrt(1 - cos^2), whose floor is 4e-4 in fp32
    (Bjorck & Golub 1973, section 3).
    """
    A, B = A_kN.double(), B_kN.double()
    cosine = torch.linalg.svdvals(B @ A.T).clamp(0, 1)
    # The triangle of a QR has the singular values of the long residual and is small.
    rest = torch.linalg.qr((B - (B @ A.T) @ A).T, mode="r").R
    sine = torch.linalg.svdvals(rest).flip(0)[: len(cosine)].clamp(0, 1)
    return torch.where(cosine.square() > 0.5, torch.asin(sine), torch.acos(cosine))


class Null(NamedTuple):
    """What chance gives: mean and standard deviation of one measure between unrelated bases."""

    mean: float
    sd: float


def cosine_null(dim: int) -> Null:
    """|cos| of two independent uniform directions in R^dim: Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2))."""
    mean = math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)
    return Null(mean, math.sqrt(max(1 / dim - mean**2, 0.0)))


def overlap_null(dim: int, k: int) -> Null:
    """`overlap` of two independent uniform k-dimensional subspaces: mean k/d.

    The variance is that of tr(P P') / k for Haar projections: 2 (d-k)^2 / (d^2 (d-1) (d+2)).
    """
    if dim <= k:
        return Null(1.0, 0.0)
    return Null(k / dim, math.sqrt(2 * (dim - k) ** 2 / (dim**2 * (dim - 1) * (dim + 2))))


def angle_null(dim: int, k: int) -> float:
    """Smallest principal angle (radians) of two random k-subspaces: the edge 4 a (1-a), a = k/d, of cos^2.

    The edge is that of Wachter's limit for Jacobi matrices; at finite size the angle scatters about it.
    """
    a = min(k / dim, 0.5)
    return math.acos(math.sqrt(4 * a * (1 - a)))


def gram_null(dim: int) -> Null:
    """Cosine of two traceless symmetric d x d matrices in unrelated bases: 0 +- sqrt(2 / ((d-1)(d+2)))."""
    return Null(0.0, math.sqrt(2 / ((dim - 1) * (dim + 2))) if dim > 1 else 0.0)


def frobenius_null(M: int, N: int) -> Null:
    """Cosine of two M x N matrices in unrelated bases: 0 +- 1/sqrt(M N)."""
    return Null(0.0, 1 / math.sqrt(M * N))


def _krylov(W_MN: Tensor, k: int, tol: float, start: Tensor | None, max_dim: int, seed: int):
    """Block Lanczos on W^T W, fully reorthogonalised: (basis, Ritz vectors in it, residuals outside it)."""
    N = W_MN.shape[1]
    generator = torch.Generator().manual_seed(seed)
    b = min(max(k, 4), max_dim)
    X_bN = torch.randn(b, N, generator=generator).to(W_MN.device)
    if start is not None:
        # The random part keeps every direction in reach: a start that misses v_1 exactly would never find it.
        n = min(len(start), b)
        X_bN[:n] = normalize(start[:n].to(X_bN), dim=1) + 0.3 * normalize(X_bN[:n], dim=1)
    Q_dN = torch.empty(max_dim, N, device=W_MN.device)
    T_dd = torch.zeros(max_dim, max_dim, dtype=torch.float64)
    X_bN, _ = _orthonormal(X_bN, Q_dN[:0])
    # Looking whether it is done costs about 25 dim^3 operations, one step more 4 b M N.
    dim, check, often = 0, 3 * b, (4 * b * W_MN.numel() / 25) ** (1 / 3)
    while True:
        new = slice(dim, dim + len(X_bN))
        Q_dN[new], dim = X_bN, dim + len(X_bN)
        Z_bN = _gram_times(X_bN, W_MN)
        H_bd = Z_bN @ Q_dN[:dim].T
        T_dd[new, :dim] = H_bd.cpu().double()
        T_dd[:dim, new] = T_dd[new, :dim].T
        X_bN, R_bb = _orthonormal(Z_bN - H_bd @ Q_dN[:dim], Q_dN[:dim])
        last = dim + b > max_dim
        if dim >= check or last:
            check = dim + (b if dim < often else max(b, dim // 4))
            ritz, y_dd = torch.linalg.eigh((T_dd[:dim, :dim] + T_dd[:dim, :dim].T) / 2)
            ritz, y_kd = ritz.flip(0)[:k].clamp_min(0), y_dd.flip(1)[:, :k].T
            # A q y = theta q y + (the part outside the basis), which is R^T times the last block of y.
            residual_kb = y_kd[:, -len(R_bb) :] @ R_bb.cpu().double().T
            sigma = ritz.sqrt()
            scale = sigma[0] * sigma.clamp_min(1e-2 * float(sigma[0]))
            if last or bool((residual_kb.norm(dim=1) <= tol * scale).all()):
                return Q_dN[:dim], y_kd.contiguous(), residual_kb


def _orthonormal(Z_bN: Tensor, Q_dN: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows X with Z = R X + (something in Q), by QR, twice: once loses digits."""
    X_Nb, R_bb = torch.linalg.qr((Z_bN - (Z_bN @ Q_dN.T) @ Q_dN).T)
    X_bN = X_Nb.T
    X_Nb, S_bb = torch.linalg.qr((X_bN - (X_bN @ Q_dN.T) @ Q_dN).T)
    return X_Nb.T.contiguous(), (S_bb @ R_bb).T


def _gram_times(X_bN: Tensor, W_MN: Tensor) -> Tensor:
    """X W^T W in one pass over W: each panel is converted once and used twice while it is in cache."""
    Z_bN = torch.zeros_like(X_bN)
    for P_RN in _converted(W_MN):
        Z_bN.addmm_(X_bN @ P_RN.T, P_RN)
    return Z_bN


def _times(V_kN: Tensor, W_MN: Tensor) -> Tensor:
    """V W^T, panel by panel."""
    return torch.cat([V_kN @ P_RN.T for P_RN in _converted(W_MN)], dim=1)


def _converted(W_MN: Tensor):
    if W_MN.dtype == torch.float32:
        yield from (W_MN[rows] for rows in _panels(W_MN))
        return
    panels = _panels(W_MN)
    buffer = torch.empty(panels[0].stop, W_MN.shape[1], device=W_MN.device)
    for rows in panels:
        yield buffer[: min(rows.stop, len(W_MN)) - rows.start].copy_(W_MN[rows])


def _panels(W_MN: Tensor) -> list[slice]:
    # An accelerator wants one large product; a CPU wants panels that fit its cache.
    rows = len(W_MN) if W_MN.device.type != "cpu" else max(1, _PANEL_ENTRIES // W_MN.shape[1])
    return [slice(at, min(at + rows, len(W_MN))) for at in range(0, len(W_MN), rows)]


def _zero(W_MN: Tensor, k: int) -> Singular:
    U_kM, V_kN = (torch.zeros(k, size, device=W_MN.device) for size in W_MN.shape)
    zero_k = torch.zeros(k, dtype=torch.float64)
    return Singular(U_kM, zero_k, V_kN, zero_k, 0.0)


def _finite_norm(W_MN: Tensor) -> float:
    norm = frobenius(W_MN)
    if not math.isfinite(norm):
        bad = int((~torch.isfinite(W_MN)).sum())
        raise UserError(f"{bad} of {W_MN.numel()} entries are NaN or infinite: it has no singular vectors")
    return norm


def _check(W_MN: Tensor, k: int) -> None:
    if W_MN.ndim != 2 or not W_MN.is_floating_point():
        raise UserError(f"expected a float matrix (outputs, inputs), got {W_MN.dtype} {tuple(W_MN.shape)}")
    if k < 1 or 0 in W_MN.shape:
        raise UserError(f"k = {k} singular vectors of a {tuple(W_MN.shape)} matrix: sizes must be at least 1")
