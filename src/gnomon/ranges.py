"""What settings may be, said once, in their types: `batch: Count = 16`."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from gnomon.errors import UserError
from gnomon.files import restored

Count = Annotated[int, "[1, inf)"]
Natural = Annotated[int, "[0, inf)"]
Positive = Annotated[float, "(0, inf)"]
NonNegative = Annotated[float, "[0, inf)"]
Fraction = Annotated[float, "[0, 1]"]
ProperFraction = Annotated[float, "(0, 1)"]
Decay = Annotated[float, "[0, 1)"]
"""Of a running mean."""


def check_ranges(settings: Any, path: str = "") -> None:
    """Hold every number of a dataclass, and of dataclasses in it, against the interval in its type.

    Args:
        path: of the settings, with a dot at its end, for the message.

    Raises:
        UserError: a number outside its interval; NaN is outside all.
    """
    for name, interval in _intervals(type(settings)).items():
        value = getattr(settings, name)
        if dataclasses.is_dataclass(value):
            check_ranges(value, f"{path}{name}.")
        elif interval is not None:
            for number in value if isinstance(value, tuple) else () if value is None else (value,):
                if not _inside(number, interval):
                    raise UserError(f"{path}{name} must lie in {interval}, got {value}")


@functools.cache
def _intervals(kind: type) -> dict[str, str | None]:
    """Field -> interval; kept, since making a recipe would otherwise be mostly this."""
    return {name: _interval(hint) for name, hint in typing.get_type_hints(kind, include_extras=True).items()}


def _interval(hint: Any) -> str | None:
    """The interval of an annotated number, of one that may be None, or of the numbers of a tuple."""
    if typing.get_origin(hint) is Annotated:
        return next((note for note in hint.__metadata__ if isinstance(note, str)), None)
    return next(filter(None, map(_interval, typing.get_args(hint))), None)


@functools.cache
def _ends(interval: str) -> tuple[float, ...]:
    return tuple(float(end) for end in interval[1:-1].split(","))


def _inside(number: float, interval: str) -> bool:
    low, high = _ends(interval)
    return (low < number or interval[0] == "[" and number == low) and (
        number < high or interval[-1] == "]" and number == high
    )


def convert(hint: Any, value: Any, path: str) -> Any:
    """A plain value, as JSON has it, as the type of a setting: an int where a float is wanted, a list where a tuple, "inf".

    Raises:
        UserError: it is of another type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = [a for a in arguments if a is not type(None)]
        return convert(hint, value, path)
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(arguments):
        return tuple(convert(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(arguments, value)))
    if origin is dict and isinstance(value, Mapping):
        return restored(value)
    if hint is float:
        value = restored(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise UserError(f"{path} has {len(str(abs(value)))} digits, more than a float holds") from error
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    expected = getattr(hint, "__name__", str(hint))
    raise UserError(f"{path} should be of type {expected}, got {value!r} ({type(value).__name__})")
