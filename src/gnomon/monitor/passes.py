"""Running a model once more to look at it, and noticing what it was called with.

A compiled model is not hooked into: what it was called with is kept, and the same pass is run again uncompiled, without gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Call:
    """What a model is called with, and the autocast it was called under (None for that of whoever runs it)."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    autocast: tuple[str, bool, torch.dtype] | None = None


def call_with(batch: Any) -> Call:
    """A tensor, a tuple of arguments or a dict of named ones as a call."""
    if isinstance(batch, Tensor):
        return Call((batch,))
    return Call(kwargs=dict(batch)) if hasattr(batch, "keys") else Call(tuple(batch))


def inner(model: nn.Module) -> nn.Module:
    """The model inside what DDP and torch.compile put around it."""
    found: Any = model
    while True:
        if isinstance(found, DistributedDataParallel):
            found = found.module
        elif hasattr(found, "_orig_mod"):
            found = found._orig_mod
        else:
            return found


def compiled(model: nn.Module) -> bool:
    """Whether it, or something in it, is compiled."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


@torch.no_grad()
def run(model: nn.Module, call: Call, *, evaluate: bool) -> None:
    """One uncompiled pass without gradients, which leaves random numbers and the modules' modes as they were.

    Args:
        evaluate: in eval mode.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    cast: contextlib.AbstractContextManager = contextlib.nullcontext()
    if call.autocast is not None:
        kind, enabled, dtype = call.autocast
        cast = torch.autocast(kind, enabled=enabled, dtype=dtype)
    eagerly = torch.compiler.set_stance("force_eager") if compiled(model) else contextlib.nullcontext()
    modes = {module: module.training for module in model.modules()} if evaluate else {}
    # Not .eval(): a submodule may have made that a call of its own.
    try:
        for module in modes:
            module.training = False
        with torch.random.fork_rng([device] if device.type == "cuda" else []), cast, eagerly:
            model(*call.args, **(call.kwargs or {}))
    finally:
        for module, mode in modes.items():
            module.training = mode
        # FSDP2 keeps the root's gathered weights after a pass without gradients, and would train on with them after the step.
        for module in model.modules():
            if hasattr(module, "reshard") and hasattr(module, "unshard"):
                module.reshard()


class Listener:
    """Notices the first call of a compiled model while it listens."""

    def __init__(self, model: nn.Module):
        self._model, self._stop, self.heard = model, contextlib.ExitStack(), None

    def listen(self) -> None:
        self.stop()
        self.heard: Call | None = None
        model, whole = self._model, getattr(self._model, "_compiled_call_impl", None)
        if whole is None:
            handle = model.register_forward_pre_hook(lambda m, args, kwargs: self._hear(args, kwargs), with_kwargs=True)
            self._stop.callback(handle.remove)
        else:
            # The hooks of a module that was compiled in place lie inside what is compiled.
            def heard(*args: Any, **kwargs: Any) -> Any:
                self._hear(args, kwargs)
                return whole(*args, **kwargs)

            model._compiled_call_impl = heard
            self._stop.callback(setattr, model, "_compiled_call_impl", whole)

    def _hear(self, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.heard is None and (self._model.training or torch.is_grad_enabled()) and not torch.compiler.is_compiling():
            kind = next((p.device.type for p in self._model.parameters()), "cpu")
            self.heard = Call(args, kwargs, (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))

    def stop(self) -> None:
        """Stop listening, and let go of what was heard."""
        self._stop.close()
        self.heard = None


@contextlib.contextmanager
def uncast(device: torch.device) -> Iterator[None]:
    """Numbers are taken in their own precision, and leave no gradients."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
