"""Pure functions on tensors and frozen values: the mathematics, with no modules and no files."""

from gnomon.geometry import checks, manifolds, polar, sphere, steepest, subspace

__all__ = ["checks", "manifolds", "polar", "sphere", "steepest", "subspace"]
