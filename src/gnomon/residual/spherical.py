"""Residuals that rotate: the stream stays on a sphere and each sublayer turns it.

Legend: h the stream (..., D), F the branch, R the radius, l the sublayer or block number from 1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gnomon.errors import UserError, check_name
from gnomon.geometry import sphere
from gnomon.residual.base import Branch, Gain, Residual, ScaleNorm

DECAYS = ("sqrt", "harmonic", "linear", "none")


def decay_factor(rule: str, l: int, last: int) -> float:
    """lambda_l for l = 1 … last: 1/sqrt(l), 1/l, (last - l + 1)/last or 1."""
    check_name("decay", rule, DECAYS)
    return {"sqrt": l**-0.5, "harmonic": 1 / l, "linear": (last - l + 1) / last, "none": 1.0}[rule]


def turn_bound(decay: float, clamp: float | None, cap: float | None = None) -> float | None:
    """The bound on the step ratio |alpha z| / |h| of a sublayer: the smaller of `cap` and decay * `clamp`."""
    for name, value in (("clamp", clamp), ("cap", cap)):
        if value is not None and not value > 0:
            raise UserError(f"{name} must be positive or None, got {value}")
    return min((bound for bound in (cap, clamp and clamp * decay) if bound is not None), default=None)


class SphereResidual(Residual):
    """SpheretNorm: h' = retraction at h of alpha_l times the tangent part of F(h); no norm layers at all.

    alpha_l = lambda_l softplus(a) with a learnable `a` of shape (1,), lambda_l = 1/sqrt(l). The embeddings are put on
    the sphere of radius sqrt(D) once, so every coordinate has RMS 1 as after an RMSNorm, and the norm never changes.

    The paper's text could not be read in full. Stated there: the update, the p-family, the decay, softplus, an initial
    ScaleNorm. Ours, each an option: what l counts, the start of `a`, the radius, no norm and no gain before the head.

    Args:
        p: retraction: 1 projection, 2 Cayley, inf exponential map, any p > 0.
        decay: "sqrt" (paper), "harmonic", "linear" or "none".
        count: whether l counts "sublayer"s or "block"s.
        start: alpha at the first sublayer before training, softplus(a).
        learn: False freezes the step sizes.
        radius: None for sqrt(D).
        clamp: bound on the step ratio before the decay, as GeoNorm's: |alpha z| / |h| <= lambda_l clamp, so that the turns
            of all sublayers together stay bounded however many there are. The one to use. None for none.
        cap: the same bound at every depth, |alpha z| / |h| <= cap; where both are given the smaller holds. None for none.
        gain: start of one learnable factor on the stream before the head; None for no factor (the norm of the stream
            is constant, so the head alone then sets the temperature).
    """

    summary = "SpheretNorm: turn the stream on a sphere along a retraction of the p-family"
    source = "arXiv 2608.02668"

    def __init__(
        self,
        dim: int,
        *,
        p: float = 1.0,
        decay: str = "sqrt",
        count: str = "sublayer",
        start: float = 1.0,
        learn: bool = True,
        radius: float | None = None,
        clamp: float | None = None,
        cap: float | None = None,
        gain: float | None = None,
        **place: int,
    ):
        super().__init__(dim, **place)
        sphere.check(p, radius)
        if not start > 0:
            raise UserError(f"start must be positive, got {start}: alpha = lambda softplus(a) cannot be zero")
        last = self.depth if count == "sublayer" else self.blocks
        self.decay: float = decay_factor(decay, self.count(count), last)
        self.p: float = float(p)
        self.start: float = start
        self.gain: float | None = gain
        self.cap: float | None = turn_bound(self.decay, clamp, cap)
        self.radius: float = math.sqrt(dim) if radius is None else radius
        self.a: nn.Parameter = nn.Parameter(torch.empty(1), requires_grad=learn)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # The inverse of softplus; written with expm1 it stays accurate for small starts.
        nn.init.constant_(self.a, self.start if self.start > 40 else math.log(math.expm1(self.start)))

    def step_size(self) -> Tensor:
        """alpha, shape (1,), fp32 or wider."""
        return self.decay * F.softplus(sphere.widen(self.a))

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        return sphere.step(h, branch(h), self.step_size(), p=self.p, radius=self.radius, cap=self.cap)

    def entry(self) -> nn.Module:
        return ScaleNorm(self.radius)

    def exit(self) -> nn.Module:
        return nn.Identity() if self.gain is None else Gain(self.gain)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p:g}, decay={self.decay:.4g}, radius={self.radius:g}"


class GeoNorm(Residual):
    """h' = exp_h(lambda_l v), v the tangent part of F(h), |v|/|h| clamped to pi/4 before the decay.

    l counts blocks: both sublayers of a block share lambda_l. The paper gives no initial norm, so as printed the
    radius is whatever the embeddings have (0.55 for the usual init at D = 768); the default here puts them on the
    sphere of radius sqrt(D), as an option stated as ours, so that the comparison is not decided by the embedding scale.

    Args:
        decay: "harmonic" (the paper's best), "sqrt", "linear" or "none".
        clamp: bound on |v|/|h| in radians; None for none.
        radius: None for sqrt(D); 0 for the paper's text (no initial norm).
        listing: the paper's printed code with its constructor repaired. It always clamps to pi/4, applies
            lambda (scale theta + bias) with learnable scale and bias only for "sqrt" and "linear" (its "harmonic"
            branch assigns to a name never read, so it does not decay), and breaks the norm when v vanishes and the
            bias does not.
    """

    summary = "GeoNorm: move along the exponential map of the sphere with a fixed decaying step"
    source = "arXiv 2601.22095"

    def __init__(
        self,
        dim: int,
        *,
        decay: str = "harmonic",
        clamp: float | None = math.pi / 4,
        radius: float | None = None,
        listing: bool = False,
        **place: int,
    ):
        super().__init__(dim, **place)
        self.decay: float = decay_factor(decay, self.count("block"), self.blocks)
        if listing and clamp != math.pi / 4:
            raise UserError(f"the printed listing clamps at pi/4 whatever it is told; clamp={clamp} is for listing=False")
        self.cap: float | None = turn_bound(self.decay, clamp)
        self.listing: bool = listing
        # The listing turns along v / |v|.
        self.learns_from_zero: bool = not listing
        self.radius: float = math.sqrt(dim) if radius is None else radius
        if listing:
            self.decays: bool = decay in ("sqrt", "linear")
            self.scale: nn.Parameter = nn.Parameter(torch.empty(1), requires_grad=self.decays)
            self.bias: nn.Parameter = nn.Parameter(torch.empty(1), requires_grad=self.decays)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.listing:
            nn.init.ones_(self.scale)
            nn.init.zeros_(self.bias)

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        f = branch(h)
        if self.listing:
            return self._listing(h, f)
        return sphere.step(h, f, self.decay, p=sphere.INF, radius=self.radius or None, cap=self.cap)

    def _listing(self, h: Tensor, f: Tensor) -> Tensor:
        h_w = sphere.widen(h)
        v = sphere.tangent(h_w, f)
        v_norm = v.norm(dim=-1, keepdim=True)
        h_norm = h_w.norm(dim=-1, keepdim=True)
        theta = (v_norm / h_norm.clamp_min(1e-12)).clamp_max(math.pi / 4)
        if self.decays:
            theta = (self.scale * theta + self.bias) * self.decay
        unit = v / v_norm.clamp_min(1e-12)
        return (torch.cos(theta) * h_w + torch.sin(theta) * h_norm * unit).to(h.dtype)

    def entry(self) -> nn.Module:
        return ScaleNorm(self.radius) if self.radius else nn.Identity()


class NGPTStep(Residual):
    """h' = N(h + a (N(F(h)) - h)), N the projection to the sphere and a >= 0 learnable; the hidden-state half of nGPT.

    With a scalar `a` this is a p = 1 step; with one per channel (nGPT's choice) it leaves the plane of h and F(h).
    nGPT also keeps its weights normalised, which this residual does not.

    Args:
        per_channel: one step per channel (shape (D,)) or one in all (shape (1,)).
        start: a before training, 0.05 in the paper (about 1/blocks).
        radius: None for sqrt(D); nGPT uses 1 and rescales inside the branches.
        gain: start of one learnable factor on the stream before the head, in place of nGPT's logit scale per token;
            None for no factor.
    """

    summary = "nGPT step: interpolate towards the normalised branch, then normalise"
    source = "arXiv 2410.01131"
    learns_from_zero = False

    def __init__(
        self,
        dim: int,
        *,
        per_channel: bool = True,
        start: float = 0.05,
        radius: float | None = None,
        gain: float | None = 1.0,
        **place: int,
    ):
        super().__init__(dim, **place)
        self.start: float = start
        self.gain: float | None = gain
        self.radius: float = math.sqrt(dim) if radius is None else radius
        # nGPT stores a * scale / start with scale = 1/sqrt(D), so that one learning rate suits a and the matrices.
        self.scale: float = dim**-0.5
        self.a: nn.Parameter = nn.Parameter(torch.empty(dim if per_channel else 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.a, self.scale)

    def step_size(self) -> Tensor:
        """a, shape (1,) or (D,), fp32 or wider."""
        return sphere.widen(self.a).abs() * (self.start / self.scale)

    def forward(self, h: Tensor, branch: Branch) -> Tensor:
        a = self.step_size()
        h_w, f_w = h.to(a.dtype), sphere.project(branch(h).to(a.dtype), self.radius)
        return sphere.project(torch.lerp(h_w, f_w, a), self.radius).to(h.dtype)

    def entry(self) -> nn.Module:
        return ScaleNorm(self.radius)

    def exit(self) -> nn.Module:
        return nn.Identity() if self.gain is None else Gain(self.gain)
