"""The list of blocks in a live model, by its anatomy."""

from __future__ import annotations

from torch import nn

from gnomon import anatomy
from gnomon.errors import UserError


def blocks_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and modules of the blocks that text passes through.

    Raises:
        UserError: the layers are not one list of blocks.
    """
    known = anatomy.read(model)
    text = [part for part in known if part.stack == _main(known) and part.layer is not None]
    prefixes = {prefix for part in text if (prefix := _list_of(model, part.name))}
    if len(prefixes) != 1:
        where = ", ".join(sorted(prefixes)) or "nowhere"
        raise UserError(f"{type(model).__name__} has no one list of blocks that text passes through (found: {where}).")
    prefix = prefixes.pop()
    found = model.get_submodule(prefix)
    assert isinstance(found, nn.ModuleList)
    return prefix, found


def _main(known: anatomy.Anatomy) -> str:
    """The stack with the most layers; "text" where there is one."""
    stacks = {part.stack: 0 for part in known if part.layer is not None}
    if not stacks or "text" in stacks:
        return "text"
    return max(stacks, key=lambda stack: len(known.layers(stack)))


def _list_of(model: nn.Module, name: str) -> str | None:
    """The outermost list of modules on the way to a parameter."""
    at, passed = model, []
    for step in name.split(".")[:-1]:
        if isinstance(at, nn.ModuleList):
            return ".".join(passed)
        at = getattr(at, step)
        passed.append(step)
    return None
