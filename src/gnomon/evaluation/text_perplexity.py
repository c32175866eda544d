"""Perplexity of a trained model on any text, and on WikiText by the protocol other people use.

Legend: B batch, T tokens.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import torch

from gnomon import data
from gnomon.data import wikitext as texts
from gnomon.errors import UserError
from gnomon.evaluation.loading import load, run_of_path
from gnomon.evaluation.scoring import loglikelihoods
from gnomon.train.device import to_device
from gnomon.train.run_data import open_data

UNITS = {
    "loss": "loss (nats/token)", "perplexity": "perplexity (a token)", "word_perplexity": "perplexity (a word)",
    "bits_per_token": "bits/token", "bits_per_byte": "bits/byte",
}  # fmt: skip
"""Headers of what the rows hold."""


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
        model, data, tokens, `loss` (nats a token), `perplexity` (a token), `bits_per_token`, and `bits_per_byte` of the text
        that the tokens spell, which compares models whose tokenizers differ.

    Raises:
        UserError: the data do not fit the model's vocabulary.
    """
    model, tokenizer, recipe = load(path, device)
    if source is None:
        part = open_data(recipe, run_of_path(Path(path)))[1]
    else:
        part = data.open_tokens(source, tokenizer=tokenizer)
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
        "bits_per_byte": total / _bytes(tokenizer, y_BT.flatten().cpu().numpy()) / math.log(2),
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


def _bytes(tokenizer: Any, ids_N: Any) -> float:
    """UTF-8 bytes of the text that consecutive ids spell; the end of a text is none. NaN where they spell nothing."""
    return len(tokenizer.decode(ids_N[ids_N != tokenizer.end_of_text]).encode()) or math.nan


def _exp(loss: float) -> float:
    # A wild model has no finite perplexity; the number shown is then the largest.
    return math.exp(min(loss, 700.0))
