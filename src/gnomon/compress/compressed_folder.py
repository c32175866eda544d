"""A compressed model as a Hugging Face folder: plain, where its config can say the new sizes; else with `modeling_compressed.py`.

A folder with code has a model type of its own ("compressed_llama"), so that transformers without `trust_remote_code=True` refuses it
and does not run a model with fresh weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

import gnomon
from gnomon.compress.model_folder import Item, copy_config, copy_tokenizer, stored, write_weights
from gnomon.compress.replacements import Replacement
from gnomon.files import read_json, write_json
from gnomon.models.hf import compressed_linear, remote_code
from gnomon.running.architecture import library, quietly, without_memory
from gnomon.running.streamed import Streamed

MODULE = "modeling_compressed"
# What a config calls the width of the MLP.
_MLP_WIDTH = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "ffn_hidden_dim")

Load = Callable[[int], Mapping[str, Replacement]]
"""Number of a block -> what its linears become."""


def write(streamed: Streamed, load: Load, folder: Path) -> bool:
    """Write config, weights and tokenizer into an empty folder.

    Returns:
        whether it is a plain folder, which needs no code.
    """
    load = lru_cache(maxsize=1)(load)
    shapes, specs, items = _described(streamed, load)
    config = _plain_config(streamed, shapes)
    plain = config is not None
    (config or copy_config(streamed.model.config)).save_pretrained(folder)
    if not plain:
        _write_code(streamed, specs, folder)
    replaced = _dense_items(streamed, shapes, load) if plain else items
    write_weights([*_untouched(streamed, set(shapes)), *replaced], folder)
    copy_tokenizer(streamed.checkpoint, folder)
    return plain


def _described(streamed: Streamed, load: Load) -> tuple[dict[str, tuple[int, int] | None], dict[str, Any], list[Item]]:
    """Of every replaced linear: its shape (None unless dense), how it is built, and its tensors; what is shared comes once."""
    shapes, specs, items, owners = {}, {}, [], {}
    for index, block in enumerate(streamed.block_names):
        for linear, made in load(index).items():
            path, tied = f"{block}.{linear}", {}
            for number, term in enumerate(made.terms):
                for side, name in term.shared.items():
                    key = f"terms.{number}.{side}"
                    if owners.setdefault((side, name), f"{path}.{key}") != f"{path}.{key}":
                        tied[key] = owners[side, name]
            shapes[path] = made.shape if made.is_dense else None
            specs[path] = made.spec(tied)
            for key, tensor in made.tensors().items():
                if key not in tied:
                    items.append(Item(f"{path}.{key}", tensor.nbytes, _reader(load, index, linear, key)))
    return shapes, specs, items


def _reader(load: Load, index: int, linear: str, key: str) -> Callable[[], Tensor]:
    return lambda: load(index)[linear].tensors()[key]


def _plain_config(streamed: Streamed, shapes: Mapping[str, tuple[int, int] | None]) -> Any | None:
    """A config of the model's own class in which every linear has its new shape; None where there is none."""
    if None in shapes.values():
        return None
    model, config = streamed.model, copy_config(streamed.model.config)
    text = config.get_text_config()
    old = {path: tuple(model.get_parameter(f"{path}.weight").shape) for path in shapes}
    wanted = {path: shape[::-1] if _is_conv1d(model, path) else shape for path, shape in shapes.items() if shape}
    widths = {new for path in wanted for new, before in zip(wanted[path], old[path]) if new != before}
    if widths:
        key = next((name for name in _MLP_WIDTH if hasattr(text, name)), None)
        if key is None or len(widths) != 1:
            return None
        setattr(text, key, widths.pop())
    with quietly(), without_memory():
        made = type(model)(config)
    same = all(tuple(made.get_parameter(f"{path}.weight").shape) == tuple(shape) for path, shape in wanted.items())
    others = {name: p.shape for name, p in model.named_parameters() if name.rpartition(".")[0] not in wanted}
    return config if same and all(made.get_parameter(name).shape == shape for name, shape in others.items()) else None


