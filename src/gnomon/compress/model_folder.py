"""A Hugging Face folder, written tensor by tensor: weights in shards, config, tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from gnomon.checkpoints import Checkpoint
from gnomon.files import write_json
from gnomon.running.architecture import gguf_file, is_gguf, library, quietly

SHARD = 1 << 31
"""Bytes of a file, after which the next is begun; so much is held in memory."""


class Item(NamedTuple):
    """A tensor to be written: under which name, how large, and how it is had."""

    name: str
    nbytes: int
    read: Callable[[], Tensor]


def write_weights(items: Sequence[Item], folder: Path) -> None:
    """Write tensors as safetensors, with an index where they are several files."""
    shards: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.nbytes > SHARD:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.nbytes
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {item.name: item.read().contiguous() for item in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if len(shards) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def stored(checkpoint: Checkpoint, name: str, written_as: str) -> Item:
    """A tensor as the checkpoint has it."""
    return Item(written_as, checkpoint.entries[name].nbytes, lambda: checkpoint.read(name))


def copy_config(config: Any) -> Any:
    """A config that can be changed without the model's."""
    return type(config).from_dict(config.to_dict())


def copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """The model's tokenizer, as transformers saves it; nothing where it has none."""
    file = Path(next(iter(checkpoint.entries.values())).file)
    where: dict[str, Any] = {"gguf_file": gguf_file(checkpoint).name} if is_gguf(checkpoint) else {}
    with quietly():
        try:
            theirs = library().AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False, **where)
        except Exception:  # each kind of tokenizer is missing in a way of its own
            return
        theirs.save_pretrained(folder)
