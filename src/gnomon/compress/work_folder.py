"""Finished groups of blocks on disk, so that a compression that was stopped goes on: one file a group, beside the folder to be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from gnomon.compress.replacements import Replacement, Term
from gnomon.errors import UserError
from gnomon.files import atomic, read_json, write_json

Made = Mapping[str, Replacement]
"""Name of a linear within its block -> what it becomes."""


@dataclass
class InMemory:
    """The same without a disk: gone when it is dropped."""

    made: dict[int, Made] = field(default_factory=dict)

    def __contains__(self, group: Sequence[int]) -> bool:
        return all(index in self.made for index in group)

    def save(self, group: Sequence[int], made: Sequence[Made]) -> None:
        self.made |= dict(zip(group, made, strict=True))

    def load(self, index: int) -> Made:
        return self.made.get(index, {})


class WorkFolder:
    """Replacements of the blocks of one compression.

    Args:
        out: the folder to be made; this one is named after it, `.OUT.part`.
        settings: what the replacements depend on. A folder of other settings is not gone on with.

    Raises:
        UserError: it holds the work of other settings; the message tells which differ.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]):
        self.path: Path = out.with_name(f".{out.name}.part")
        file = self.path / "settings.json"
        settings = json.loads(json.dumps(settings))
        if file.exists() and (begun := read_json(file)) != settings:
            differ = ", ".join(key for key in settings | begun if settings.get(key) != begun.get(key))
            raise UserError(
                f"{self.path} holds the beginnings of another compression to the same folder (other: {differ}). Give the settings "
                "it was begun with to go on, or remove it."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            write_json(file, settings)

    def __contains__(self, group: Sequence[int]) -> bool:
        return self._file(group[0]).exists()

    def save(self, group: Sequence[int], made: Sequence[Made]) -> None:
        """Write what the blocks of a group become; the file is whole or not there."""
        tensors, told = {}, {}
        for index, linears in zip(group, made):
            told[index] = {}
            for name, one in linears.items():
                terms = []
                for number, term in enumerate(one.terms):
                    keys = {side: f"shared.{key}.{side}" for side, key in term.shared.items()}
                    keys = {side: keys.get(side, f"{index}.{name}.{number}.{side}") for side in term.stored}
                    tensors |= {keys[side]: tensor for side, tensor in term.stored.items()}
                    places = {place: getattr(term, place) for place in ("rows", "columns", "pivots", "A_shared", "B_shared")}
                    terms.append({"keys": keys} | places)
                told[index][name] = {"shape": one.shape, "terms": terms, "bias": one.bias_M is not None}
                if one.bias_M is not None:
                    tensors[f"{index}.{name}.bias"] = one.bias_M
        contents = save({key: tensor.contiguous() for key, tensor in tensors.items()}, {"blocks": json.dumps(told)})
        for index in group[1:]:
            write_json(self.path / f"{index:04d}.json", {"with": group[0]})
        with atomic(self._file(group[0])) as file:
            file.write(contents)

    def load(self, index: int) -> dict[str, Replacement]:
        """What the linears of a block become; linears that stay as they are are left out."""
        follows = self.path / f"{index:04d}.json"
        first = read_json(follows)["with"] if follows.exists() else index
        with safe_open(self._file(first), "pt") as file:
            told = json.loads(file.metadata()["blocks"])[str(index)]
            return {
                name: Replacement(
                    tuple(one["shape"]),
                    tuple(_term(file, term) for term in one["terms"]),
                    file.get_tensor(f"{index}.{name}.bias") if one["bias"] else None,
                )
                for name, one in told.items()
            }

    def remove(self) -> None:
        """Remove it: the compressed model is whole."""
        shutil.rmtree(self.path)

    def _file(self, first: int) -> Path:
        return self.path / f"{first:04d}.safetensors"


def _term(file: Any, told: dict[str, Any]) -> Term:
    tensors: dict[str, torch.Tensor] = {side: file.get_tensor(key) for side, key in told["keys"].items()}
    places = {place: None if told[place] is None else tuple(told[place]) for place in ("rows", "columns", "pivots")}
    return Term(tensors["A"], tensors.get("B"), A_shared=told["A_shared"], B_shared=told["B_shared"], **places)
