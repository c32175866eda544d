"""What each tensor of a model is: `gnomon.anatomy.read(model_or_path)`."""

from __future__ import annotations

from gnomon.anatomy.anatomy import Anatomy, Pair, Part
from gnomon.anatomy.block import Block, Cut
from gnomon.anatomy.reader import read
from gnomon.anatomy.roles import ATTENTION, MLP, ROLES

__all__ = ["ATTENTION", "MLP", "ROLES", "Anatomy", "Block", "Cut", "Pair", "Part", "read"]
