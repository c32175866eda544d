"""Which class of transformers runs a checkpoint, built without its weights.

A parameter is put on the meta device as it is made, so a model of any size takes no memory; buffers (rotary frequencies,
masks) are real, since no checkpoint holds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gnomon.checkpoints import Checkpoint
from gnomon.errors import UserError, suggest
from gnomon.models.hf.compressed_linear import swap


def config_of(checkpoint: Checkpoint) -> Any:
    """The config of transformers' for a checkpoint: of its config.json, or of the metadata of a GGUF file.

    Raises:
        UserError: transformers is missing, there is no config, or its model type is unknown.
    """
    transformers = library()
    if is_gguf(checkpoint):
        path = gguf_file(checkpoint)
        with quietly():
            try:
                return transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            except (ValueError, KeyError) as error:
                raise UserError(f"{path}: transformers does not know this GGUF architecture ({error}).") from None
    values = {key: value for key, value in checkpoint.config.items() if key not in ("quantization_config", "auto_map")}
    kind = values.pop("model_type", None)
    if kind is None:
        raise UserError(
            f"{checkpoint.name} has no config.json with a model_type, so nothing says how its tensors are to be run. "
            "Put the model's config.json beside it, or give it with --config."
        )
    if "compressed" in values:
        kind = str(kind).removeprefix("compressed_")
    known = list(transformers.CONFIG_MAPPING.keys())
    if kind not in known:
        raise UserError(
            f"{checkpoint.name}: model type {kind!r} is none that transformers {transformers.__version__} can run. "
            f"{suggest(str(kind), known)} Code that comes with a checkpoint is not run."
        )
    try:
        with quietly():
            return transformers.AutoConfig.for_model(kind, **values)
    except Exception as error:  # each config checks its values in its own way
        raise UserError(f"{checkpoint.name}: transformers refuses its config.json: {_first_line(error)}") from error


def empty_models(config: Any) -> Iterator[nn.Module]:
    """The models a checkpoint of this config may be, on the meta device, likeliest first: with a head for the next token, with
    one for masked tokens, without a head.

    Raises:
        UserError: no class that reads tokens into states has this config.
    """
    transformers = library()
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{config.model_type} has an encoder and a decoder, and text alone does not say what the decoder reads. "
            "Models that read one text can be run."
        )
    heads = [transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM]
    named = (getattr(config, "architectures", None) or [""])[0]
    heads.sort(key=lambda auto: named not in _class_names(auto, config))
    candidates = [auto for auto in heads if _class_names(auto, config)]
    # A class that is no language model (BertModel) most likely has no head in its file.
    base = [transformers.AutoModel] if _class_names(transformers.AutoModel, config) else []
    declared = named and not any(named in _class_names(auto, config) for auto in heads)
    ordered = base + candidates if declared else candidates + base
    if not ordered:
        raise UserError(f"no class of transformers reads text with the config of {config.model_type!r}.")
    for auto in ordered:
        for options in ({}, {"add_pooling_layer": False}):
            try:
                with quietly(), without_memory():
                    model = auto.from_config(config, dtype=torch.float32, **options)
                    if compressed := getattr(config, "compressed", None):
                        swap(model, compressed)
            except Exception as error:  # of any class of transformers
                if options:
                    continue  # this class has no pooling layer to leave out
                raise UserError(f"{config.model_type}: transformers cannot build it: {_first_line(error)}") from error
            yield model.eval()


def has_next_token_head(model: nn.Module) -> bool:
    """Whether its logits are those of the next token; a masked model's are of the token itself."""
    transformers = library()
    two_way = _class_names(transformers.AutoModelForMaskedLM, model.config) and not getattr(
        model.config, "is_decoder", True
    )
    return type(model).__name__ in _class_names(transformers.AutoModelForCausalLM, model.config) and not two_way


def _class_names(auto: Any, config: Any) -> list[str]:
    try:
        found = auto._model_mapping[type(config)]
    except KeyError:
        return []
    return [one.__name__ for one in (found if isinstance(found, (list, tuple)) else [found])]


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """While open, the parameters of new modules are on the meta device and their buffers are not."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' bars and remarks: what counts is told by our own."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def is_gguf(checkpoint: Checkpoint) -> bool:
    return "general.architecture" in checkpoint.config


def gguf_file(checkpoint: Checkpoint) -> Path:
    return Path(next(iter(checkpoint.entries.values())).file)


def library() -> Any:
    """transformers, which knows the model type "gnomon" from then on."""
    try:
        import transformers
    except ImportError as error:
        raise UserError('running a checkpoint needs transformers: pip install "gnomon[hf]"') from error
    from gnomon.models.hf import register

    register()
    return transformers


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
