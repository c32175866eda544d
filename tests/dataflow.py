"""What each row of each weight does in a model, found by running it and asking autograd; nothing here reads a role off a name.

Each output of a matrix product with a parameter, and of a softmax over positions, is cut off as a leaf of its own. So the
gradient of what enters the next product or softmax tells which rows reach it directly. With positions i != j:

    query   rows that move score (i, j) from position i      key     rows that move it from position j
    output  products of what softmax gave                    value   rows that move its input at i from position j
    down    products of what other rows of the layer gave    up, gate  those rows; the second derivative of its input by
    mixer   the same, where positions mix without softmax              a row of the gate is not zero
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_transformers import T_ENCODER, T
from torch import Tensor
from torch.overrides import TorchFunctionMode

I, J = T - 1, 3  # noqa: E741  positions looked at: the last of the shorter text, and one before it
KNOWN = set("query key value output cross_query cross_key cross_value cross_output gate up down".split())


@dataclass
class Product:
    name: str
    x: Tensor
    W: Tensor
    leaf: Tensor
    order: int
    labels: list[set[str]] = field(default_factory=list)

    def rows(self, found: Tensor, label: str) -> None:
        for row in found.nonzero().flatten().tolist():
            self.labels[row].add(label)

    def all(self) -> set[str]:
        return set().union(*self.labels)


@dataclass
class Softmax:
    scores: Tensor
    leaf: Tensor
    order: int

    @property
    def cross(self) -> str:
        return "cross_" if self.scores.shape[-1] >= T_ENCODER and self.scores.shape[-2] == T else ""


class Tape(TorchFunctionMode):
    """Records products with parameters and softmax over positions, and cuts the graph behind each."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.names: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            self.names.setdefault(parameter.untyped_storage().data_ptr(), name)
        self.products: list[Product] = []
        self.embedded: list[Product] = []
        self.softmax: list[Softmax] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "linear" and self._parameter(W := args[1] if len(args) > 1 else kwargs.get("weight")):
            return self._product(args[0], W, func(*args, **kwargs))
        if name == "addmm" and self._parameter(args[2]):
            return self._product(args[1], args[2].T, func(*args, **kwargs))
        if name in ("matmul", "mm", "__matmul__") and len(args) == 2 and self._parameter(args[1]):
            return self._product(args[0], args[1].T, func(*args, **kwargs))
        if name == "bmm" and self._parameter(args[1], dims=3):
            return torch.stack([self._product(x, W.T, x @ W) for x, W in zip(*args)])
        result = func(*args, **kwargs)
        if name == "embedding" and torch.is_grad_enabled():
            leaf = result.detach().requires_grad_()
            self.embedded.append(Product("", leaf, leaf, leaf, -1))
            return leaf * 1
        if name in ("softmax", "sigmoid"):
            scores, lengths = args[0], (T, T + 1, T_ENCODER, T_ENCODER + 1)
            if scores.dim() >= 3 and scores.shape[-1] in lengths and scores.shape[-2] in (T, T_ENCODER):
                if scores.requires_grad and torch.is_grad_enabled():
                    leaf = result.detach().requires_grad_()
                    self.softmax.append(Softmax(scores, leaf, self._count()))
                    return leaf * 1
        return result

    def _parameter(self, W: Any, dims: int = 2) -> bool:
        known = isinstance(W, Tensor) and W.dim() == dims and W.numel() > 0
        return known and W.untyped_storage().data_ptr() in self.names

    def _product(self, x: Tensor, W: Tensor, y: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return y
        leaf = y.detach().requires_grad_()
        name = self.names[W.untyped_storage().data_ptr()]
        self.products.append(Product(name, x, W.detach(), leaf, self._count(), [set() for _ in range(y.shape[-1])]))
        return leaf * 1

    def _count(self) -> int:
        return len(self.products) + len(self.softmax)


def labels_of_rows(model: torch.nn.Module, inputs: dict[str, Any]) -> dict[bytes, tuple[str, set[str]]]:
    """The numbers of a row, out x in, -> its layer and what it does. Rows of products that did not run are not there."""
    with Tape(model) as tape:
        model(**inputs)
    layers: dict[str, list[Product]] = {}
    outside = list(tape.embedded)
    for product in tape.products:
        if found := re.match(r"(.*?\.\d+\.)", product.name):
            layers.setdefault(found[1], []).append(product)
        else:
            outside.append(product)
    before: dict[str, list[Product]] = {}
    for layer, products in layers.items():
        stack = re.sub(r"\d+\.$", "", layer)
        attention = [s for s in tape.softmax if _queries_and_keys(s, products)]
        writers = _outputs_and_values(attention, products, before.get(stack, outside))
        _mlps_and_mixers(products, writers)
        before[stack] = products
    return {
        row.contiguous().numpy().tobytes(): (layer, labels)
        for layer, products in layers.items()
        for product in products
        for row, labels in zip(product.W, product.labels)
    }


def _gradients(scalar: Tensor, products: list[Product]) -> list[Tensor | None]:
    if not products or not scalar.requires_grad:
        return [None] * len(products)
    leaves = [product.leaf for product in products]
    found = torch.autograd.grad(scalar, leaves, retain_graph=True, allow_unused=True)
    return [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in found]


def _weighted(x: Tensor) -> Tensor:
    return (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))).sum()


