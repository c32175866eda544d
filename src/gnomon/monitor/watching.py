"""Looking at one forward pass through hooks, which exist for that pass only and change nothing in it.

Every place is measured once: the first pass that keeps gradients counts, or else the first. So the second run of a checkpointed
block, and further micro-batches, are not measured again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from gnomon.monitor import attention_calls, attention_rows, states
from gnomon.monitor.attention_calls import Attended
from gnomon.monitor.attention_rows import AttentionSums
from gnomon.monitor.places import AttentionPlace, BlockPlace, Places
from gnomon.monitor.states import StateSums


@dataclass
class _Running:
    """A block between its beginning and its end: the state that entered the sublayer which runs now."""

    state: Tensor
    sublayer: str = ""


class Watch:
    """The hooks on the places of a model, and what they saw.

    Args:
        places: where.
        sample: tokens of the whole batch whose states are put side by side.
        rows: rows of attention of the whole batch looked at in each block; None for all.
    """

    def __init__(self, places: Places, sample: int = states.SAMPLE, rows: int | None = attention_rows.ROWS):
        self.places: Places = places
        self._sample, self._rows, self._world = sample, rows, 1
        self._handles: list[RemovableHandle] = []
        self._open: list[contextlib.AbstractContextManager[Any]] = []
        self._forget()

    def _forget(self) -> None:
        # place -> whether gradients were kept in that pass, and its sums.
        self._states: dict[str, tuple[bool, StateSums]] = {}
        self._attention: dict[str, tuple[bool, AttentionSums]] = {}
        self._entry: dict[str, Tensor] = {}
        self._running: dict[str, _Running] = {}
        self._keep: Tensor | None = None

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def found(self) -> tuple[dict[str, StateSums], dict[str, AttentionSums]]:
        """What was seen by place, in the order of the model."""
        order = {place: i for i, (place, _) in enumerate(self.places.joins)}
        order |= {block.place(""): i for i, block in enumerate(self.places.blocks)}
        known = sorted(self._states, key=lambda place: order.get(place, order.get(place[: place.rindex(".") + 1], 0)))
        seen = [at.place for at in self.places.attentions if at.place in self._attention]
        return {place: self._states[place][1] for place in known}, {place: self._attention[place][1] for place in seen}

    def attach(self, model: nn.Module, world: int = 1, training: bool = True) -> None:
        """Set the hooks, and forget what was seen before.

        Args:
            world: how many processes share the batch; each looks at its part of the sample.
            training: leave out passes that evaluate: without gradients, in modules that are in eval mode.
        """
        self.detach()
        self._forget()
        self._training, self._world = training, world
        self._before(model, lambda module, args, kwargs: self._padding(kwargs))
        for place, join in self.places.joins:
            self._after(join, lambda m, args, kwargs, output, place=place: self._join(place, m, args, kwargs, output))
        for block in self.places.blocks:
            self._before(block.module, lambda m, args, kwargs, block=block: self._enter(block, args, kwargs))
            for sublayer, module in block.boundaries:
                self._before(module, lambda m, args, kwargs, block=block, name=sublayer: self._boundary(block, name, args, kwargs))
            self._after(block.module, lambda m, args, kwargs, output, block=block: self._leave(block, output))
        for at in self.places.attentions:
            self._before(at.module, lambda m, args, kwargs, at=at: self._begin(at))
            # Whoever began last ends first, and an exception ends all.
            end = _untraced(lambda m, args, output: self._end())
            self._handles.append(at.module.register_forward_hook(end, prepend=True, always_call=True))

    def detach(self) -> None:
        """Take the hooks away, and let go of every state."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._entry.clear()
        self._running.clear()
        self._keep = None
        while self._open:
            self._end()

    def _before(self, module: nn.Module, call: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_pre_hook(_untraced(call), with_kwargs=True))

    def _after(self, module: nn.Module, call: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_hook(_untraced(call), with_kwargs=True))

    def _wanted(self, found: dict[str, tuple[bool, Any]], place: str, module: nn.Module) -> bool:
        """Whether this pass is to be measured here."""
        graded = torch.is_grad_enabled()
        if self._training and not graded and not module.training:
            return False
        return place not in found or graded and not found[place][0]

    def _padding(self, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        self._keep = mask.detach() if isinstance(mask, Tensor) and mask.ndim == 2 else None

    # Hidden states: of a residual, its input and output; of a block, the states at its boundaries.

    def _join(self, place: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], g: Tensor) -> None:
        h, stack = args[0] if args else kwargs["h"], place.split(".")[0]
        if stack not in self._entry or place == next(p for p, _ in self.places.joins if p.split(".")[0] == stack):
            self._entry[stack] = h.detach()
        self._measure(place, module, h, g)

    def _enter(self, block: BlockPlace, args: tuple, kwargs: dict[str, Any]) -> None:
        if (h := _state(args, kwargs)) is None:
            return
        self._running[block.place("")] = _Running(h.detach())
        if block.stack not in self._entry or block is next(b for b in self.places.blocks if b.stack == block.stack):
            self._entry[block.stack] = h.detach()

    def _boundary(self, block: BlockPlace, sublayer: str, args: tuple, kwargs: dict[str, Any]) -> None:
        now, g = self._running.get(block.place("")), _state(args, kwargs)
        if now is None or g is None or g.shape != now.state.shape:
            return
        if g.data_ptr() == now.state.data_ptr():
            # The state is still the same: sublayers in parallel join the stream as one.
            now.sublayer = "block" if now.sublayer not in ("", sublayer) else sublayer
            return
        if now.sublayer:
            self._measure(block.place(now.sublayer), block.module, now.state, g)
        self._running[block.place("")] = _Running(g.detach(), sublayer)

    def _leave(self, block: BlockPlace, output: Any) -> None:
        now, g = self._running.pop(block.place(""), None), _state((output,), {})
        if now is not None and g is not None and g.shape == now.state.shape:
            self._measure(block.place(now.sublayer or "block"), block.module, now.state, g)

    def _measure(self, place: str, module: nn.Module, h: Tensor, g: Tensor) -> None:
        if not self._wanted(self._states, place, module):
            return
        entry = self._entry.get(place.rsplit(".", 2)[0], h)
        keep = self._keep if self._keep is not None and self._keep.shape == g.shape[:-1] else None
        with _aside(g.device):
            sums = states.add_up(h, g, entry if entry.shape == g.shape else h, keep, max(self._sample // self._world, 1))
        self._states[place] = torch.is_grad_enabled(), sums

    # Attention.

    def _begin(self, at: AttentionPlace) -> None:
        wanted = self._wanted(self._attention, at.place, at.module)
        look = attention_calls.seen(at.module, lambda seen: self._look(at, seen), at.heads)
        self._open.append(look if wanted else contextlib.nullcontext())
        self._open[-1].__enter__()

    def _end(self) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def _look(self, at: AttentionPlace, seen: Attended) -> None:
        with _aside(seen.device):
            count = None if self._rows is None else max(self._rows // self._world, 1)
            rows = attention_rows.choose(seen.B, seen.T, count, seen.device)
            logits = seen.logits(rows)
            fits = self._keep is not None and self._keep.shape == (seen.B, logits.shape[-1])
            sums = attention_rows.add_up(logits, rows, seen.T, self._keep if fits else None)
        self._attention[at.place] = torch.is_grad_enabled(), sums


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """What is computed here is no part of the run: no gradients, no autocast, and unseen by modes that watch operations
    (selective checkpointing counts them)."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _disable_current_modes():
        yield


def _untraced(call: Callable[..., None]) -> Callable[..., None]:
    """A hook that a compiler meets while it traces is not there."""

    def hook(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            call(*args)

    return hook


def _state(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The hidden states among what a module gets or gives: its first argument, `hidden_states`, or the first of a tuple."""
    first = args[0] if args else kwargs.get("hidden_states")
    if isinstance(first, (tuple, list)):
        first = first[0] if first else None
    return first if isinstance(first, Tensor) and first.is_floating_point() else None
