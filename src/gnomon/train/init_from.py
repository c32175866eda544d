"""Where weights start when it is not a seed: `recipe.init`, a Hugging Face GPT-2 or Llama, or a checkpoint of gnomon's own."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gnomon.data.tokenizers import BUILT_IN
from gnomon.files import read_json, write_json
from gnomon.models.config import TransformerConfig
from gnomon.models.transformer import Transformer
from gnomon.run_folder import RECIPE, run_of
from gnomon.train.presets import BASELINE, preset
from gnomon.train.recipe import Recipe, from_dict, to_dict
from gnomon.train.run_data import TOKENIZER, unknown_tokenizer


def start_from(
    recipe: Recipe,
    source: str,
    residual: str | None = None,
    tokenizer: str | None = None,
    *,
    data_tell: bool = False,
) -> Recipe:
    """The recipe of a run that starts from a checkpoint, whose model's shape and tokenizer it takes.

    Args:
        source: a folder, file or hub id.
        residual: the residual asked for; None for the checkpoint's where it is one of gnomon's, else the recipe's.
        tokenizer: the tokenizer asked for; None for the checkpoint's.
        data_tell: where nothing else tells the tokenizer, leave it (None) to the data.

    Raises:
        UserError: nothing readable there, a model that gnomon's blocks cannot be, or no sign of its tokenizer.
    """
    from gnomon.models.hf.pretrained import read_settings

    settings = read_settings(source)
    if residual is not None and residual != settings.get("residual", residual):
        settings |= {"residual": residual, "residual_options": {}}
    model = from_dict(to_dict(recipe.model) | settings, TransformerConfig)
    tokenizer = tokenizer or _tokenizer(source, model)
    if tokenizer is None and not data_tell:
        raise unknown_tokenizer(source, model.vocab_size)
    words = dataclasses.replace(recipe.data, tokenizer=tokenizer)
    return dataclasses.replace(
        recipe, name=f"{recipe.name}-from-{Path(source).name}", model=model, data=words, init=source
    )


def _tokenizer(source: str, model: TransformerConfig) -> str | None:
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    for recipe in (folder / RECIPE, run_of(folder) / RECIPE):
        if recipe.exists():
            kept, name = recipe.parent / TOKENIZER, read_json(recipe)["data"]["tokenizer"]
            return str(kept) if name not in BUILT_IN and kept.exists() else name
    if (folder / "tokenizer.json").exists():
        return str(folder)
    return "gpt2" if 50257 <= model.vocab_size <= 50304 else None


def load_hf_folder(source: str) -> tuple[Transformer, Recipe]:
    """Model and recipe of a folder that is no checkpoint of a run. The data are those of its recipe.json, if it has one."""
    own = Path(source) / RECIPE
    if own.exists():
        recipe = from_dict(read_json(own))
    else:
        recipe = dataclasses.replace(start_from(preset("tiny", *BASELINE), source), name=Path(source).name)
    model = Transformer(recipe.model)
    load_init(model, source)
    return model, recipe


def load_init(model: Transformer, source: str) -> dict[str, Any]:
    """Load a checkpoint into a new model; returns what was done, see `gnomon.models.hf.pretrained.load_pretrained`."""
    from gnomon.models.hf.pretrained import load_pretrained

    return load_pretrained(model, source)


def report_init(folder: Path, adopted: Mapping[str, Any], placed: Sequence[Mapping[str, Any]]) -> None:
    """Write `init.json`: what was loaded, and by how much each matrix changed when it was put on its manifold; and print it
    in short."""
    write_json(folder / "init.json", {**adopted, "placed": list(placed)})
    for line in (*_loaded(adopted), *_placed(placed)):
        print(line)


def _loaded(adopted: Mapping[str, Any]) -> Iterator[str]:
    yield f"started from {adopted['source']} ({adopted['model_type']}): {len(adopted['loaded'])} tensors loaded"
    for key, words in (
        ("folded", "norms without a place here, put into the matrices behind them"),
        ("dropped", "without a place here, left out"),
        ("fresh", "not in the checkpoint, started anew"),
    ):
        if names := adopted[key]:
            yield f"  {len(names)} {words}: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"


def _placed(placed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for manifold in dict.fromkeys(row["manifold"] for row in placed):
        rows = [row for row in placed if row["manifold"] == manifold]
        most = max(rows, key=lambda row: row["change"])
        yield (
            f"  {len(rows)} matrices put on {manifold}: changed by {statistics.median(row['change'] for row in rows):.0%} "
            f"of their norm (median), at most {most['change']:.0%} ({most['name']})"
        )
