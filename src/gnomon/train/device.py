"""What a run computes with: the device, its precision, and numbers too small to matter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gnomon.errors import UserError
from gnomon.train.recipe import ComputeConfig

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


def choose_device(compute: ComputeConfig) -> torch.device:
    """The device of a recipe; "auto" takes cuda, then mps, then cpu.

    Raises:
        UserError: it was asked for and is not there.
    """
    if compute.device == "auto":
        for name, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
            if there:
                return torch.device(name)
        return torch.device("cpu")
    try:
        device = torch.device(compute.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device {compute.device!r} cannot be used here: {str(error).splitlines()[0]}. Try --device cpu."
        ) from error
    return device


def autocast(compute: ComputeConfig, device: torch.device) -> Autocast:
    """What to open around every forward pass."""
    if compute.precision == "fp32":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


def to_device(pair: tuple[Any, Any], device: torch.device) -> tuple[Tensor, Tensor]:
    """Two numpy arrays of token ids as tensors on the device."""
    x, y = (torch.from_numpy(array).to(device, non_blocking=True) for array in pair)
    return x, y


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """Treat denormal numbers as zero on the CPU while open, then as before.

    Moments of dead inputs decay into them, and then steps are several times slower. Worker threads inherit the setting
    from the thread that starts them, so it comes before any work.
    """
    smallest = torch.tensor([5e-324], dtype=torch.float64)
    before = not bool((smallest * 1).item())
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
