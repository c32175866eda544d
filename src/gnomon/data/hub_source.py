"""Text from the data sets of the papers, streamed from the Hugging Face hub through `datasets`.

Only plain iteration from the beginning is used: resuming a streamed set by its own state has silently
restarted or skipped data (huggingface/datasets issues 8308, 7901, 8408).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gnomon.data.hub import load_rows
from gnomon.data.sources import LeftOut, Source, TextPiece, pieces_of, text_of
from gnomon.data.wikitext import split_articles


@dataclass(frozen=True)
class HubSet:
    """A set by name; documents and GPT-2 tokens of its training split (about)."""

    path: str
    config: str | None
    documents: int
    tokens: float
    validation: str | None = None  # a split of its own
    articles: bool = False  # rows are lines; documents are articles


HUB = {
    "openwebtext": HubSet("Skylion007/openwebtext", None, 8_013_769, 9.04e9),
    "fineweb-edu": HubSet("HuggingFaceFW/fineweb-edu", "sample-10BT", 9_672_101, 9.9e9),
    "wikitext-103": HubSet("Salesforce/wikitext", "wikitext-103-raw-v1", 28_475, 1.2e8, "validation", articles=True),
}


class HubSource(Source):
    """Validation is the set's own validation split, or else its first documents."""

    unit = "docs"

    def __init__(self, name: str, field: str, val_fraction: float, limit: int | None, skip_bad: bool = False):
        self.name: str = name
        self._set, self._field, self._skip_bad = HUB[name], field, skip_bad
        self.left_out: dict[str, LeftOut] = {}
        share = min(1.0, limit / self._set.tokens) if limit else 1.0
        # One document at least: a limited run must not read (and skip) a hundredth of the whole set first.
        wanted = max(1, int(self._set.documents * val_fraction * share)) if val_fraction else 0
        self._held_out = 0 if self._set.validation else wanted
        self._no_validation = not val_fraction
        self.identity: dict[str, Any] = {"set": self._set.path, "config": self._set.config, "held_out": self._held_out}
        self.tokens: float = self._set.tokens

    def total(self, part: str) -> float | None:
        if part == "val":
            return None if self._set.validation else self._held_out
        return self._set.documents - self._held_out

    def pieces(self, part: str) -> Iterator[TextPiece]:
        if part == "val" and self._no_validation:
            return
        split = self._set.validation if part == "val" and self._set.validation else "train"
        left_out = self.left_out[split] = LeftOut(self._skip_bad)
        texts = self._texts(split, left_out)
        if part == "val" and not self._set.validation:
            texts = itertools.islice(texts, self._held_out)
        elif part == "train":
            texts = itertools.islice(texts, self._held_out, None)
        for number, text in enumerate(texts, 1):
            yield from pieces_of(text, number, left_out)

    def _texts(self, split: str, left_out: LeftOut) -> Iterator[str]:
        rows = load_rows(self._set.path, self._set.config, split=split, streaming=True)
        found = (left_out.text(text_of, row, self._field, f"{self.name}, row {n}") for n, row in enumerate(rows, 1))
        texts = (text for text in found if text is not None)
        return map("".join, split_articles(texts, after_blank=True)) if self._set.articles else texts
