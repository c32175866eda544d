"""Numbers of one weight matrix, its step and its gradient: pure functions, whose results wait on the device.

Legend: W the weight after the step, V before it, G the gradient, all (M, N); v_N a start for the leading right vector; s steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.geometry.sphere import widen

FIRST_STEPS, NEXT_STEPS = 24, 6
"""Products with W^T W for the first look at a matrix, and for one that starts from what was found before."""


@dataclass(frozen=True)
class Krylov:
    """W^T W seen in a small basis: T_ss = Q (W^T W) Q^T with the orthonormal rows Q_sN."""

    T_ss: Tensor
    Q_sN: Tensor


def krylov(W: Tensor, v_N: Tensor, steps: int) -> Krylov:
    """A power iteration that forgets nothing (Lanczos on W^T W, reorthogonalised), so that a few steps from a good start do.

    Nothing waits for the device. A row of Q after the space is exhausted is zero, and so is its row of T.
    """
    W = widen(W)
    tiny = torch.finfo(W.dtype).tiny
    Q_sN, T_ss = W.new_zeros(steps, W.shape[1]), W.new_zeros(steps, steps)
    q_N = v_N.to(W) / v_N.to(W).norm().clamp_min(tiny)
    for j in range(steps):
        Q_sN[j] = q_N
        z_N = W.T @ (W @ q_N)
        size = z_N.norm()
        T_ss[j] = Q_sN @ z_N
        T_ss[:, j] = T_ss[j]
        z_N = z_N - T_ss[j] @ Q_sN
        z_N = z_N - (Q_sN @ z_N) @ Q_sN  # once loses digits
        rest = z_N.norm()
        # What is left within rounding is no direction.
        q_N = torch.where(rest > 1e-5 * size, z_N / rest.clamp_min(tiny), torch.zeros_like(z_N))
    return Krylov(T_ss, Q_sN)


def leading(spaces: Sequence[Krylov]) -> list[tuple[Tensor, Tensor]]:
    """(sigma_max, its right vector) of each matrix; NaN, and a zero vector, where a matrix is not finite."""
    by_size: dict[int, list[int]] = {}
    for index, space in enumerate(spaces):
        by_size.setdefault(len(space.T_ss), []).append(index)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for indices in by_size.values():
        T_nss = torch.stack([spaces[i].T_ss.double() for i in indices])
        finite_n = T_nss.isfinite().all(-1).all(-1)
        # LAPACK refuses NaN; what is put in its place does not get out.
        values_ns, vectors_nss = torch.linalg.eigh(torch.where(finite_n[:, None, None], T_nss, torch.zeros_like(T_nss)))
        for index, ok, value, y_s in zip(indices, finite_n, values_ns[:, -1], vectors_nss[..., -1]):
            Q_sN = spaces[index].Q_sN
            vector_N = torch.where(ok, y_s.to(Q_sN) @ Q_sN, torch.zeros_like(Q_sN[0]))
            found[index] = torch.where(ok, value.clamp_min(0).sqrt(), torch.nan), vector_N
    return [found[i] for i in range(len(spaces))]


def of_step(W: Tensor, V: Tensor, G: Tensor | None) -> dict[str, Tensor]:
    """`update` ||W - V|| / ||V||, `lost_to_rounding` and `lost_in_bf16`."""
    found = {"update": relative(W, V)}
    return found if G is None else found | {"lost_to_rounding": lost_to_rounding(W, V, G), "lost_in_bf16": lost_in_bf16(W, V, G)}


def relative(W: Tensor, V: Tensor) -> Tensor:
    """||W - V|| / ||V||; NaN for V = 0, of which nothing is a share."""
    V_w = widen(V)
    norm = V_w.norm()
    return torch.where(norm > 0, (widen(W) - V_w).norm() / norm.clamp_min(torch.finfo(norm.dtype).tiny), torch.nan)


def lost_to_rounding(W: Tensor, V: Tensor, G: Tensor) -> Tensor:
    """Share of the entries with a gradient which the step leaves exactly as they are, in the format they are kept in."""
    moved = G != 0
    count = moved.sum()
    return torch.where(count > 0, ((W == V) & moved).sum() / count.clamp_min(1), torch.nan)


def lost_in_bf16(W: Tensor, V: Tensor, G: Tensor) -> Tensor:
    """Share of the entries with a gradient which the step W - V leaves as they are when they are kept in bf16.

    For weights in bf16 that is what happened. For wider ones it is what would: the old value rounded to bf16, plus the step, rounds
    to the old value again when the step is below half a unit in the last place, 2^-9 to 2^-8 of the entry.
    """
    old, moved = V.bfloat16(), G != 0
    new = (old.float() + (widen(W) - widen(V)).float()).bfloat16()
    count = moved.sum()
    return torch.where(count > 0, ((new == old) & moved).sum() / count.clamp_min(1), torch.nan)


def of_gradient(G: Tensor) -> dict[str, Tensor]:
    """`gradient_norm`; entries that are not finite; the share that are zero or below the format's smallest normal number."""
    finite = G.isfinite()
    return {
        "gradient_norm": widen(G).norm(),
        "gradient_overflow": (~finite).sum(),
        "gradient_underflow": (G.abs() < torch.finfo(G.dtype).tiny).sum() / G.numel(),
    }
