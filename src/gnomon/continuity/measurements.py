"""What `inspect` found, as data: rows, remarks and series. `Report` adds the ways to show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gnomon.anatomy import Part
from gnomon.continuity.summary import LayerMap
from gnomon.geometry.subspace import Singular


@dataclass(frozen=True)
class Measurements:
    """What `inspect` found.

    Attributes:
        model, family: what was measured.
        settings: how: k, tier, fold_norms, lag …
        rows: one dict per pair of neighbouring layers; None stands for a number that does not exist.
        flags: remarks, each with `kind` and `message`.
        summary: one dict per stack and role.
        matrices: one dict per matrix: norm, sigma, gap, stable and effective rank.
        serial: what a layer writes against what the next reads.
        heads: head by head (when asked for).
        sharing: the price of one basis for two layers (full tier).
        heats: every layer against every other.
        leading, sigma: part -> leading vectors, and all singular values found; not in the JSON.
        other: the same of the model compared with.
    """

    model: str
    family: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    flags: list[dict[str, Any]] = field(default_factory=list)
    summary: list[dict[str, Any]] = field(default_factory=list)
    matrices: list[dict[str, Any]] = field(default_factory=list)
    serial: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, Any]] = field(default_factory=list)
    sharing: list[dict[str, Any]] = field(default_factory=list)
    heats: list[LayerMap] = field(default_factory=list)
    leading: Mapping[Part, Singular] = field(default_factory=dict)
    sigma: Mapping[Part, Tensor] = field(default_factory=dict)
    other: Measurements | None = None
