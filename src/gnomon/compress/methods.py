"""The methods that replace linears, by name."""

from __future__ import annotations

from gnomon.compress.low_rank import Method, pivoted, private
from gnomon.compress.modules import mlp, modules
from gnomon.compress.shared_basis import shared

METHODS: dict[str, Method] = {"private": private, "pivoted": pivoted, "shared": shared, "modules": modules, "mlp": mlp}
"""One signature: (blocks of a group, share of their weights that may stay) -> for each block, name of a linear -> what it becomes."""
