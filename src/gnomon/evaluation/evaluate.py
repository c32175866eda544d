"""What a trained model can do: perplexity on any text, and continuing a prompt.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon import data
from gnomon.errors import UserError
from gnomon.models.transformer import Cache, Transformer
from gnomon.train import init_from, saving
from gnomon.train.loop import choose_device, open_data, to_device
from gnomon.train.recipe import ComputeConfig, Recipe
from gnomon.train.run_writer import load_recipe


def load(path: str | Path, device: str = "auto") -> tuple[Transformer, Any, Recipe]:
    """Model, tokenizer and recipe of a run folder (its newest checkpoint), of one of its checkpoints, or of a Hugging Face
    folder: an export of ours, a GPT-2 or a Llama.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    if is_published(path):
        model, recipe = init_from.published(str(path))
    else:
        folder, path = locate(path)
        recipe = load_recipe(folder)
        model = Transformer(saving.load_config(path))
        saving.load_weights(model, path)
    model.to(choose_device(ComputeConfig(device=device))).eval()
    return model, data.tokenizer(recipe.data.tokenizer), recipe


def is_published(path: str | Path) -> bool:
    """Whether the path is a Hugging Face folder, and no checkpoint of a run."""
    return (Path(path) / "config.json").exists() and not (Path(path) / "state.json").exists()


def locate(path: str | Path) -> tuple[Path, Path]:
    """The run folder and the checkpoint that a path means: a run's newest checkpoint, or the checkpoint itself.

    Raises:
        UserError: there is no checkpoint.
    """
    path = Path(path)
    if (path / "model.safetensors").exists():
        return path.resolve().parent.parent, path
    checkpoints = saving.list_checkpoints(path)
    if not checkpoints:
        raise UserError(
            f"{path} holds no checkpoint; give a run folder written by `gnomon train`, or a checkpoint in it"
        )
    return path, checkpoints[-1]


def report_of(folder: str | Path) -> Path:
    """Write `report.html` of a finished run: its curves, and the continuity of its weights across depth."""
    from gnomon import continuity, report
    from gnomon.continuity.inspect_page import fill

    folder = Path(folder)
    page = report.run_page(report.read_runs([folder]))
    page.section("Continuity of the weights across depth")
    fill(page, continuity.inspect(folder))
    return page.write(folder / "report.html", figures=False)


