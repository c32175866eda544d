"""A run as a Hugging Face folder: weights, settings, tokenizer, model card, and the proof that a stranger gets the same logits.

Ordinary blocks become transformers' own GPT-2 or Llama, which vLLM and llama.cpp read too. Everything else keeps its own
class: it opens after `gnomon.register()`, or with the code beside the weights by `trust_remote_code=True`.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gnomon import evaluation
from gnomon.data.tokenizers import Tokenizer
from gnomon.errors import UserError
from gnomon.files import atomic_folder, flatten, read_json, write_json
from gnomon.models.hf import gpt2_llama, remote_code
from gnomon.models.hf.card import model_card
from gnomon.models.hf.reopening import in_fresh_process
from gnomon.models.transformer import Transformer
from gnomon.run_folder import ENVIRONMENT, RECIPE, locate, read_metrics
from gnomon.train.recipe import Recipe, to_dict

TEXT = "The blade of a sundial is its gnomon. Шадоў, 影 — naïve?\n\tIt's 12 o'clock."
CLOSE = 1e-4


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: where.
        model: the class that opens it.
        family: "gpt2" or "llama" for transformers' own class; None for gnomon's.
        obstacles: why it is not the nearer of the two.
        difference: the largest difference between the logits of that class and gnomon's own, as a share of the largest
            logit; 0.0 is equality to the bit. None when not verified.
    """

    folder: Path
    model: str
    family: str | None
    obstacles: tuple[str, ...]
    difference: float | None = None

    @property
    def verdict(self) -> str:
        """What was verified, in a sentence."""
        if self.difference is None:
            return "Not verified."
        own = (
            "gnomon's own to the bit"
            if self.difference == 0
            else f"gnomon's own to {self.difference:.1e} of the largest"
        )
        return f"Verified: a fresh process with transformers alone gets the exported logits to the bit; they are {own}."


def export(run: str | Path, out: str | Path, *, verify: bool = False) -> Exported:
    """Write the newest checkpoint of a run, or a given one, as a folder that transformers opens.

    The folder appears whole or not at all: what fails, the check included, leaves nothing behind.

    Args:
        run: run folder or one of its checkpoints.
        out: folder to make.
        verify: open the folder with transformers in a fresh process, without gnomon, and compare logits and token ids: to
            the bit with the exported model; and this, where it is a class of transformers, closely with gnomon's own.

    Raises:
        UserError: no such run, something is at `out`, transformers is missing, or the check failed (with the difference).
    """
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists already; an export is never written over. Remove it or give another name.")
    if evaluation.is_hf_folder(run):
        raise UserError(f"{run} is a Hugging Face folder already; export takes a run folder or one of its checkpoints")
    transformers = _transformers()
    ours, tokenizer, recipe = evaluation.load(run, device="cpu")
    config = ours.config
    family = gpt2_llama.family_of(config)
    obstacles = () if family else tuple(min((gpt2_llama.obstacles(config, name) for name in gpt2_llama.CLASSES), key=len))
    model = _hf_model(ours, family, tokenizer.end_of_text) if family else _gnomon_model(ours, tokenizer.end_of_text)
    made = Exported(out, type(model).__name__, family, obstacles)
    with atomic_folder(out) as partial, _quiet():
        model.save_pretrained(partial)
        # safetensors leaves files that only their owner may read.
        (partial / "model.safetensors").chmod((partial / "config.json").stat().st_mode)
        if family is None:
            remote_code.write_source_files(partial)
            _update_json(partial / "config.json", auto_map=remote_code.AUTO_MAP)
        _fast_tokenizer(tokenizer, config.context).save_pretrained(partial)
        # Under the name that transformers 4 knows too.
        _update_json(partial / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        end = tokenizer.end_of_text
        transformers.GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end).save_pretrained(partial)
        write_json(partial / RECIPE, to_dict(recipe))
        difference = verify_folder(ours, model, tokenizer, partial) if verify else None
        made = replace(made, difference=difference)
        (partial / "README.md").write_text(_card(run, made, recipe), encoding="utf-8")
    return made


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError('exporting needs transformers: pip install "gnomon[hf]"') from error
    return transformers


