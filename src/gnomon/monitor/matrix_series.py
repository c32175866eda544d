"""The matrices of a model over its steps: what is remembered of each, and its numbers before and after a step.

Memory between steps: a vector a matrix, and with `since_start` a copy of the weights on the CPU. While a measured step runs, also
the weights before it and which entries have a gradient; activations are gone by then.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.anatomy import Part
from gnomon.monitor import matrix_numbers
from gnomon.monitor.matrix_numbers import FIRST_STEPS, NEXT_STEPS
from gnomon.optim.groups import from_plain
from gnomon.sharding import whole

Found = dict[str, dict[str, Tensor]]
"""Series -> place -> its number, or one number a head; still on the device."""


class Matrices:
    """The matrices watched.

    Args:
        model: whose parameters they are; sharded or not.
        parts: what they are. Parameters that are not trained are left out.
        since_start: keep a copy of the weights as they are now, for `change`.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Part], since_start: bool = True):
        parameters = dict(model.named_parameters())
        self.parts: list[Part] = [part for part in parts if part.name in parameters and parameters[part.name].requires_grad]
        self._parameters = {part.name: parameters[part.name] for part in self.parts}
        self.start: dict[str, Tensor] = {name: whole(p).cpu().clone() for name, p in self._parameters.items()} if since_start else {}
        self._vectors: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._moved: dict[str, Tensor] = {}

    def before(self) -> Found:
        """Numbers of the gradients; remembers the weights until `after`."""
        found: Found = {}
        for name, p in self._parameters.items():
            self._before[name] = p.detach().clone()
            if p.grad is None:
                continue
            self._moved[name] = p.grad != 0
            full = whole(p.grad)
            for part in self._of(name):
                _put(found, part.place, matrix_numbers.of_gradient(part.block.take(full)))
        return found

    def after(self) -> Found:
        """Numbers of the weights, and of the step since `before`, where that was called."""
        found: Found = {}
        spaces = []
        for name, p in self._parameters.items():
            full = whole(p)
            before, moved, start = self._before.pop(name, None), self._moved.pop(name, None), self.start.get(name)
            old, has_gradient = None if before is None else whole(before), None if moved is None else whole(moved)
            for part in self._of(name):
                W, take = part.block.take(full), part.block.take
                if old is not None:
                    _put(found, part.place, matrix_numbers.of_step(W, take(old), None if has_gradient is None else take(has_gradient)))
                if start is not None:
                    _put(found, part.place, {"change": matrix_numbers.relative(W, take(start).to(W.device))})
                _put(found, part.place, {"_norm": torch.linalg.vector_norm(W, dtype=torch.promote_types(W.dtype, torch.float32))})
                v_N = self._vectors.get(part.place)
                steps = FIRST_STEPS if v_N is None else NEXT_STEPS
                spaces.append(matrix_numbers.krylov(W, _random(part.place, W.shape[1]) if v_N is None else v_N, min(steps, *W.shape)))
        norms = found.pop("_norm", {})
        for part, (sigma, v_N) in zip(self._in_order(), matrix_numbers.leading(spaces)):
            self._vectors[part.place] = v_N
            stable = (norms[part.place] / sigma).square()
            _put(found, part.place, {"sigma_max": sigma, "stable_rank": stable})
        return found

    def feasibility(self, optimizer: Any) -> Found:
        """How far the matrices that `optimizer` keeps on manifolds are off them; the worst where a part has several (heads)."""
        found: Found = {}
        for group in getattr(optimizer, "param_groups", ()):
            if (manifolds := group.get("manifolds")) is None:
                continue
            for name in group.get("param_names", ()):
                if name not in self._parameters:
                    continue
                full, pieces = whole(self._parameters[name]), from_plain(manifolds[name])
                for part in self._of(name):
                    own = [piece for piece in pieces if piece[0] == part.block] or pieces
                    worst = torch.stack([manifold.violation(block.take(full)).max().float() for block, manifold in own]).max()
                    _put(found, part.place, {"feasibility": worst})
        return found

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What a resumed run needs to go on with the same numbers, kind by kind."""
        return {"start": self.start, "vectors": self._vectors}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        self.start.update({name: x for name, x in state.get("start", {}).items() if name in self.start})
        self._vectors = {part.place: state["vectors"][part.place] for part in self.parts if part.place in state.get("vectors", {})}

    def _of(self, name: str) -> list[Part]:
        return self._by_name()[name]

    def _by_name(self) -> dict[str, list[Part]]:
        grouped: dict[str, list[Part]] = {}
        for part in self.parts:
            grouped.setdefault(part.name, []).append(part)
        return grouped

    def _in_order(self) -> Iterator[Part]:
        for name in self._parameters:
            yield from self._of(name)


def _put(found: Found, place: str, numbers: dict[str, Tensor]) -> None:
    for key, value in numbers.items():
        found.setdefault(key, {})[place] = value


def _random(place: str, size: int) -> Tensor:
    """A start that is the same in every process and every run."""
    return torch.randn(size, generator=torch.Generator().manual_seed(zlib.crc32(place.encode())))
