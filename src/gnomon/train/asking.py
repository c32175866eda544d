"""From what is asked for to a recipe: a preset or a file, a checkpoint to start from, and single settings on top."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnomon.errors import UserError
from gnomon.files import read_json
from gnomon.train.presets import BASELINE, preset
from gnomon.train.recipe import Recipe, from_dict, replace


def recipe_for(
    name: str | None = None,
    config: str | Path | None = None,
    *,
    assignment: str | None = None,
    init: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Recipe:
    """The recipe of `gnomon train`.

    Args:
        name: a preset; "tiny" if neither it nor `config` is given.
        config: a recipe.json.
        assignment: the optimizer of the preset, as `gnomon.train.preset` takes it. A residual among the `changes` is asked of
            the preset too, so that one thing is changed and the rest is the usual.
        init: a checkpoint to start from; it sets the model's shape and the tokenizer.
        changes: settings by dotted path. With other data, what they leave open of tokenizer and vocabulary is that of the data.

    Raises:
        UserError: a preset or an assignment beside a file; an unknown name or setting; nothing readable at `init`.
    """
    changes = dict(changes or {})
    residual = changes.get("model.residual")
    if config is None:
        # A checkpoint goes on as it was most likely made.
        usual = (None, None) if init is None else BASELINE
        recipe = preset(name or "tiny", residual or usual[0], assignment or usual[1], measured=init is None)
    elif name is not None:
        raise UserError(f"{config} is a whole recipe, and so is the preset {name!r}: give one of them")
    elif assignment is not None:
        raise UserError("--assignment chooses the preset's optimizer; with --config use --set optim.name=… instead")
    else:
        recipe = from_dict(read_json(config))
    if init is not None:
        # Reading a checkpoint takes torch, which presets leave alone.
        from gnomon.train.init_from import start_from

        recipe = start_from(recipe, init, residual, changes.get("data.tokenizer"), data_tell="data.train" in changes)
    recipe = replace(recipe, changes)
    if changes.keys() & {"data.train", "data.tokenizer"} or recipe.data.tokenizer is None:
        from gnomon.train.run_data import fit_to_data

        recipe = fit_to_data(recipe, changes)
    return recipe


def optimizer_name(recipe: Recipe) -> str:
    """The assignment under ManifoldMuon, else the optimizer."""
    return recipe.optim.assignment if recipe.optim.name == "manifold-muon" else recipe.optim.name


def usual_folder(recipe: Recipe) -> Path:
    """Where a run goes that was given no place."""
    return Path("runs") / f"{recipe.name}-{recipe.model.residual}-{optimizer_name(recipe)}-seed{recipe.seed}"