def _update_json(file: Path, **changes: Any) -> None:
    write_json(file, read_json(file) | changes)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers while open: a file of a model this size takes no time."""
    bars = _transformers().utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _hf_model(ours: Transformer, family: str, end: int) -> Any:
    transformers = _transformers()
    config = {"gpt2": transformers.GPT2Config, "llama": transformers.LlamaConfig}[family](
        **gpt2_llama.to_hf_config(ours.config, family), bos_token_id=end, eos_token_id=end
    )
    model = getattr(transformers, gpt2_llama.CLASSES[family])(config)
    missing, unexpected = model.load_state_dict(gpt2_llama.to_hf_tensors(ours.state_dict(), ours.config, family), strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if ours.config.tied else set())
    return model.eval()


def _gnomon_model(ours: Transformer, end: int) -> Any:
    from gnomon.models.hf import GnomonForCausalLM

    return GnomonForCausalLM.from_transformer(ours, bos_token_id=end, eos_token_id=end).eval()


def _fast_tokenizer(tokenizer: Tokenizer, context: int) -> Any:
    """Its one token, which opens every document in training, is the beginning as well as the end of a text."""
    inner = tokenizer.library()
    end = inner.id_to_token(tokenizer.end_of_text)
    return _transformers().PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=end,
        eos_token=end,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _card(run: str | Path, made: Exported, recipe: Recipe) -> str:
    folder, checkpoint = locate(Path(run))
    step = read_json(checkpoint / "state.json")["step"]
    records = [r for r in read_metrics(folder) if r["step"] <= step]
    last = {key: value for record in records for key, value in record.items()}
    loss = last.get("val_loss")
    results = {
        "steps": step,
        "tokens seen": last.get("tokens"),
        "training loss, last step (nats a token)": last.get("loss"),
        "validation loss (nats a token)": loss,
        "validation perplexity": None if loss is None else math.exp(min(loss, 700.0)),
        "seconds of training": last.get("seconds"),
    }
    values = to_dict(recipe)
    environment = folder / ENVIRONMENT
    return model_card(
        made.folder.name,
        made.family,
        made.obstacles,
        flatten(values),
        values["model"],
        read_json(environment) if environment.exists() else {},
        results,
        "" if made.difference is None else made.verdict,
    )


@torch.no_grad()
def verify_folder(ours: Transformer, model: Any, tokenizer: Tokenizer, folder: Path) -> float:
    """Check that a fresh process gets from `folder` the logits of `model` to the bit, and our token ids.

    Returns:
        the largest difference of those logits from `ours`, as a share of the largest logit.

    Raises:
        UserError: the process failed, or logits or ids differ.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (2, min(ours.config.context, 128))
    tokens = torch.randint(min(tokenizer.vocab_size, ours.config.vocab_size), shape, generator=generator)
    exact, own = model(tokens, use_cache=False).logits, ours(tokens)
    with tempfile.TemporaryDirectory() as work:
        fresh, found = in_fresh_process(folder, Path(work), tokens, TEXT)
    difference = float((fresh - own).abs().max() / own.abs().max().clamp_min(torch.finfo(own.dtype).tiny))
    exactly_ours = type(model).__name__ == "GnomonForCausalLM"
    if not torch.equal(fresh, exact) or (difference != 0 if exactly_ours else not difference <= CLOSE):
        raise UserError(
            f"the exported model is not the trained one: its logits, from a fresh process with {found['class']}, differ by up "
            f"to {float((fresh - exact).abs().max()):.3g} from those before saving and by {difference:.3g} of the largest from "
            f"gnomon's own (allowed: {0 if exactly_ours else CLOSE:g}). Nothing was written. This happens when transformers "
            "changes how it loads or computes; try the version gnomon was tested with, and please report it with both versions."
        )
    expected = tokenizer.encode(TEXT).tolist()
    if found["ids"] != expected or found["text"] != tokenizer.decode(expected):
        raise UserError(
            f"the exported tokenizer reads a text otherwise: {found['ids'][:8]} … where gnomon reads {expected[:8]} …, for "
            f"{tokenizer!r}. Nothing was written. Without --verify the folder is written; use gnomon's tokenizer with it."
        )
    return difference
