"""What a method of compression is given: a block's matrices, and the second moments of what they multiply.

Legend: M outputs, N inputs, B rows of text, T tokens, D channels of the stream.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gnomon import anatomy
from gnomon.compress.replacements import Replacement, Term
from gnomon.running.streamed import Block, Streamed

ROLES = frozenset(role for role in anatomy.ATTENTION | anatomy.MLP if not role.startswith("cross_"))
"""What is made smaller. Routers, experts in one tensor, mixers, and what reads an encoder stay as they are."""

# Classes that compute y = W x + b and nothing else.
_LINEAR = ("Linear", "Conv1D", "FalconLinear")
_STORED = {"BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, eq=False)
class Matrix:
    """One role's matrix.

    Attributes:
        linear: name of the module it is in, within the block: "self_attn.q_proj".
        role: one of `ROLES`, or several with "+" where a fused tensor could not be taken apart.
        W_MN: its numbers, fp32.
        rows: which outputs of the linear are its own; None for all.
        heads, head_dim: how many heads it holds and how wide they are, where known.
    """

    linear: str
    role: str
    W_MN: Tensor
    rows: tuple[int, ...] | None = None
    heads: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True, eq=False)
class BlockMatrices:
    """A block of a model, for a method.

    Attributes:
        index: its number.
        matrices: in stored order.
        shapes, biases: of each linear, by name.
        moments: C_NN = mean of x xᵀ over the calibration tokens, of each linear's input, fp64; empty before they are measured.
        tokens: how many.
        config: of the model.
        norms: names of the normalisations in the block.
    """

    index: int
    matrices: tuple[Matrix, ...]
    shapes: Mapping[str, tuple[int, int]]
    biases: Mapping[str, Tensor | None]
    moments: Mapping[str, Tensor]
    tokens: int = 0
    config: Any = None
    norms: tuple[str, ...] = ()

    def of(self, role: str) -> Matrix | None:
        """The matrix of this role; None where there is none, or more than one."""
        found = [matrix for matrix in self.matrices if matrix.role == role]
        return found[0] if len(found) == 1 else None

    def C_NN(self, matrix: Matrix) -> Tensor:
        """Second moments of what this matrix multiplies."""
        return self.moments[matrix.linear]

    @functools.cached_property
    def known(self) -> dict[Any, Any]:
        """What a method found out about the block that holds for every share, e.g. eigenvectors: another share has it at once. About as
        large as the moments, and gone with the block."""
        return {}

    @property
    def numel(self) -> int:
        """Weights of all matrices."""
        return sum(matrix.W_MN.numel() for matrix in self.matrices)


def joined(block: BlockMatrices, terms: Mapping[int, Term]) -> dict[str, Replacement]:
    """Linears of which every part is replaced.

    Args:
        terms: number of a matrix in `block.matrices` -> what it becomes, rows counted within the matrix.

    Returns:
        name of a linear -> what it becomes; linears none of whose matrices is in `terms` are left out.
    """
    found: dict[str, list[Term]] = {}
    wanted = {block.matrices[number].linear for number in terms}
    for number, matrix in enumerate(block.matrices):
        if matrix.linear in wanted:
            found.setdefault(matrix.linear, []).append(terms.get(number, Term(matrix.W_MN)).placed(matrix.rows))
    return {name: Replacement(block.shapes[name], tuple(some), block.biases[name]) for name, some in found.items()}


def linears_of(streamed: Streamed, index: int) -> dict[str, list[anatomy.Part]]:
    """The linears of a block that can be replaced: name within the block -> their matrices.

    They are modules of torch or transformers that do nothing else, each stored as one tensor of its own, all of it in known roles.
    """
    prefix = streamed.block_names[index] + "."
    model, of = streamed.model, streamed.sources.of
    by_tensor: dict[str, list[anatomy.Part]] = {}
    for part in streamed.anatomy:
        if part.name.startswith(prefix) and part.name.endswith(".weight"):
            by_tensor.setdefault(part.name, []).append(part)
    found = {}
    for name, parts in by_tensor.items():
        path = name.removesuffix(".weight")
        stored = of.get(name, ())
        shape = tuple(model.get_parameter(name).shape)
        if (
            is_linear(model.get_submodule(path))
            and all(part.is_matrix and part.expert is None and set(part.role.split("+")) <= ROLES for part in parts)
            and len(stored) == 1
            and streamed.checkpoint.entries[stored[0]].shape == shape
        ):
            found[path.removeprefix(prefix)] = parts
    return found


def is_linear(module: nn.Module) -> bool:
    """Whether it is y = W x + b and no class that does more."""
    return type(module).__name__ in _LINEAR and type(module).__module__.startswith(("torch.nn.", "transformers."))


def shape_of(linear: Any) -> tuple[int, int]:
    """(outputs, inputs); a Conv1D stores them the other way round."""
    first, second = linear.weight.shape
    return (second, first) if type(linear).__name__ == "Conv1D" else (first, second)


def stored_in(streamed: Streamed, name: str) -> torch.dtype:
    """In which numbers a parameter is written; what is quantised is written as fp32."""
    return _STORED.get(streamed.checkpoint.entries[streamed.sources.of[name][0]].dtype, torch.float32)


def take(streamed: Streamed, index: int, moments: Mapping[str, Tensor] | None = None, tokens: int = 0) -> BlockMatrices:
    """A block's matrices, copied out of the model, in which the block's weights must be (`Streamed.held`).

    With moments, only those of linears that the text reached: of the others nothing is known, and they stay.
    """
    block = streamed.model.get_submodule(streamed.block_names[index])
    matrices, shapes, biases = [], {}, {}
    for name, parts in linears_of(streamed, index).items():
        if moments and name not in moments:
            continue
        linear = block.get_submodule(name)
        M, _ = shapes[name] = shape_of(linear)
        for part in parts:
            rows = None if part.block.rows is None else tuple(places(part.block.rows, M))
            W_MN = part.block.take(linear.weight.detach()).float().clone()
            matrices.append(Matrix(name, part.role, W_MN, rows, part.heads, part.head_dim))
        biases[name] = None if linear.bias is None else linear.bias.detach().float().clone()
    config = streamed.model.config.get_text_config()
    norms = tuple(name for name, module in block.named_modules() if "Norm" in type(module).__name__)
    return BlockMatrices(index, tuple(matrices), shapes, biases, moments or {}, tokens, config, norms)


def places(cut: anatomy.Cut, length: int) -> list[int]:
    """The entries of an axis that a cut keeps."""
    return [place for place in range(length) if cut.start <= place % cut.period < cut.stop]


@contextlib.contextmanager
def measuring(block: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """While open, second moments of the inputs of these linears are summed: name -> sum of x xᵀ, fp64 (N, N).

    Linears that are called on the very same tensor one after the other (query, key, value) share one sum.
    """
    sums: dict[str, Tensor] = {}
    last: list[Tensor] = []  # the tensor itself is held, so that no other can have its address

    def see(name: str, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0]
        if last and last[0] is x:
            sums[name] = last[1]
            return
        rows_XN = x.reshape(-1, x.shape[-1])
        C_NN = sums.get(name)
        C_NN = torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float64) if C_NN is None else C_NN
        for some_XN in rows_XN.split(1024):  # within so many, fp32 loses less than the text's own chance
            C_NN += some_XN.T @ some_XN
        sums[name] = C_NN
        last[:] = [x, C_NN]

    with contextlib.ExitStack() as stack:
        for name in names:
            module = block.get_submodule(name)
            hook = module.register_forward_pre_hook(functools.partial(see, name))
            stack.callback(hook.remove)
        yield sums


def measured(streamed: Streamed, index: int, h_BTD: Tensor, block: Block) -> tuple[Tensor, BlockMatrices]:
    """The stream after a block as it was, and the block's matrices with the moments of their inputs."""
    with streamed.held([streamed.block_names[index]]):
        module = streamed.model.get_submodule(streamed.block_names[index])
        with measuring(module, list(linears_of(streamed, index))) as sums:
            after_BTD = block(h_BTD)
        count = h_BTD.shape[0] * h_BTD.shape[1]
        moments = {id(C_NN): C_NN / count for C_NN in sums.values()}  # one for all that share their input
        return after_BTD, take(streamed, index, {name: moments[id(C_NN)] for name, C_NN in sums.items()}, count)
