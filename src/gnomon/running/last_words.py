"""LAMBADA (arXiv 1606.06031) on a model on disk: how often it says the last word of a passage, and how likely it finds it.

The task is lm_eval's `lambada_openai`: the context is all words but the last, the target a space and the last, a passage counts when
greedy decoding would say every token of it. `gnomon eval RUN --tasks lambada_openai` and this give one figure.

Legend: B rows, T tokens, D channels of the stream, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from gnomon.data.plain_text import read_text
from gnomon.errors import UserError
from gnomon.evaluation.scoring import Ids, loglikelihoods
from gnomon.running.streamed import Streamed, Visit
from gnomon.running.token_rows import own_tokenizer

BATCH = 2048
"""Tokens at a time: little is padded where passages of like length go together, and matrices are large enough for a CPU."""


@dataclass(frozen=True)
class LastWords:
    """Passages cut before their last word.

    Attributes:
        text: the file they come from.
        requests: ids of the context, ids of the last word.
    """

    text: str
    requests: tuple[tuple[Ids, Ids], ...]


@dataclass(frozen=True)
class Said:
    """What a model makes of last words.

    Attributes:
        accuracy: share of the passages whose last word greedy decoding would say.
        nats: mean of -log p(last word), a word and not a token.
        items: how many passages.
    """

    accuracy: float
    nats: float
    items: int


def read_last_words(streamed: Streamed, file: str | Path, items: int) -> LastWords:
    """The first passages of a file of JSON lines with a "text" each, in the tokens of the model's own tokenizer.

    Raises:
        UserError: the file is another, a passage has fewer than two words, or the model has no tokenizer.
    """
    words = own_tokenizer(streamed)
    # The harness reads a run of ours without end-of-text in front.
    before = () if streamed.model.config.model_type == "gnomon" else words.before
    found: list[tuple[Ids, Ids]] = []
    for number, line in enumerate(read_text(Path(file)).rstrip("\n").split("\n")[:items], 1):
        try:
            text = json.loads(line)["text"]
            context, _, last = text.rpartition(" ")
        except (ValueError, KeyError, TypeError, AttributeError):
            context = last = ""
        around = [*before, *words.encode(context.rstrip())] if context.strip() and last else []
        if not around:
            raise UserError(f'{file}, line {number}, is no passage with a last word; a line reads {{"text": "one two three"}}')
        found.append((around, [*before, *words.encode(text)][len(around) :]))
    if len(found) < items:
        raise UserError(f"{file} has {len(found):,} passages, and {items:,} are asked for")
    return LastWords(str(file), tuple(found))


def last_words(streamed: Streamed, passages: LastWords, visit: Visit) -> Said:
    """Accuracy and nats, with `visit` at each block. Each batch reads all weights anew, if they are not `Streamed.held`."""
    found = loglikelihoods(_Scored(streamed, visit), passages.requests, "last words", BATCH)
    return Said(statistics.fmean(hit for _, hit in found), -statistics.fmean(score for score, _ in found), len(found))


class _Scored:
    """What `loglikelihoods` asks of a model."""

    def __init__(self, streamed: Streamed, visit: Visit):
        self.streamed, self.visit = streamed, visit
        self.embed = streamed.model.get_input_embeddings()
        self.config = SimpleNamespace(context=streamed.context, vocab_size=len(self.embed.weight))

    def stream(self, x_BT: Tensor) -> Tensor:
        return self.streamed.stream(x_BT, self.visit)

    def logits(self, h_ND: Tensor) -> Tensor:
        """Norm and head look at one token at a time, so any tokens make a row."""
        rows = h_ND[None].split(min(BATCH, self.config.context), dim=1)
        any_ids = (torch.zeros(row.shape[:2], dtype=torch.int64) for row in rows)
        return torch.cat([made[0] for ids, row in zip(any_ids, rows) for made in self.streamed.logits(ids, row)])
