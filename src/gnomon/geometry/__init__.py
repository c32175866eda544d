"""Pure functions on tensors and frozen values: the mathematics, with no modules and no files."""

from gnomon.geometry import checks, sphere

__all__ = ["checks", "sphere"]
