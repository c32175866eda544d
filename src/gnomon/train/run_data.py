"""The tokens of a recipe."""

from __future__ import annotations

from typing import Any

from gnomon import data
from gnomon.errors import UserError
from gnomon.train.recipe import Recipe


def open_data(recipe: Recipe) -> tuple[Any, Any]:
    """Training and validation tokens of a recipe, checked against the model's vocabulary.

    Raises:
        UserError: they are not there, or have ids that the model does not know.
    """
    source = recipe.data
    if source.val is None:
        pair = data.open_train_val(source.train, fraction=source.val_fraction, tokenizer=source.tokenizer)
    else:
        train_tokens, val_tokens = (data.open_tokens(p, tokenizer=source.tokenizer) for p in (source.train, source.val))
        pair = train_tokens, val_tokens
    for part in pair:
        if part.vocab_size is not None and part.vocab_size > recipe.model.vocab_size:
            raise UserError(
                f"{part.name} has token ids up to {part.vocab_size - 1}, the model knows {recipe.model.vocab_size}; "
                f"set model.vocab_size={part.vocab_size} or larger"
            )
    return pair