def _queries_and_keys(softmax: Softmax, products: list[Product]) -> bool:
    queries, keys = softmax.scores.shape[-2], T_ENCODER if softmax.scores.shape[-1] >= T_ENCODER else T
    scores = softmax.scores.reshape(-1, *softmax.scores.shape[-2:])[:, queries - 1, J]
    hit = False
    for product, grad in zip(products, _gradients(_weighted(scores), products)):
        for role, length, at in (("query", queries, queries - 1), ("key", keys, J)):
            if grad is not None and len(grad) == length and grad[at].any():
                product.rows(grad[at].abs() > 0, softmax.cross + role)
                hit = True
    return hit


def _outputs_and_values(attention: list[Softmax], products: list[Product], earlier: list[Product]) -> set[int]:
    """Labels them; returns the orders of products whose outputs join the stream."""
    writers: set[int] = set()
    for product in products:
        x = product.x.reshape(-1, product.x.shape[-1])
        if not x.requires_grad:
            continue
        for softmax in attention:
            at = softmax.scores.shape[-2] - 1
            if softmax.order > product.order or len(x) != at + 1:
                continue
            (grad,) = torch.autograd.grad(_weighted(x), [softmax.leaf], retain_graph=True, allow_unused=True)
            if grad is None or not grad.any():
                continue
            product.rows(torch.ones(len(product.labels)), softmax.cross + "output")
            writers.add(product.order)
            for other, moves in zip(products, _gradients(_weighted(x[at]), products)):
                if moves is not None and other is not product and len(moves) in (T, T_ENCODER):
                    other.rows(moves[J].abs() > 0, softmax.cross + "value")
                    if len(moves) == at + 1:
                        other.rows((moves[at].abs() > 0) & (moves[J] == 0), "gate of attention")
        inner = [other for other in products if other.order in writers and other is not product]
        if earlier and inner and product.order not in writers:
            # An output in two steps: the second takes what the first gave, and nothing of the stream.
            from_inner = any(g is not None and g.any() for g in _gradients(_weighted(x), inner))
            if from_inner and not any(g is not None and g.any() for g in _gradients(_weighted(x), earlier)):
                product.rows(torch.ones(len(product.labels)), "output")
                writers.add(product.order)
    return writers


def _mlps_and_mixers(products: list[Product], writers: set[int]) -> None:
    takes_part = {p.order for p in products if p.all() & (KNOWN - {"gate", "up", "down", "output", "cross_output"})}
    done = set(writers)
    for product in products:
        x = product.x.reshape(-1, product.x.shape[-1])
        if not x.requires_grad or product.order in writers:
            continue
        sources = [other for other in products if other.order < product.order and other.order not in done]
        reached = [(s, g.abs().sum(0) > 0) for s, g in zip(sources, _gradients(_weighted(x), sources)) if g is not None]
        reached = [(source, rows) for source, rows in reached if rows.any()]
        if product.order in takes_part:
            for source, rows in reached:
                source.rows(rows, "latent")
            continue
        many = [(source, rows) for source, rows in reached if 4 * int(rows.sum()) >= x.shape[-1]]
        mixes = len(x) == T and any(
            grad is not None and len(grad) == T and grad[:I].any()
            for grad in _gradients(_weighted(x[I]), [source for source, _ in many])
        )
        # An MLP has as many rows as it gives numbers; routers and the scales of hyper-connections have fewer.
        wide = [(source, rows) for source, rows in many if mixes or len(rows) >= x.shape[-1]]
        if not wide:
            continue
        done.add(product.order)
        product.rows(torch.ones(len(product.labels)), "mixer_out" if mixes else "down")
        wide = [(source, rows) for source, rows in wide if source.order not in takes_part]
        if mixes:
            for source, rows in wide:
                source.rows(rows, "mixer_in")
        else:
            _gates_and_ups(x, wide)


def _gates_and_ups(x: Tensor, sources: list[tuple[Product, Tensor]]) -> None:
    gated = sum(len(rows) for _, rows in sources) >= 1.5 * x.shape[-1]
    slopes = torch.autograd.grad(_weighted(x), [s.leaf for s, _ in sources], create_graph=True) if sources else ()
    bent = []
    for (source, rows), slope in zip(sources, slopes):
        slope = slope.reshape(-1, slope.shape[-1]).sum(0)
        second = torch.zeros(len(rows), dtype=torch.bool)
        for row in rows.nonzero().flatten().tolist() if slope.requires_grad and gated else ():
            (grad,) = torch.autograd.grad(slope[row], [source.leaf], retain_graph=True, allow_unused=True)
            second[row] = grad is not None and bool(grad[..., row].any())
        bent.append(second)
    # A ReLU bends nowhere and a norm behind the product bends all rows that are alive: then which is which is not told.
    bending = sum(int(second[rows].sum()) for second, (_, rows) in zip(bent, sources))
    told = gated and 0.25 < bending / sum(int(rows.sum()) for _, rows in sources) < 0.75
    for (source, rows), second in zip(sources, bent):
        if told:
            source.rows(rows & second, "gate")
            source.rows(rows & ~second, "up")
        else:
            for role in ("gate", "up") if gated else ("up",):
                source.rows(rows, role)
