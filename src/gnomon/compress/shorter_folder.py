"""A Hugging Face folder with some of a model's blocks: tensors renumbered, config shortened, tokenizer copied."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from gnomon.checkpoints import Checkpoint
from gnomon.errors import UserError
from gnomon.files import write_json
from gnomon.running.architecture import gguf_file, is_gguf, library, quietly
from gnomon.running.streamed import Streamed

SHARD = 1 << 31
"""Bytes of a file, after which the next is begun; so much is held in memory."""


def write(streamed: Streamed, kept: Sequence[int], folder: Path) -> None:
    """Write weights, config and tokenizer of the model with the blocks `kept`, in their order, into an empty folder."""
    _shorter_config(streamed.model.config, kept, len(streamed.blocks)).save_pretrained(folder)
    _write_weights(streamed.checkpoint, _renamed(streamed, kept), folder)
    _copy_tokenizer(streamed.checkpoint, folder)


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
    config = type(config).from_dict(config.to_dict())
    text = config.get_text_config()
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == blocks and not key.startswith("_") and key != "architectures":
            setattr(text, key, [value[index] for index in kept])
    text.num_hidden_layers = len(kept)
    return config


def _write_weights(checkpoint: Checkpoint, names: dict[str, str], folder: Path) -> None:
    shards: list[list[str]] = [[]]
    size = 0
    for name in names:
        nbytes = checkpoint.entries[name].nbytes
        if shards[-1] and size + nbytes > SHARD:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {names[name]: checkpoint.read(name).contiguous() for name in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if len(shards) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def _copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """The model's tokenizer, as transformers saves it; nothing where it has none."""
    file = Path(next(iter(checkpoint.entries.values())).file)
    where: dict[str, Any] = {"gguf_file": gguf_file(checkpoint).name} if is_gguf(checkpoint) else {}
    with quietly():
        try:
            theirs = library().AutoTokenizer.from_pretrained(file.parent, **where)
        except Exception:  # each kind of tokenizer is missing in a way of its own
            return
        theirs.save_pretrained(folder)
