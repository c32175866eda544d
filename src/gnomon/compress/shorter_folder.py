"""A Hugging Face folder with some of a model's blocks, or means of some: tensors renumbered, config shortened, tokenizer copied."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gnomon.checkpoints import Checkpoint
from gnomon.compress.model_folder import Item, copy_config, copy_tokenizer, stored, write_weights
from gnomon.errors import UserError
from gnomon.running.streamed import Streamed


def write(streamed: Streamed, groups: Sequence[Sequence[int]], folder: Path) -> None:
    """Write weights, config and tokenizer of a model with a block for each group, the mean of its blocks, into an empty folder."""
    _shorter_config(streamed.model.config, [group[0] for group in groups], len(streamed.blocks)).save_pretrained(folder)
    write_weights([_item(streamed.checkpoint, new, old) for new, old in _renamed(streamed, groups).items()], folder)
    copy_tokenizer(streamed.checkpoint, folder)


def _renamed(streamed: Streamed, groups: Sequence[Sequence[int]]) -> dict[str, list[str]]:
    """Name in the shorter model -> stored names of which it is the mean; those of other blocks are left out."""
    numbered = re.compile(rf"((?:^|\.){re.escape(streamed.prefix.rpartition('.')[2])}\.)(\d+)(\.)")
    new = {old: number for number, group in enumerate(groups) for old in group}
    names: dict[str, list[str]] = {}
    bear = False
    for name in streamed.checkpoint.entries:
        found = numbered.search(name)
        bear = bear or found is not None
        if found is None:
            names[name] = [name]
        elif (old := int(found[2])) in new:
            names.setdefault(f"{name[: found.start(2)]}{new[old]}{name[found.end(2) :]}", []).append(name)
    if not bear and len(groups) < len(streamed.blocks):
        raise UserError(f"{streamed.checkpoint.name}: its tensors do not bear the numbers of their blocks.")
    return names


def _item(checkpoint: Checkpoint, new: str, old: Sequence[str]) -> Item:
    if len(old) == 1:
        return stored(checkpoint, old[0], new)

    def mean() -> Tensor:
        tensors = [checkpoint.read(name) for name in old]
        kind = tensors[0].dtype
        return (sum(tensor.float() for tensor in tensors) / len(old)).to(kind) if kind.is_floating_point else tensors[0]

    return Item(new, checkpoint.entries[old[0]].nbytes, mean)


def _shorter_config(config: Any, kept: Sequence[int], blocks: int) -> Any:
    """A copy of the config for fewer blocks; lists with an item for each block lose those of the others."""
    config = copy_config(config)
    text = config.get_text_config()
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == blocks and not key.startswith("_") and key != "architectures":
            setattr(text, key, [value[index] for index in kept])
    text.num_hidden_layers = len(kept)
    return config