@torch.no_grad()
def generate(
    model: Transformer,
    tokenizer: Any,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[str]:
    """Yield the prompt, then pieces of text as they are drawn; the pieces joined are the continuation.

    When the context is full, the older half is dropped and the rest read again.

    Args:
        temperature: 0 takes the likeliest token every time.
        top_k: draw from this many likeliest tokens; 0 for all.

    Raises:
        UserError: the prompt is empty, or an option is out of range.
    """
    if temperature < 0 or top_k < 0 or tokens < 0:
        raise UserError("temperature, top_k and tokens must not be negative")
    ids = [int(i) for i in tokenizer.encode(prompt)]
    if not ids:
        raise UserError("the prompt is empty; give at least one character, e.g. --prompt 'The'")
    device = model.embed.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    context, cache, fresh = model.config.context, Cache(), ids[-model.config.context :]
    yield prompt
    text = _Unfinished(tokenizer)
    for _ in range(tokens):
        if cache.get_seq_length() + len(fresh) > context:
            cache, fresh = Cache(), ids[-(context // 2) :]
        ids.append(_draw(_next_logits(model, fresh, cache, device), temperature, top_k, generator))
        fresh = ids[-1:]
        if ids[-1] == tokenizer.end_of_text:
            break
        yield text.add(ids[-1])
    yield text.flush()


def _next_logits(model: Transformer, fresh: list[int], cache: Cache, device: torch.device) -> Tensor:
    return model(torch.tensor([fresh], device=device), cache)[0, -1].float()


def _draw(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k:
        floor = logits_V.topk(min(top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < floor, float("-inf"))
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))


class _Unfinished:
    """Text of one token after another. A token may end inside a UTF-8 character, which then waits for the next ones."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.ids = tokenizer, []

    def add(self, token: int) -> str:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        # A character has at most four bytes, so after that many tokens U+FFFD is no unfinished one.
        return "" if text.endswith("\ufffd") and len(self.ids) < 4 else self.flush()

    def flush(self) -> str:
        text, self.ids = self.tokenizer.decode(self.ids), []
        return text


@torch.no_grad()
def perplexity(
    path: str | Path, source: str | None = None, *, tokens: int = 1 << 20, device: str = "auto"
) -> dict[str, Any]:
    """Loss of a trained model on text it may not have seen.

    Args:
        path: run folder or checkpoint.
        source: token file, folder of shards or .txt file; None for the run's own validation data.
        tokens: how many at most, in whole windows of the model's context from the start.

    Returns:
        model, data, tokens, `loss` (nats a token), `perplexity`, `bits_per_token`.

    Raises:
        UserError: the data do not fit the model's vocabulary.
    """
    model, _, recipe = load(path, device)
    if source is None:
        part = open_data(recipe)[1]
    else:
        part = data.open_tokens(source, tokenizer=recipe.data.tokenizer)
        if part.vocab_size is not None and part.vocab_size > model.config.vocab_size:
            raise UserError(
                f"{source} has token ids up to {part.vocab_size - 1}, the model knows {model.config.vocab_size}; "
                f"make it with the model's tokenizer, {recipe.data.tokenizer!r}"
            )
    T = model.config.context
    x_BT, y_BT = to_device(data.slices(part, context=T, count=max(tokens // T, 1)), model.embed.weight.device)
    batch = max(1, (1 << 14) // T)
    total = sum(model.loss(x, y).item() * x.numel() for x, y in zip(x_BT.split(batch), y_BT.split(batch)))
    loss = total / x_BT.numel()
    return {
        "model": str(path),
        "data": source or f"{recipe.data.val or recipe.data.train} (validation)",
        "tokens": x_BT.numel(),
        "loss": loss,
        "perplexity": _exp(loss),
        "bits_per_token": loss / math.log(2),
    }


def wikitext(path: str | Path, source: str, *, tokens: int | None = None, device: str = "auto") -> list[dict[str, Any]]:
    """Perplexity on WikiText, article by article, so that it can be compared with other people's.

    Each article is read from its beginning, after an end-of-text id, in windows of the model's context of which the last
    one overlaps: the protocol of lm_eval's task `wikitext`, whose `word_perplexity` is that of the first row (where the
    source is the raw form; a file with <unk> gives another number).

    Args:
        path: run folder or checkpoint.
        source: a file in WikiText's form, or "wikitext-2" or "wikitext-103" (test) from the hub.
        tokens: stop after the article in which this many (of the text as it is) are reached; None for all.

    Returns:
        Two rows, "detokenised" and "as it is" (with blanks around punctuation): articles, tokens, loss (nats a token),
        perplexity (a token), word_perplexity, bits_per_byte; words and bytes are those of the text as it is.
    """
    from gnomon.data import wikitext as texts
    from gnomon.evaluation.scoring import loglikelihoods

    articles = texts.articles(source)
    model, tokenizer, _ = load(path, device)
    if tokens is not None:
        ends = itertools.accumulate(len(tokenizer.encode(article)) for article in articles)
        articles = articles[: 1 + sum(end < tokens for end in ends)]
    words, size = sum(map(texts.words, articles)), sum(len(article.encode()) for article in articles)
    rows = []
    for form, spell in (("detokenised", texts.detokenised), ("as it is", str)):
        requests = [([tokenizer.end_of_text], tokenizer.encode(spell(article)).tolist()) for article in articles]
        read = sum(len(ids) for _, ids in requests)
        nats = -sum(score for score, _ in loglikelihoods(model, requests, f"{source}, {form}"))
        rows.append(
            {
                "model": str(path),
                "data": source,
                "text": form,
                "articles": len(articles),
                "tokens": read,
                "loss": nats / read,
                "perplexity": _exp(nats / read),
                "word_perplexity": _exp(nats / words),
                "bits_per_byte": nats / size / math.log(2),
            }
        )
    return rows


def _exp(loss: float) -> float:
    # A wild model has no finite perplexity; the number shown is then the largest.
    return math.exp(min(loss, 700.0))
