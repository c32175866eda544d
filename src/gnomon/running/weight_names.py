"""Which tensors of a checkpoint make which parameters of a model of transformers.

The rules are transformers' own: renamed tensors, experts stored one by one and run as one tensor, prefixes that come and go.
A GGUF file gets the names of the Hugging Face checkpoint it was made from first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gnomon.checkpoints import Checkpoint
from gnomon.checkpoints.checkpoint import Buffer
from gnomon.checkpoints.gguf_files import PERMUTED
from gnomon.errors import UserError
from gnomon.running.architecture import is_gguf, quietly


@dataclass(frozen=True)
class Sources:
    """Where the parameters of a model come from.

    Attributes:
        checkpoint: with the names that Hugging Face's checkpoints have.
        rules: transformers' list of renamings and conversions.
        of: name of a parameter -> the tensors it is made of. Of parameters that one conversion makes together, the first has all.
        missing: parameters that nothing makes, ties counted.
    """

    checkpoint: Checkpoint
    rules: list[Any]
    of: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]

    @torch.no_grad()
    def load(self, model: Any, names: tuple[str, ...]) -> None:
        """Put these tensors of the checkpoint, as fp32, into the parameters they make.

        Raises:
            UserError: a tensor has another shape than its parameter, or cannot be converted.
        """
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        tensors = {name: _Stored(self.checkpoint, name) for name in names}
        with quietly():
            told, _ = convert_and_load_state_dict_in_model(
                model, tensors, LoadStateDictConfig(weight_mapping=self.rules, dtype=torch.float32)
            )
        for name, given, expected in told.mismatched_keys:
            raise UserError(
                f"{self.checkpoint.name}: {name} has shape {tuple(given)}, its config makes it {tuple(expected)}. "
                "Weights and config.json belong to different models."
            )
        for name, error in told.conversion_errors.items():
            raise UserError(f"{self.checkpoint.name}: {name} cannot be made of the tensors there: {error}")


class _Stored:
    """A tensor that is read when it is sliced, as transformers reads those of safetensors."""

    def __init__(self, checkpoint: Checkpoint, name: str):
        self.checkpoint, self.name = checkpoint, name

    def __getitem__(self, _: Any) -> Tensor:
        return self.checkpoint.read(self.name)


def sources_of(model: Any, checkpoint: Checkpoint) -> Sources:
    """Where each parameter of `model` comes from. No tensor is read."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    # A GGUF file that a model was made of already has Hugging Face's names.
    renamed = not checkpoint.entries.keys().isdisjoint(model.state_dict())
    named = _hugging_face_names(model, checkpoint) if is_gguf(checkpoint) and not renamed else checkpoint
    rules = get_model_conversion_mapping(model, key_mapping=getattr(type(model), "former_names", None))
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    targets = {pattern: rule.target_patterns for rule in converters for pattern in rule.source_patterns}
    there = model.state_dict()
    of: dict[str, tuple[str, ...]] = {}
    made: set[str] = set()
    for name in named.entries:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, there)
        if target not in there and name in there:
            target, pattern = name, None
        if target in there:
            of[target] = (*of.get(target, ()), name)
            made |= {target} if pattern is None else _together(target, targets[pattern])
    tied = {alias for alias, owner in model.all_tied_weights_keys.items() if owner in made}
    missing = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in made | tied]
    return Sources(named, rules, of, tuple(missing))


def _together(first: str, patterns: list[str]) -> set[str]:
    """What a conversion makes: the first of its targets is known, the others differ from it by their pattern."""
    plain = [re.sub(r"[\\^$]", "", pattern) for pattern in patterns]
    return {first} | {first.replace(plain[0], other) for other in plain[1:]}


def _hugging_face_names(model: Any, checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF file under the names and in the forms of Hugging Face's checkpoint."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as forms

    architecture = checkpoint.config["general.architecture"]
    processor = forms.TENSOR_PROCESSORS.get(architecture, forms.TensorProcessor)(config=model.config.to_dict())
    kind = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if kind is None:
        raise UserError(
            f"{checkpoint.name}: the package gguf has no names for the architecture {architecture!r}. Update it."
        )
    table = gguf.get_tensor_name_map(kind, model.config.get_text_config().num_hidden_layers)
    there: dict[str, str] = {}
    for theirs in model.state_dict():
        stem, dot, suffix = theirs.rpartition(".")
        # Some files were made from the model without its head (Bloom).
        stems = (stem, stem.removeprefix(f"{model.base_model_prefix}."))
        found = next((name for one in stems if (name := table.get_name(one))), None)
        if found and f"{found}{dot}{suffix}" in checkpoint.entries:
            there[theirs] = f"{found}{dot}{suffix}"

    def load(theirs: str, buffer: Buffer | None, index: int | None) -> Tensor:
        name = there[theirs]
        tensor = checkpoint.load(name, buffer, index)
        if architecture in PERMUTED:  # undone when it was read
            return tensor
        made: dict[str, Any] = {"tensors": {}}
        weights = processor.process(weights=tensor.numpy(), name=name, parsed_parameters=made).weights
        return torch.from_numpy(weights)

    entries = {theirs: checkpoint.entries[name] for theirs, name in there.items()}
    return replace(checkpoint, entries=entries, load=load)
