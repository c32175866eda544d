"""One record per stored tensor, from a live module or from names and shapes alone. Never touches values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gnomon.anatomy.sizes import Sizes, read_sizes
from gnomon.errors import UserError


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is known of a stored tensor before anything is recognised.

    Attributes:
        kind: what the module that owns it is: "linear", "conv1d" (GPT-2's, in x out), "embedding", "norm",
            "conv", or "" when unknown, as always for a bare checkpoint.
        tied_to: an earlier name of the same parameter.
        hints: head counts found as attributes of the owning modules.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = ""
    kind: str = ""
    tied_to: str | None = None
    hints: Sizes = Sizes()


def from_module(module: Any) -> list[Tensor]:
    """Every parameter of a live `nn.Module` under every name it has, in definition order."""
    modules = dict(module.named_modules(remove_duplicate=False))
    first: dict[int, str] = {}
    tensors = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner_name, _, attribute = name.rpartition(".")
        owner = modules[owner_name]
        parent = modules[owner_name.rpartition(".")[0]]
        tensors.append(
            Tensor(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                kind=_kind(owner, attribute, parameter),
                tied_to=first.get(id(parameter)),
                hints=_hints(owner, parent),
            )
        )
        first.setdefault(id(parameter), name)
    return tensors


def from_mapping(shapes: Mapping[str, Any]) -> list[Tensor]:
    """From name -> shape. A value may also be anything with `.shape` and `.dtype`, such as a tensor.

    Raises:
        UserError: a value is neither a shape nor has one.
    """
    tensors = []
    for name, value in shapes.items():
        shape = getattr(value, "shape", value)
        try:
            shape = tuple(int(n) for n in shape)
        except (TypeError, ValueError):
            raise UserError(f"{name!r}: expected a shape such as (768, 768), got {value!r}") from None
        tensors.append(Tensor(str(name), shape, str(getattr(value, "dtype", "")).removeprefix("torch.").lower()))
    return tensors


def _kind(owner: Any, attribute: str, parameter: Any) -> str:
    # By class name along the inheritance, so that neither torch nor transformers has to be imported here.
    names = {cls.__name__ for cls in type(owner).__mro__}
    if "Conv1D" in names:
        return "conv1d"
    if "Linear" in names and attribute == "weight":
        as_linear = (getattr(owner, "out_features", None), getattr(owner, "in_features", None))
        return "linear" if tuple(parameter.shape) == as_linear else ""
    if "Embedding" in names:
        return "embedding"
    if "_ConvNd" in names:
        return "conv"
    if any("norm" in name.lower() for name in names) and parameter.ndim <= 1:
        return "norm"
    return ""


def _hints(owner: Any, parent: Any) -> Sizes:
    numbers = {
        key: value
        for module in (parent, owner)
        for key, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    return read_sizes(numbers, "") if numbers else Sizes()
