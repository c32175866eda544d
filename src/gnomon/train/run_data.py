"""The tokens of a recipe, and where they are looked for."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gnomon import data
from gnomon.data.tokenizers import BUILT_IN
from gnomon.errors import UserError
from gnomon.files import read_json
from gnomon.run_folder import ENVIRONMENT
from gnomon.train.recipe import Recipe, replace

TOKENIZER = "tokenizer.json"

PADDING = 128
"""Vocabularies are padded to a multiple of this at most."""


def fit_to_data(recipe: Recipe, given: Collection[str] = ()) -> Recipe:
    """The recipe with the tokenizer that its training tokens were made with, and as many ids as that has, but for the paths
    `given`.

    Token files know both; a text is read with the recipe's tokenizer. Rows that pad the vocabulary stay, and so do vocabulary
    and (where it is known) tokenizer of a checkpoint, `recipe.init`. Data that cannot be opened change nothing: the run will tell.
    """
    name, ids = recipe.data.tokenizer, None
    with contextlib.suppress(UserError):
        if "data.tokenizer" in given and name is not None:
            ids = data.tokenizer(name).vocab_size
        elif recipe.init is None or name is None:
            tokens = data.open_tokens(recipe.data.train)
            if all(source.files for source in getattr(tokens, "sources", (tokens,))) and tokens.tokenizer is not None:
                name, ids = tokens.tokenizer, tokens.vocab_size
    if name is None:
        if recipe.init is not None:
            raise unknown_tokenizer(recipe.init, recipe.model.vocab_size)
        name = "byte"
    changes: dict[str, Any] = {"data.tokenizer": name}
    padded = ids is not None and ids <= recipe.model.vocab_size < ids + PADDING
    if ids is not None and not padded and recipe.init is None and "model.vocab_size" not in given:
        changes["model.vocab_size"] = ids
    return replace(recipe, changes)


def unknown_tokenizer(source: str, ids: int) -> UserError:
    return UserError(f"{source} has no tokenizer.json; name the tokenizer of its {ids} ids: --set data.tokenizer=…")


def open_data(recipe: Recipe, folder: Path | None = None) -> tuple[Any, Any]:
    """Training and validation tokens of a recipe, checked against the model's vocabulary.

    Args:
        folder: a run folder. What its recipe names by relative paths is looked for here, and then where the run was started.

    Raises:
        UserError: they are not there, or have ids that the model does not know.
    """
    started, tokenizer = _started_in(folder), _kept_tokenizer(recipe, folder) or recipe.data.tokenizer
    try:
        pair = _open(recipe, tokenizer)
    except UserError as error:
        if started is None:
            raise
        try:
            with contextlib.chdir(started):
                pair = _open(recipe, tokenizer)
        except (UserError, OSError):
            raise UserError(f"{error} Looked in {Path.cwd()}, and in {started}, where the run was started.") from error
    for part in pair:
        if part.vocab_size is not None and part.vocab_size > recipe.model.vocab_size:
            raise UserError(
                f"{part.name} has token ids up to {part.vocab_size - 1}, the model knows {recipe.model.vocab_size}; "
                f"set model.vocab_size={part.vocab_size} or larger"
            )
    return pair


def open_tokenizer(recipe: Recipe, folder: Path | None = None) -> Any:
    """The tokenizer of a recipe: the one that its run folder keeps, else the one it names, looked for as data are."""
    kept = _kept_tokenizer(recipe, folder)
    if kept is not None:
        return data.tokenizer(kept)
    assert recipe.data.tokenizer is not None, "fit_to_data names it"
    try:
        return data.tokenizer(recipe.data.tokenizer)
    except UserError:
        if (started := _started_in(folder)) is None:
            raise
        return data.tokenizer(str(started / recipe.data.tokenizer))


def keep_tokenizer(recipe: Recipe, folder: Path) -> None:
    """Write the tokenizer into the run folder, unless gnomon brings it along."""
    if recipe.data.tokenizer not in (*BUILT_IN, None) and not (folder / TOKENIZER).exists():
        open_tokenizer(recipe).save(folder / TOKENIZER)


def _open(recipe: Recipe, tokenizer: str | None) -> tuple[Any, Any]:
    source = recipe.data
    return data.open_train_val(source.train, source.val, fraction=source.val_fraction, tokenizer=tokenizer)


def _kept_tokenizer(recipe: Recipe, folder: Path | None) -> str | None:
    """The path of the tokenizer that the folder keeps, for a recipe whose tokenizer gnomon does not bring along."""
    kept = None if folder is None or recipe.data.tokenizer in BUILT_IN else (folder / TOKENIZER).resolve()
    return str(kept) if kept is not None and kept.exists() else None


def _started_in(folder: Path | None) -> Path | None:
    """The folder in which a run was started, where that is another one and still there."""
    if folder is None or not (folder / ENVIRONMENT).exists():
        return None
    directory = read_json(folder / ENVIRONMENT).get("directory")
    found = Path(directory) if directory else None
    return found if found is not None and found.is_dir() and found != Path.cwd() else None
