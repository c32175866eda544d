"""Retractions on the hypersphere: a branch output rotates a hidden state instead of being added to it.

Legend: `...` batch and token dimensions, D channels; h_D a point, f_D a branch output, z_D its tangent part.

With rho = <h,h>, s = <h,f>/rho, z = f - s h, n = <z,z>, step ratio beta = alpha |z| / |h| and t = beta^2,

    h' = C(t) h + alpha sigma(t) z,   C = cos(theta),  sigma = sin(theta) / beta,  theta = p atan(beta / p)

so h' keeps the norm of h and turns by theta in the plane of h and z (arXiv 2608.02668; the formula is derived
from its definitions). p = 1 is the projection (h + alpha z) / |h + alpha z| (the gnomonic projection), p = 2 the
Cayley transform, p = inf the exponential map of GeoNorm (arXiv 2601.22095). All agree to second order in beta.

The hidden state 0 has no tangent sphere. Policy: **a zero row stays zero and sends no gradient**, neither to
itself nor to the branch nor to the step size; padding rows are harmless.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.errors import UserError

INF = float("inf")


def tangent(h: Tensor, f: Tensor) -> Tensor:
    """The component of `f` tangent to the sphere at `h`: f - (<h,f>/<h,h>) h.

    Projects twice: after one pass a branch nearly parallel to h leaves <h,z> at the rounding level of f, after
    two at that of z. Computed in fp32 or better and returned in the dtype of `f`; where h = 0 the result is 0.

    Args:
        h: points, (..., D).
        f: ambient vectors, (..., D), floating.
    """
    wide = torch.promote_types(torch.promote_types(h.dtype, f.dtype), torch.float32)
    h, z = h.to(wide), f.to(wide)
    rho = h.square().sum(-1, keepdim=True)
    alive = rho > 0
    inv_rho = torch.where(alive, rho, 1).reciprocal()
    for _ in range(2):
        z = z - (h * z).sum(-1, keepdim=True) * inv_rho * h
    return torch.where(alive, z, 0).to(f.dtype)


def retract(h: Tensor, v: Tensor, p: float = 1.0, radius: float | None = None) -> Tensor:
    """Move from `h` along the tangent vector `v`, staying on the sphere.

    A part of `v` that is not tangent is projected away first.

    Args:
        h: points, (..., D), any floating dtype.
        v: tangent vectors, (..., D).
        p: member of the family, in (0, inf]; 1 projection, 2 Cayley, inf exponential map.
        radius: norm of the result; None keeps the norm of `h`.

    Raises:
        UserError: p is not positive.
    """
    return step(h, v, 1.0, p=p, radius=radius)


def step(
    h: Tensor,
    f: Tensor,
    alpha: Tensor | float = 1.0,
    p: float = 1.0,
    radius: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """The residual update on the sphere: `retract(h, alpha * tangent(h, f), p)`, fused, with analytic gradient.

    Scalars are fp32 (fp64 for fp64 input) whatever the dtype of `h`; the backward pass saves h, f and three
    scalars a token. Finite for every f (0 and multiples of h included) and every step ratio. Higher derivatives and
    torch.func's vmap and reverse mode are right; forward mode (jvp) is not offered and raises.

    Args:
        h: points, (..., D).
        f: branch output, (..., D), broadcastable against nothing: same shape as `h`.
        alpha: step size: a number, or a tensor that broadcasts against (..., 1).
        p: member of the family, in (0, inf].
        radius: norm of the result. None keeps the norm of each row; a fixed radius keeps a bf16 stream from
            drifting, since each step then undoes the rounding of the last.
        cap: upper bound on the step ratio beta (GeoNorm clamps its angle to pi/4); None for no bound. Where
            it binds, neither alpha nor the length of the branch has a gradient.

    Returns:
        (..., D) in the dtype of `h`.

    Raises:
        UserError: shapes differ, p, radius or cap is not positive, or `alpha` is per channel.
    """
    check(p, radius, cap)
    if h.shape != f.shape:
        raise UserError(f"the branch must return the shape of the stream: h is {tuple(h.shape)}, f {tuple(f.shape)}")
    if not isinstance(alpha, Tensor):
        alpha = torch.full((1,), alpha, dtype=torch.promote_types(h.dtype, torch.float32), device=h.device)
    elif alpha.ndim and alpha.shape[-1] != 1:
        raise UserError(
            f"alpha must be one number a token, so its last dimension is 1; got {tuple(alpha.shape)}. "
            "A step size per channel leaves the plane of h and z (see the ngpt-step residual)."
        )
    return _Step.apply(h, f, alpha, p, radius, cap)[0]


def widen(x: Tensor) -> Tensor:
    """`x` in fp32, or as it is when that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def project(x: Tensor, radius: float) -> Tensor:
    """The nearest point of the sphere: radius * x / |x|, (..., D), in the dtype of `x`; a zero row stays zero
    and sends no gradient. The norm is taken in fp32 or better, with no epsilon to change the radius."""
    x_w = widen(x)
    n = _dot(x_w, x_w)
    alive = n > 0
    # The inner `where` keeps 1/sqrt(0) out of the gradient, the outer one keeps a zero row at zero.
    return torch.where(alive, x_w * (radius * torch.rsqrt(torch.where(alive, n, 1))), 0).to(x.dtype)


