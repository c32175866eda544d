"""The polar factor U V^T of a matrix X = U S V^T, also called msign(X): sign applied to the singular values.

Shapes: X_MN is (..., M, N), H_NN symmetric positive semi-definite; leading dimensions are a batch of equal shapes.

What the edges mean, for every method:
  zero matrix       0 (there is nothing to orthogonalise; `Manifold.project` completes it at random)
  rank-deficient    resolved directions get singular value 1, an exact null space 0, what lies between lands in [0, 1]
  huge or tiny      the result of the rescaled matrix: entries of 1e30 or 1e-30 are as good as 1
  NaN or inf        NaN
Nothing here divides by a norm that can be zero, writes to its input, or (except `svd`) waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnomon.errors import check_name
from gnomon.geometry.minimax import Quintic, polar_express, zolotarev

METHODS = ("precise", "svd", "newton-schulz", "polar-express", "gram")

# Muon's quintic (Keller Jordan, 2024): as steep as possible at zero, never converges.
MUON_QUINTIC: Quintic = (3.4445, -4.7750, 2.0315)


def polar(
    X_MN: Tensor, method: str = "precise", *, steps: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """U V^T of X_MN = U S V^T, in the dtype of X_MN.

    Args:
        X_MN: (..., M, N), any floating dtype; tall, square or wide.
        method:
            `precise`: retraction grade. Polar Express until converged in float32 (float64 for float64); resolves
                singular values down to 1e-6 (1e-12) of the largest.
            `svd`: the oracle, in float64; waits for the device.
            `newton-schulz`: Muon's five quintics, `torch.optim.Muon` to the bit. Singular values end in about
                [0.7, 1.2], so it makes a direction and never a retraction.
            `polar-express`: five minimax quintics (arXiv 2505.16932) unless `steps` says otherwise.
            `gram`: X (X^T X)^(-1/2) twice (a restart, as in Dao-AILab's Gram Newton-Schulz): the iteration runs on the
                Gram matrix of the shorter side. Within 1e-5 (1e-12) of 1 for singular values above 2e-3 |X^T X|_F^(1/2).
        steps: iterations of `newton-schulz` and `polar-express`; the others know their own.
        dtype: precision of those two methods' products; default bfloat16 (float64 for float64).

    Raises:
        UserError: unknown method.
    """
    check_name("polar method", method, METHODS)
    work = working_dtype(X_MN)
    low = dtype or (torch.bfloat16 if work == torch.float32 else work)
    X = unit(X_MN.to(work))
    wide = X.size(-2) <= X.size(-1)
    X = X if wide else X.mT
    if method == "svd":
        U = _svd(X)
    elif method == "gram":
        U = polar_restarted(X.mT).mT
    elif method == "newton-schulz":
        U = _quintics(_over_frobenius(X.to(low)), [MUON_QUINTIC] * (steps or 5))
    elif method == "polar-express":
        U = _quintics(_over_frobenius(X.to(low)), _guarded(polar_express(1e-3, steps or 5), low))
    else:
        triples = polar_express(1e-12, tolerance=1e-14) if work == torch.float64 else polar_express(1e-6)
        U = _quintics(_over_frobenius(X), _guarded(triples, work))
    return (U if wide else U.mT).contiguous().to(X_MN.dtype)


def near(X_MN: Tensor, steps: int = 1, *, dtype: torch.dtype | None = None) -> Tensor:
    """The polar factor of a matrix that is nearly orthonormal on its shorter side: Y <- Y (3 - Y^T Y) / 2 per step.

    One step squares the distance: 0.02 away becomes 2e-4, then 3e-8. It converges for singular values in (0, sqrt 3)
    and never leaves the unit spectral ball. The common factor sqrt(1 + lr^2) that a tangent step leaves is divided out
    first, so it costs no step (the iteration's error then depends on what is uneven only).

    Args:
        X_MN: (..., M, N). bfloat16 and float16 are computed in float32.
        dtype: precision of the correction Y (Y^T Y - 1), whose error is that precision times the correction. bfloat16
            is harmless within 0.01 of the manifold and halves the cost; default is full precision.

    Returns:
        (..., M, N) in the dtype of X_MN.
    """
    Y = X_MN.to(working_dtype(X_MN))
    Y = Y.clone() if Y is X_MN else Y
    near_(Y.mT if Y.size(-2) < Y.size(-1) else Y, steps, dtype=dtype)
    return Y.to(X_MN.dtype)


def near_(Y_MN: Tensor, steps: int = 1, *, dtype: torch.dtype | None = None) -> Tensor:
    """`near` in place for M >= N: large temporaries cost a CPU as much as the arithmetic done on them."""
    for _ in range(steps):
        R_NN = gram(Y_MN)
        scale = diagonal_mean(R_NN).clamp_min(1.0)
        E_NN = add_identity(R_NN / scale, -1.0)
        accumulate_(Y_MN, Y_MN, E_NN, dtype, scale=-0.5).mul_(scale.rsqrt())
    return Y_MN


def polar_restarted(X_MN: Tensor, noise: Tensor | None = None, *, settled: bool = True) -> Tensor:
    """The `gram` method for M >= N: singular values above 2e-3 |X^T X|_F^(1/2) go to [1 - 1e-5, 1] (float64:
    [1 - 1e-12, 1]), smaller ones below that, proportionally, and X = 0 to 0. `noise` as in `inverse_sqrt`.

    Unsettled, float32 ends within 6e-3 of 1 instead and its corrections are made in bfloat16: cheaper, and enough for a
    direction, where a retraction would turn the weight by 2e-4."""
    full = settled or X_MN.dtype == torch.float64
    quick = None if full else torch.bfloat16
    lower = 2e-3
    scale, terms, floor = zolotarev(lower, 0.27)
    # One rational pass, in full precision because the small singular values hang on it, lifts all to [floor, 1].
    X = X_MN @ inverse_sqrt(gram(X_MN), lower, 0.27, noise=noise)
    # The minimax quintic takes that to 1 +- 1e-3. Written around the centre of the interval, where the correction is
    # small enough for bfloat16: a + b R + c R^2 with R = r + E.
    (a, b, c), r = polar_express(floor, 1)[0], (1 + floor**2) / 2
    E_NN = add_identity(gram(X) if full else multiply(X.mT, X, quick), -r)
    Y_NN = (b + 2 * c * r) * E_NN + c * multiply(E_NN, E_NN, quick)
    X = accumulate_((a + b * r + c * r * r) * X, X, Y_NN, quick)
    return near_(X, 3 if X.dtype == torch.float64 else 1) if full else X


def inverse_sqrt(
    H_NN: Tensor,
    lower: float = 1e-2,
    tolerance: float = 0.025,
    *,
    noise: Tensor | None = None,
    method: str | None = None,
) -> Tensor:
    """P close to H^(-1/2) with P H P <= 1: the right factor that takes X to its polar factor, from H = X^T X alone.

    Args:
        H_NN: (..., N, N) symmetric positive semi-definite, float32 or float64.
        lower, tolerance: singular values of X above `lower` times |H|_F^(1/2) come out in [1 - tolerance, 1], smaller
            ones below that, proportionally.
        noise: size that |H|_F must reach to count; an H below it is not lifted to 1 but fades out.
        method: `zolotarev` (one Cholesky factorisation a pole; 2-3 times cheaper on a CPU), `newton-schulz` (matrix
            products only, which is what an accelerator is good at); None chooses by the device of H.
    """
    method = check_name("inverse square root", method or _best(H_NN), ("zolotarev", "newton-schulz"))
    H, scale = _bounded(H_NN, noise)
    P = _zolotarev(H, lower, tolerance) if method == "zolotarev" else _newton_schulz(H, lower, tolerance)
    return P * scale.rsqrt()


def sqrt(H_NN: Tensor, lower: float = 5e-3, tolerance: float = 0.05, *, method: str | None = None) -> Tensor:
    """An upper estimate of H^(1/2): at most tolerance / (1 - tolerance) relative plus `lower` |H|_F^(1/2) above it (0 gives
    lower I); same methods."""
    method = check_name("square root", method or _best(H_NN), ("zolotarev", "newton-schulz"))
    H, scale = _bounded(H_NN, None)
    rational = method == "zolotarev"
    T = _zolotarev_sqrt(H, lower, tolerance) if rational else H @ _newton_schulz(H, lower, tolerance)
    return add_identity(T / (1 - tolerance), lower) * scale.sqrt()


def spectral_norm(X_MN: Tensor, steps: int = 6) -> Tensor:
    """Largest singular value by power iteration from eight fixed vectors, (..., 1, 1).

    A lower bound; for random matrices after six steps within 5% (2% in the median), after 24 within 1.2%. No random numbers, no
    host synchronisation.
    """
    columns = torch.arange(1, X_MN.size(-1) + 1, device=X_MN.device, dtype=X_MN.dtype)
    rows = torch.arange(1, 9, device=X_MN.device, dtype=X_MN.dtype)[:, None]
    V_8N = torch.sin(columns * (rows + 0.7) * rows)  # deterministic, and generic enough to meet any vector
    V_8N = V_8N.expand(*X_MN.shape[:-2], -1, -1)
    for _ in range(steps):
        V_8N = (V_8N @ X_MN.mT) @ X_MN  # rows, not columns: four times faster on a CPU
        V_8N = V_8N / nonzero(torch.linalg.vector_norm(V_8N, dim=-1, keepdim=True))
    return torch.linalg.vector_norm(V_8N @ X_MN.mT, dim=-1, keepdim=True).amax(-2, keepdim=True)


def unit(X_MN: Tensor) -> Tensor:
    """X over the power of two nearest its largest entry: exact, so nothing later can overflow or vanish. A copy."""
    peak = torch.maximum(X_MN.amax((-2, -1), keepdim=True), -X_MN.amin((-2, -1), keepdim=True))
    exponent = torch.frexp(peak).exponent
    exponent = torch.where(torch.isfinite(peak) & (peak > 0), exponent, 0).clamp(-126, 126)
    return X_MN * torch.ldexp(torch.ones_like(peak), -exponent)


def gram(X_MN: Tensor) -> Tensor:
    """X^T X, symmetric to the bit. On a CPU only the upper blocks are computed, which saves 30% from N = 512 on."""
    n = X_MN.size(-1)
    if n < 512 or X_MN.device.type != "cpu" or X_MN.dtype == torch.bfloat16:
        return X_MN.mT @ X_MN
    R_NN = X_MN.new_empty(*X_MN.shape[:-2], n, n)
    width = -(-n // 4)
    for start in range(0, n, width):
        stop = min(start + width, n)
        strip = X_MN[..., start:stop].mT @ X_MN[..., start:]
        R_NN[..., start:stop, start:] = strip
        R_NN[..., stop:, start:stop] = strip[..., stop - start :].mT
    return R_NN


def multiply(A: Tensor, B: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A @ B computed in `dtype` (default their own), in the dtype and memory layout of A.

    The layout matters: on a CPU, adding a transposed view to a row-major tensor costs twenty times adding two of a kind.
    """
    work = A.dtype
    A, B, turned = _row_major(A.to(dtype or work), B.to(dtype or work))
    C = (A @ B).to(work)
    return C.mT if turned else C


def accumulate_(
    C: Tensor, A: Tensor, B: Tensor, dtype: torch.dtype | None = None, *, scale: float = 1.0
) -> Tensor:
    """C += scale A @ B in place, the product computed in `dtype`. C may be A."""
    work = A.dtype
    fused = dtype in (None, work) and C is not A and C.ndim == B.ndim <= 3
    # Not add_(A @ B, alpha=scale): torch's compiler forgets alpha when it fuses the sum with the product (2.13).
    A, B, turned = _row_major(A.to(dtype or work), B.to(dtype or work))
    target = C.mT if turned else C
    if fused:
        (target.addmm_ if target.ndim == 2 else target.baddbmm_)(A, B, alpha=scale)
    else:
        target.add_((A @ B).mul_(scale))
    return C


def _row_major(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor, bool]:
    """(A, B, False), or (B^T, A^T, True) if A is a transposed view, so that the product comes out like A."""
    turned = not A.is_contiguous() and A.mT.is_contiguous()
    return (B.mT, A.mT, True) if turned else (A, B, False)


def add_identity(A_NN: Tensor, value: float | Tensor = 1.0) -> Tensor:
    """A + value I, in place on A (a temporary of the caller)."""
    diagonal = A_NN.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(value if isinstance(value, float) else value.squeeze(-1))
    return A_NN


def diagonal_mean(A_NN: Tensor) -> Tensor:
    """tr(A) / N, (..., 1, 1)."""
    return A_NN.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


def nonzero(norm: Tensor) -> Tensor:
    """The norm, or 1 where it is 0, to divide by; NaN stays NaN."""
    return torch.where(norm == 0, torch.ones_like(norm), norm)


def working_dtype(X: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if X.dtype == torch.float64 else torch.float32


def _bounded(H: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    scale = torch.linalg.matrix_norm(H, keepdim=True)
    scale = nonzero(scale if noise is None else torch.maximum(scale, noise))
    return H / scale, scale


def _over_frobenius(X: Tensor) -> Tensor:
    return X / nonzero(torch.linalg.matrix_norm(X, keepdim=True))


def _guarded(triples: tuple[Quintic, ...], dtype: torch.dtype) -> list[Quintic]:
    """Coefficients of p(x / margin) for all but the last: rounding may push x past the interval, where p explodes."""
    margin = 1.01 if dtype in (torch.bfloat16, torch.float16) else 1.001
    return [(a / margin, b / margin**3, c / margin**5) for a, b, c in triples[:-1]] + [triples[-1]]


def _quintics(X_NM: Tensor, triples: Sequence[Quintic]) -> Tensor:
    """X <- a X + (b R + c R^2) X with R = X X^T, once a triple; X_NM is wide."""
    shape = X_NM.shape
    X = X_NM.reshape(-1, *shape[-2:]) if X_NM.ndim != 2 else X_NM
    fma = torch.addmm if X.ndim == 2 else torch.baddbmm
    for a, b, c in triples:
        R_NN = X @ X.mT
        R_NN = fma(R_NN, R_NN, R_NN, beta=b, alpha=c)
        X = fma(X, R_NN, X, beta=a)
    return X.reshape(shape)


def _best(H: Tensor) -> str:
    return "zolotarev" if H.device.type == "cpu" else "newton-schulz"


def _zolotarev(H_NN: Tensor, lower: float, tolerance: float) -> Tensor:
    """scale (1 + sum_j w_j (H + c_j)^-1)."""
    scale, terms, _ = zolotarev(lower, tolerance)
    P = 0 * H_NN  # carries NaN: the factorisation of a NaN matrix may look finite
    for weight, shift in terms:
        P = P.add_(_shifted_inverse(H_NN, shift), alpha=scale * weight)
    return add_identity(P, scale)


def _zolotarev_sqrt(H_NN: Tensor, lower: float, tolerance: float) -> Tensor:
    """H times `_zolotarev`; H (H + c)^-1 = 1 - c (H + c)^-1 saves the product."""
    scale, terms, _ = zolotarev(lower, tolerance)
    T = scale * H_NN
    for weight, shift in terms:
        T = T.sub_(_shifted_inverse(H_NN, shift), alpha=scale * weight * shift)
    return add_identity(T, scale * sum(weight for weight, _ in terms))


def _shifted_inverse(H_NN: Tensor, shift: float) -> Tensor:
    """(H + shift)^-1 by Cholesky. Inverting by halves through a Schur complement would save a few per cent on one core, but
    it is not backward stable: on a gradient of low rank it missed by 1e7."""
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(add_identity(H_NN.clone(), shift)).L)


def _newton_schulz(H_NN: Tensor, lower: float, tolerance: float) -> Tensor:
    """P <- P Y, R <- Y R Y with Y = a + b R + c R^2: the quintics of R^(1/2) carried by their right factor alone."""
    triples = _guarded(polar_express(lower, tolerance=tolerance / 2), H_NN.dtype)
    P: Any = None
    R = H_NN
    for step, (a, b, c) in enumerate(triples, 1):
        Y = add_identity(b * R + c * gram(R), a)
        P = Y if P is None else P @ Y
        if step < len(triples):
            R = Y @ R @ Y
    return P / (1 + tolerance / 2)


def _svd(X: Tensor) -> Tensor:
    bad = ~torch.isfinite(X).all(-1, keepdim=True).all(-2, keepdim=True)
    U, S, Vh = torch.linalg.svd(torch.where(bad, 0.0, X.double()), full_matrices=False)
    keep = S > S[..., :1] * max(X.shape[-2:]) * torch.finfo(X.dtype).eps
    return torch.where(bad, torch.nan, (U * keep[..., None, :]) @ Vh)
