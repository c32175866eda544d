"""Opening a trained model: a run folder, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gnomon.models.transformer import Transformer
from gnomon.run_folder import locate
from gnomon.train import checkpoint_layout, init_from
from gnomon.train.device import choose_device
from gnomon.train.recipe import ComputeConfig, Recipe
from gnomon.train.run_data import open_tokenizer
from gnomon.train.run_writer import load_recipe


def load(path: str | Path, device: str = "auto") -> tuple[Transformer, Any, Recipe]:
    """Model, tokenizer and recipe of a run folder (its newest checkpoint), of one of its checkpoints, or of a Hugging Face
    folder: an export of ours, a GPT-2 or a Llama.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    folder = run_of_path(Path(path))
    if is_hf_folder(path):
        model, recipe = init_from.load_hf_folder(str(path))
    else:
        path = locate(Path(path))[1]
        recipe = load_recipe(folder)
        model = Transformer(checkpoint_layout.load_config(path))
        checkpoint_layout.load_weights(model, path)
    model.to(choose_device(ComputeConfig(device=device))).eval()
    return model, open_tokenizer(recipe, folder), recipe


def run_of_path(path: Path) -> Path:
    """The folder that keeps what belongs to a model: the run of a checkpoint, or the Hugging Face folder itself."""
    return path if is_hf_folder(path) else locate(path)[0]


def is_hf_folder(path: str | Path) -> bool:
    """Whether the path is a Hugging Face folder, and no checkpoint of a run."""
    return (Path(path) / "config.json").exists() and not (Path(path) / "state.json").exists()
