"""Models in several files, with the index that says which tensor is in which file, or without one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gnomon.errors import UserError
from gnomon.files import read_json

T = TypeVar("T")
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[a-z]+)$")


def from_index(index: Path, read: Callable[[Path], dict[str, T]]) -> tuple[dict[str, T], tuple[str, ...]]:
    """The tensors an index lists, each from the file it names and from no other; and notes on what was passed over.

    Args:
        read: tensor name -> whatever stands for a tensor, of one file.

    Raises:
        UserError: the index is not one, or a shard or a tensor it names is not there.
    """
    folder, weight_map = index.parent, read_index(index)
    found: dict[str, T] = {}
    stray = 0
    for shard in sorted(set(weight_map.values())):
        tensors = read(folder / shard)
        ours = {name: tensor for name, tensor in tensors.items() if weight_map.get(name) == shard}
        found |= ours
        stray += len(tensors) - len(ours)
    if missing := [name for name in weight_map if name not in found]:
        name = missing[0]
        raise UserError(
            f"{index.name} places {name!r} in {weight_map[name]}, which does not hold it ({len(missing)} such tensors). "
            f"Index and shards are of different versions; download all files of {folder} again."
        )
    notes = [f"{stray} tensors in the shards are not in the index and were passed over"] * bool(stray)
    others = sorted({item.name for item in folder.glob(f"*{Path(shard).suffix}")} - set(weight_map.values()))
    return found, (*notes, *(f"{name} is not in the index and was passed over" for name in others))


def from_numbers(paths: list[Path], read: Callable[[Path], dict[str, T]]) -> tuple[dict[str, T], tuple[str, ...]]:
    """The tensors of shards `…-00001-of-0000n.…` whose index is lost, and a note that says so.

    Raises:
        UserError: two shards hold the same tensor.
    """
    found: dict[str, T] = {}
    home: dict[str, str] = {}
    for path in paths:
        tensors = read(path)
        for name in tensors.keys() & found.keys():
            raise UserError(
                f"{name!r} is in {home[name]} and again in {path.name}, with no index to say which counts. "
                f"Fetch the file *{path.suffix}.index.json of this model."
            )
        found |= tensors
        home |= dict.fromkeys(tensors, path.name)
    return found, ("no index file; the shards were put together by their numbers",)


def whole_set(paths: list[Path]) -> bool:
    """Whether these files are the shards 1…n of one set.

    Raises:
        UserError: they belong to one set, and some are missing.
    """
    found = [_NUMBERED.match(path.name) for path in paths]
    if len({one and (one[1], one[3]) for one in found}) != 1 or found[0] is None:
        return False
    numbers, total = {int(one[2]) for one in found if one}, int(found[0][3])
    missing = [number for number in range(1, min(total, 100_000) + 1) if number not in numbers]
    if missing:
        which = ", ".join(map(str, missing[:8]))
        raise UserError(
            f"{paths[0].parent} holds {len(numbers)} of {total} shards; missing: number {which}. "
            "Download them, or pass the path of one shard to look at that alone."
        )
    return True


def one_of_many(path: Path) -> tuple[str, ...]:
    """A note when the name of a file says that it is one shard of several."""
    found = _NUMBERED.match(path.name)
    alone = found and int(found[3]) > 1
    return (f"{path.name} is one of {int(found[3])} shards; only its tensors are seen",) if found and alone else ()


def read_index(index: Path) -> dict[str, str]:
    """`weight_map` of an index file, checked: every shard named is a plain file beside it."""
    try:
        weight_map = read_json(index)["weight_map"]
        if not (isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values())):
            raise TypeError("weight_map is no table of file names")
        if not weight_map:
            raise ValueError("weight_map is empty")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{index} is not an index ({type(error).__name__}: {str(error)[:200]}): expected JSON with a `weight_map` from "
            "tensor to file name. Download it again, or remove it if the model is one file."
        ) from None
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard or shard in ("", ".", "..") or "\0" in shard:
            raise UserError(f"{index.name} points outside its folder: {shard!r}. Do not trust it.")
    if missing := [shard for shard in shards if not (index.parent / shard).is_file()]:
        single = index.parent / index.name.removesuffix(".index.json")
        way_out = f" Or pass {single.name} itself, if it is the whole model." if single.is_file() else ""
        raise UserError(
            f"{index.name} names {len(missing)} file(s) that are not there: {', '.join(missing[:4])}. "
            f"Download them into {index.parent}.{way_out}"
        )
    return weight_map
