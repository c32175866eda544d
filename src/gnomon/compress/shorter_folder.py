"""A Hugging Face folder with some of a model's blocks: tensors renumbered, config shortened, tokenizer copied."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon.compress.model_folder import copy_config, copy_tokenizer, stored, write_weights
from gnomon.errors import UserError
from gnomon.running.streamed import Streamed


def write(streamed: Streamed, kept: Sequence[int], folder: Path) -> None:
    """Write weights, config and tokenizer of the model with the blocks `kept`, in their order, into an empty folder."""
    _shorter_config(streamed.model.config, kept, len(streamed.blocks)).save_pretrained(folder)
    write_weights([stored(streamed.checkpoint, old, new) for old, new in _renamed(streamed, kept).items()], folder)
    copy_tokenizer(streamed.checkpoint, folder)


def _renamed(streamed: Streamed, kept: Sequence[int]) -> dict[str, str]:
    """Stored name -> its name in the shorter model; those of other blocks are left out."""
    numbered = re.compile(rf"((?:^|\.){re.escape(streamed.prefix.rpartition('.')[2])}\.)(\d+)(\.)")
    new = {old: number for number, old in enumerate(kept)}
    names = {}
    for name in streamed.checkpoint.entries:
        found = numbered.search(name)
        if found is None:
            names[name] = name
        elif (old := int(found[2])) in new:
            names[name] = f"{name[: found.start(2)]}{new[old]}{name[found.end(2) :]}"
    if len(names) == len(streamed.checkpoint.entries) > 0 and len(kept) < len(streamed.blocks):
        raise UserError(f"{streamed.checkpoint.name}: its tensors do not bear the numbers of their blocks.")
    return names


def _shorter_config(config: Any, kept: Sequence[int], blocks: int) -> Any:
    """A copy of the config for fewer blocks; lists with an item for each block lose those of the others."""
    config = copy_config(config)
    text = config.get_text_config()
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == blocks and not key.startswith("_") and key != "architectures":
            setattr(text, key, [value[index] for index in kept])
    text.num_hidden_layers = len(kept)
    return config
