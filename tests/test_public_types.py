"""What an editor shows of a public name: where it comes from, and the type of every parameter and result."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import public_types
import pytest

import gnomon

ROOMS = ["gnomon", *(f"gnomon.{room}" for room in gnomon._ROOMS), "gnomon.models.hf"]
# Types that say less than they should where nothing stands in brackets.
BARE = re.compile(r"\b(dict|list|tuple|set|frozenset|PathLike|Callable|Iterable|Iterator|Sequence|Mapping)\b(?!\[)")


def seen_by_an_editor(room: str) -> dict[str, str]:
    """Public name -> the module it is imported from under TYPE_CHECKING, as `X as X`, which is how a typed package exports."""
    tree = ast.parse(Path(importlib.import_module(room).__file__).read_text())
    found = {}
    for block in (node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
        for node in block.body:
            assert isinstance(node, ast.ImportFrom) and all(alias.asname == alias.name for alias in node.names), ast.unparse(node)
            found |= {alias.name: node.module for alias in node.names}
    return found


def functions(thing, name: str):
    """(name, function) of a function, or of a class: its `__init__` and public methods, those of our bases too."""
    if inspect.isfunction(thing):
        yield name, thing
    elif inspect.isclass(thing):
        for owner in (each for each in thing.__mro__ if each.__module__.startswith("gnomon")):
            for key, value in vars(owner).items():
                value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if inspect.isfunction(value) and value.__module__ == owner.__module__ and (key == "__init__" or not key.startswith("_")):
                    yield f"{owner.__module__}.{owner.__qualname__}.{key}", value


def untyped(name: str, function) -> list[str]:
    """What is left open in a function's signature."""
    signature = inspect.signature(function)
    parts = {key: parameter.annotation for key, parameter in signature.parameters.items() if key not in ("self", "cls")}
    if not name.endswith("__init__"):
        parts["return"] = signature.return_annotation
    empty = inspect.Signature.empty
    told = {key: "" if kind is empty else kind if isinstance(kind, str) else inspect.formatannotation(kind) for key, kind in parts.items()}
    return [f"{name}({key}: {kind or 'no type'})" for key, kind in told.items() if not kind or BARE.search(kind)]


@pytest.mark.parametrize("room", ROOMS)
def test_lazy_names_are_what_an_editor_sees(room):
    module = importlib.import_module(room)
    lazy = {name for name in module.__all__ if name not in vars(module) or name in seen_by_an_editor(room)} - {"__version__"}
    assert lazy == seen_by_an_editor(room).keys()
    for name, where in seen_by_an_editor(room).items():
        found = importlib.import_module(where)
        assert getattr(module, name) is getattr(found, name), name


@pytest.mark.parametrize("room", ROOMS)
def test_parameters_and_results_have_types(room):
    module = importlib.import_module(room)
    public = [(name, getattr(module, name)) for name in module.__all__]
    ours = [(name, thing) for name, thing in public if getattr(thing, "__module__", "").startswith("gnomon")]
    assert [line for name, thing in ours for each, function in functions(thing, name) for line in untyped(each, function)] == []


def test_open_signatures_are_found():
    def loose(a, b: dict, *c: int):
        """Nothing."""

    assert untyped("loose", loose) == ["loose(a: no type)", "loose(b: dict)", "loose(return: no type)"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_type_checker_knows_every_public_name():
    """Also below the rooms, and attributes too, which signatures do not show."""
    pytest.importorskip("pyright")
    found = public_types.symbols()
    assert len(found) > 1000
    assert [one["name"] for one in found if public_types.left_open(one) and not one["name"].startswith(tuple(public_types.OPEN))] == []