def check(p: float, radius: float | None = None, cap: float | None = None) -> None:
    """Raise a `UserError` unless p is in (0, inf] and radius and cap are positive or None."""
    if not p > 0:
        raise UserError(f"p must lie in (0, inf], got {p}. Use 1 (projection), 2 (Cayley) or inf (exponential map).")
    for name, value in (("radius", radius), ("cap", cap)):
        if value is not None and not value > 0:
            raise UserError(f"{name} must be positive or None, got {value}")


def step_simple(h: Tensor, f: Tensor, alpha: Tensor | float, p: float = 1.0) -> Tensor:
    """`step` as one reads it in the paper. The documentation; NaN at f = 0, slow and hungry for memory."""
    z = f - (h * f).sum(-1, keepdim=True) / h.square().sum(-1, keepdim=True) * h
    beta = alpha * z.norm(dim=-1, keepdim=True) / h.norm(dim=-1, keepdim=True)
    theta = beta if p == INF else p * torch.atan(beta / p)
    return torch.cos(theta) * h + torch.sin(theta) * h.norm(dim=-1, keepdim=True) * z / z.norm(dim=-1, keepdim=True)


class _Step(torch.autograd.Function):
    """Forward reads h and f and writes h'; backward reads those two and the gradient, and writes two.

    The three scalars a token that backward needs are outputs too: so they have gradients of their own, and a second
    derivative through the formulas of `backward` is right.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(h, f, alpha, p, radius, cap):
        wide = torch.promote_types(h.dtype, torch.float32)
        h_w, f_w, alpha_w = h.to(wide), f.to(wide), alpha.to(wide)
        rho = _dot(h_w, h_w)
        s = _dot(h_w, f_w) * _reciprocal(rho)
        # z explicitly: n = <f,f> - s <h,f> loses all digits when f is nearly parallel to h.
        z = torch.addcmul(f_w, s, h_w, value=-1)
        n = _dot(z, z)
        a = _bounded(alpha_w, n, rho, cap)[0]
        C, sigma = family(a * a * n * _reciprocal(rho), p)
        u = _rescale(rho, radius)
        out = torch.addcmul((u * C) * h_w, u * a * sigma * (rho > 0), z).to(h.dtype)
        return out, s, n, rho

    @staticmethod
    def setup_context(ctx, inputs, output):
        h, f, alpha, *ctx.options = inputs
        ctx.save_for_backward(h, f, alpha, *output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g, gs, gn, grho):
        h, f, alpha, s, n, rho = ctx.saved_tensors
        p, radius, cap = ctx.options
        g = torch.zeros_like(h) if g is None else g
        h_w, g_w, alpha_w = h.to(rho.dtype), g.to(rho.dtype), alpha.to(rho.dtype)
        z = torch.addcmul(f.to(rho.dtype), s, h_w, value=-1)
        inv_rho = _reciprocal(rho)
        a, bound = _bounded(alpha_w, n, rho, cap)
        t = a * a * n * inv_rho
        C, sigma = family(t, p)
        dC, dsigma = family_slopes(t, C, sigma, p)
        u = _rescale(rho, radius) * (rho > 0)

        # All partial derivatives are scalars a token. L depends on (h, z, n, rho, a) through h' = u (C h + a sigma z).
        gh, gz = _dot(g_w, h_w), _dot(g_w, z)
        dt = u * (gh * dC + gz * a * dsigma)
        da = u * gz * sigma + 2 * dt * a * n * inv_rho
        dn = dt * a * a * inv_rho
        drho = -dt * t * inv_rho
        if radius is not None:
            # u = radius / sqrt(rho): the radial part of h no longer reaches h'.
            drho = drho - u * (C * gh + a * sigma * gz) * inv_rho / 2
        if bound is not None:
            # Where the cap binds, a = cap sqrt(rho / n) follows n and rho instead of alpha.
            pull = torch.where(bound, da * a / 2, 0)
            dn = dn - pull * _reciprocal(n)
            drho = drho + pull * inv_rho
            da = torch.where(bound, 0, da)

        # Chain rule through s = <h,f>/rho, n = <z,z>, rho = <h,h>; dz is orthogonalised against h by the first line.
        S = u * a * sigma
        ds = -S * gh
        # Nobody but a second derivative asks for these.
        ds, dn, drho = (x if gx is None else x + gx for x, gx in ((ds, gs), (dn, gn), (drho, grho)))
        df = torch.addcmul(S * g_w, 2 * dn, z).addcmul_(ds * inv_rho, h_w)
        dh = torch.addcmul((u * C - S * s) * g_w, ds * inv_rho - 2 * dn * s, z)
        dh = dh.addcmul_(2 * drho - ds * inv_rho * s, h_w)
        dalpha = da.sum_to_size(alpha.shape) if ctx.needs_input_grad[2] else None
        return dh.to(h.dtype), df.to(f.dtype), _cast(dalpha, alpha), None, None, None


def family(t: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """C = cos(theta) and sigma = sin(theta)/beta of the p-family at t = beta^2 >= 0; no trigonometry for p = 1, 2."""
    if p == 1:
        C = torch.rsqrt(1 + t)
        return C, C
    if p == 2:
        sigma = 1 / (1 + t / 4)
        # Not (1 - t/4)/(1 + t/4), which is inf/inf once t overflows.
        return 2 * sigma - 1, sigma
    return _Family.apply(t, p)


class _Family(torch.autograd.Function):
    """The family by trigonometry, with the slopes of `family_slopes`: its own would be 0/0 at t = 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t, p):
        # The smallest normal beta stands in for 0, where sin(theta)/beta rounds to its limit 1.
        beta = t.sqrt().clamp_min(torch.finfo(t.dtype).tiny)
        theta = beta if p == INF else p * torch.atan(beta / p)
        return torch.cos(theta), torch.sin(theta) / beta

    @staticmethod
    def setup_context(ctx, inputs, output):
        t, ctx.p = inputs
        ctx.save_for_backward(t, *output)

    @staticmethod
    def backward(ctx, gC, gsigma):
        dC, dsigma = family_slopes(*ctx.saved_tensors, ctx.p)
        return gC * dC + gsigma * dsigma, None


