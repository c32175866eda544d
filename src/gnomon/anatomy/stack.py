"""A stack of repeated layers: its tensors, its width, and what its shapes say about any one layer."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any, NamedTuple

from gnomon.anatomy.families import INSIDE, Family
from gnomon.anatomy.layouts import Facts
from gnomon.anatomy.names import Name
from gnomon.anatomy.non_matrix import non_matrix_role
from gnomon.anatomy.sizes import Sizes, read_sizes
from gnomon.anatomy.tensors import Tensor


class Member(NamedTuple):
    tensor: Tensor
    at: Name


class Stack:
    """Layers that share one prefix.

    Args:
        name: "text", "vision", "encoder" …
        members: its tensors, in stored order.
        config: the part of the model's config that speaks of this stack; may be empty.

    Attributes:
        outside: lengths of the embeddings, heads and norms that serve it (`find_stacks` adds them).
    """

    def __init__(self, name: str, members: list[Member], config: dict[str, Any]) -> None:
        self.name = name
        self.members = members
        self.config = config
        self.outside: set[int] = set()
        self._facts: dict[tuple[str, int | None], Facts] = {}

    @cached_property
    def samples(self) -> dict[str, Member]:
        """One weight that may be a matrix for each path inside the layers."""
        found: dict[str, Member] = {}
        for member in self.members:
            tensor, at = member
            known = found.get(at.template)
            # Of a LoRA pair, B (out x r) is the one whose rows tell.
            if at.template in INSIDE or known and not (known.at.adapter == "A" and at.adapter == "B"):
                continue
            if len(tensor.shape) >= 2 and non_matrix_role(tensor, at) is None:
                found[at.template] = member
        return found

    @cached_property
    def sizes(self) -> Sizes:
        return read_sizes(self.config, self.name)

    @cached_property
    def width(self) -> int | None:
        """Width of the residual stream.

        The config's, where some tensor has it; else the one length that tables and norms outside the layers share with
        the matrices inside; else the one that most tensors of a layer have. None when nothing of this decides.
        """
        axes: Counter[int] = Counter()
        for member in self.samples.values():
            if not is_packed(member) and not member.at.adapter:
                axes.update(set(member.tensor.shape[-2:]))
        vectors = {(at.template, at.leaf): tensor.shape for tensor, at in self.members if len(tensor.shape) == 1}
        votes = axes + Counter(shape[0] for shape in vectors.values())
        if self.sizes.width in votes:
            return self.sizes.width
        outside = [length for length in axes if length in self.outside]
        if len(outside) == 1:
            return outside[0]
        (first, most), (_, next_most) = (*votes.most_common(2), (None, 0), (None, 0))[:2]
        return first if most > next_most else None

    @property
    def width_is_told(self) -> bool:
        """Whether more than the count of matrices speaks for `width`."""
        norms = {
            tensor.shape[0] for tensor, at in self.members if non_matrix_role(tensor, at) == "norm" and tensor.shape
        }
        return self.width is not None and (
            self.width == self.sizes.width or self.width in self.outside or self.width in norms
        )

    def norm(self, layer: int | None, paths: str) -> str | None:
        """The gain stored at the first of `paths` (alternatives, `^` for the previous layer) that exists."""
        if layer is not None:
            for path in paths.split():
                if found := self._norms.get((layer - path.startswith("^"), path.removeprefix("^"))):
                    return found
        return None

    def facts(self, family: Family, layer: int | None) -> Facts:
        """What shapes and config say about one layer, its tensors named and oriented as `family` has them."""
        key = (family.name, layer)
        if key not in self._facts:
            self._facts[key] = self._gather(family, layer)
        return self._facts[key]

    def _gather(self, family: Family, layer: int | None) -> Facts:
        def inputs(wanted) -> int | None:
            for path, entry in family.roles.items():
                if (layer, path) in self._matrices and wanted(entry):
                    tensor, at = self._matrices[layer, path]
                    return tensor.shape[0 if is_transposed(tensor, at, family) else 1]
            return None

        sizes = self.sizes
        if sizes.heads is None:
            sizes = self._hints.get(layer, sizes)
        return Facts(
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            value_dim=sizes.value_dim,
            attention_width=inputs(lambda entry: entry == "output"),
            mlp_width=inputs(lambda entry: entry == "down"),
            latent=inputs(lambda entry: not isinstance(entry, str) and entry.layout == "nope_value") or sizes.latent,
            width=self.width,
        )

    @cached_property
    def _matrices(self) -> dict[tuple[int | None, str], Member]:
        # Of a LoRA pair, A (r x in) is the one that knows the inputs.
        found: dict[tuple[int | None, str], Member] = {}
        for member in self.members:
            tensor, at = member
            if len(tensor.shape) == 2 and at.leaf == "weight" and not is_packed(member) and at.adapter != "B":
                found.setdefault((at.layer, at.template), member)
        return found

    @cached_property
    def _norms(self) -> dict[tuple[int | None, str], str]:
        found: dict[tuple[int | None, str], str] = {}
        for tensor, at in self.members:
            if len(tensor.shape) == 1 and at.leaf in ("weight", "gamma", ""):
                found.setdefault((at.layer, at.path), tensor.name)
        return found

    @cached_property
    def _hints(self) -> dict[int | None, Sizes]:
        return {at.layer: tensor.hints for tensor, at in self.members if tensor.hints.heads}


def is_transposed(tensor: Tensor, at: Name, family: Family) -> bool:
    """Whether a 2-D weight is stored in x out: by its module's type, else by family. LoRA pairs never are."""
    if tensor.kind or at.adapter:
        return tensor.kind == "conv1d" and not at.adapter
    return family.transposed


def is_packed(member: Member) -> bool:
    """Whether each stored integer holds several weights (GPTQ, AWQ, 4-bit, MXFP4); int8 and fp8 do not."""
    tensor, at = member
    if tensor.dtype in ("int8", "i8") or tensor.dtype.startswith(("f8", "float8")):
        return False
    return at.packed or tensor.dtype in ("uint8", "u8", "int32", "i32")