def _dense_items(streamed: Streamed, shapes: Mapping[str, Any], load: Load) -> list[Item]:
    items = []
    for index, block in enumerate(streamed.block_names):
        for linear, made in load(index).items():
            path = f"{block}.{linear}"
            flipped = _is_conv1d(streamed.model, path)

            def weight(index: int = index, linear: str = linear, flipped: bool = flipped) -> Tensor:
                W_MN = load(index)[linear].terms[0].A_MR
                return W_MN.T if flipped else W_MN

            items.append(Item(f"{path}.weight", made.terms[0].A_MR.nbytes, weight))
            if made.bias_M is not None:
                items.append(Item(f"{path}.bias", made.bias_M.nbytes, _reader(load, index, linear, "bias")))
    return items


def _is_conv1d(model: Any, path: str) -> bool:
    return type(model.get_submodule(path)).__name__ == "Conv1D"


def _untouched(streamed: Streamed, replaced: set[str]) -> list[Item]:
    """All other tensors, under the names the model has for them: no conversion is left to the loader."""
    sources, checkpoint, items = streamed.sources, streamed.checkpoint, []
    for name, tensor in streamed.model.state_dict().items():
        if name.rpartition(".")[0] in replaced:
            continue
        made_of = sources.of.get(name, ())
        if len(made_of) == 1 and checkpoint.entries[made_of[0]].shape == tuple(tensor.shape):
            items.append(stored(checkpoint, made_of[0], name))
        elif name not in streamed.model.all_tied_weights_keys and (piece := streamed.piece_of(name)):
            items.append(Item(name, 4 * tensor.numel(), _converted(streamed, name, piece)))
    return items


def _converted(streamed: Streamed, name: str, piece: str) -> Callable[[], Tensor]:
    """A parameter that transformers makes of several stored tensors, or of a part of one."""

    def read() -> Tensor:
        with streamed.held([piece]):
            return streamed.model.get_parameter(name).detach().clone()

    return read


def _write_code(streamed: Streamed, specs: Mapping[str, Any], folder: Path) -> None:
    model = type(streamed.model)
    config = type(streamed.model.config)
    ours = config.model_type == "gnomon"
    if ours:
        remote_code.write_source_files(folder)
        bases = (
            f"from .configuration_gnomon import {config.__name__}\nfrom .configuration_gnomon import __doc__ as _\n"
            f"from .modeling_gnomon import {model.__name__}\n"
        )
    else:
        where = [one.__module__ if not hasattr(library(), one.__name__) else "transformers" for one in (config, model)]
        bases = f"from {where[0]} import {config.__name__}\nfrom {where[1]} import {model.__name__}\n"
    source = inspect.getsource(compressed_linear)
    head = f"# gnomon.models.hf.compressed_linear of gnomon {gnomon.__version__}, Apache-2.0, and the classes of this folder.\n"
    lines = source.replace("from torch import Tensor, nn\n", f"from torch import Tensor, nn\n{bases}", 1)
    classes = _CLASSES.format(model=model.__name__, config=config.__name__, kind=config.model_type)
    (folder / f"{MODULE}.py").write_text(head + lines + classes, encoding="utf-8")
    write_json(
        folder / "config.json",
        read_json(folder / "config.json")
        | {
            "model_type": f"compressed_{config.model_type}",
            "auto_map": {
                "AutoConfig": f"{MODULE}.Compressed{config.__name__}",
                "AutoModelForCausalLM": f"{MODULE}.Compressed{model.__name__}",
            },
            "compressed": specs,
        },
    )


_CLASSES = '''

class Compressed{config}({config}):
    """A config that says under `compressed` what linears are made of."""

    model_type = "compressed_{kind}"

    def __init__(self, **values):
        # Said here, since transformers writes an __init__ of its own for a config without one.
        super().__init__(**values)


class Compressed{model}({model}):
    """A model with some of its linears made of terms."""

    config_class = Compressed{config}

    def __init__(self, config, *arguments, **options):
        super().__init__(config, *arguments, **options)
        swap(self, config.compressed)
'''