def family_slopes(t: Tensor, C: Tensor, sigma: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """dC/dt and dsigma/dt, given the values of `family(t, p)`.

    dC/dt = -sigma / (2 D) and dsigma/dt = (C/D - sigma) / (2 t) with D = 1 + t/p^2. The second cancels for
    small t (5 % wrong in fp32 at t = 1e-6), so there it is summed as a power series.
    """
    if p == 1:
        slope = -0.5 * C * C * C
        return slope, slope
    if p == 2:
        return -0.5 * sigma * sigma, -0.25 * sigma * sigma
    q = 1 / p
    D = 1 + q * q * t
    edge = min(0.25, p * p / 16)
    closed = (C / D - sigma) / (2 * t.clamp_min(edge))
    return -0.5 * sigma / D, torch.where(t < edge, _slope_series(t.clamp_max(edge), D, q), closed)


def _slope_series(t: Tensor, D: Tensor, q: float) -> Tensor:
    """dsigma/dt for small t. With x = beta/p, sin and cos of p atan(x) are D^(-p/2) times the odd and even parts of
    (1+ix)^p, whose coefficients in t are c_j = (-1)^j prod_{i<2j} (1-iq) / (2j)! and s_j = c_j (1-2jq) / (2j+1)."""
    c, s, total, power = 1.0, 1.0, torch.zeros_like(t), torch.ones_like(t)
    for j in range(1, 9):
        c *= -(1 - (2 * j - 2) * q) * (1 - (2 * j - 1) * q) / ((2 * j - 1) * (2 * j))
        last, s = s, c * (1 - 2 * j * q) / (2 * j + 1)
        total = total + (c - s - q * q * last) * power
        power = power * t
    # D^(-p/2) -> 1 as p -> inf; log1p keeps the digits of D when q^2 t is below the rounding of 1.
    envelope = torch.exp(-torch.log1p(q * q * t) / (2 * q)) if q > 0 else 1.0
    return envelope * total / (2 * D)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _reciprocal(x: Tensor) -> Tensor:
    """1/x for x > 0 and 0 for x = 0."""
    return torch.where(x > 0, 1 / torch.where(x > 0, x, 1), 0)


def _rescale(rho: Tensor, radius: float | None) -> Tensor | float:
    return 1.0 if radius is None else radius * torch.rsqrt(torch.where(rho > 0, rho, 1))


def _bounded(alpha: Tensor, n: Tensor, rho: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """The step size after the cap on beta = alpha sqrt(n / rho), and where the cap binds."""
    if cap is None:
        return alpha, None
    bound = (alpha.square() * n > cap * cap * rho) & (rho > 0)
    ratio = torch.where(bound, rho * _reciprocal(n), 1)
    return torch.where(bound, torch.copysign(cap * ratio.sqrt(), alpha), alpha), bound


def _cast(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)


@dataclass(frozen=True)
class Sphere:
    """The sphere with one retraction of the p-family, as a value for `gnomon.geometry.checks`."""

    p: float = 1.0

    def random(self, *shape: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        """Points of norm sqrt(D), D = shape[-1]."""
        x = torch.randn(shape, generator=generator, dtype=dtype)
        return x * (math.sqrt(shape[-1]) / x.norm(dim=-1, keepdim=True))

    def tangent(self, h: Tensor, v: Tensor) -> Tensor:
        return tangent(h, v)

    def move(self, h: Tensor, v: Tensor) -> Tensor:
        return retract(h, v, self.p)
