"""Text as rows of token ids a model is used to: by its own tokenizer, with what it puts before and after a text.

Legend: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnomon import data
from gnomon.data.plain_text import read_text
from gnomon.data.tokens import Tokens
from gnomon.errors import UserError
from gnomon.evaluation.loading import run_of_path
from gnomon.run_folder import RECIPE
from gnomon.running.architecture import gguf_file, is_gguf, library, quietly
from gnomon.running.streamed import Streamed
from gnomon.train.run_data import open_tokenizer
from gnomon.train.run_writer import load_recipe

LONGEST = 1024
SHORTEST = 32
# Of a long text only the start is tokenised: more characters a token than any text in use has.
_CHARACTERS = 24


@dataclass(frozen=True)
class Rows:
    """Tokens to run.

    Attributes:
        tokens_BT: int64; each row begins as a text does for this model, and all are full.
        text: where they come from.
        tokenizer: what made them.
        own_T: True where a token is of the text and was not put around it.
    """

    tokens_BT: Tensor
    text: str
    tokenizer: str
    own_T: Tensor

    @property
    def count(self) -> int:
        """How many tokens in all."""
        return self.tokens_BT.numel()

    def first(self, tokens: int) -> Rows:
        """The first rows, of at most so many tokens; one row at least."""
        return replace(self, tokens_BT=self.tokens_BT[: max(1, tokens // self.tokens_BT.shape[1])])


@dataclass(frozen=True)
class Words:
    """A tokenizer as it is needed here: ids of a text, and what goes around them."""

    name: str
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    encode: Callable[[str], Sequence[int]] = lambda _: ()


def read_rows(streamed: Streamed, text: str | Path, tokens: int = 4096, length: int | None = None) -> Rows:
    """The first tokens of a text as rows for a model.

    Args:
        streamed: the model.
        text: a text (.txt, .txt.gz), tokenised by the model's own tokenizer; or a token file (.bin) or folder of them.
        tokens: how many at most.
        length: of a row; None for the model's context, at most 1,024. A shorter text makes one shorter row.

    Raises:
        UserError: no tokenizer for a text, ids the model does not know, or fewer than 32 tokens.
    """
    if tokens < SHORTEST:
        raise UserError(f"--tokens {tokens}: {SHORTEST} at least, since states and attention are compared along a row")
    length = min(length or LONGEST, streamed.context, tokens)
    if _is_text(text):
        words = own_tokenizer(streamed)
        ids_N = _encoded(words, read_text(Path(text)), tokens)
    else:
        found = data.open_tokens(str(text))
        if not isinstance(found, Tokens):
            raise UserError(f"{text} is a mixture, which has no beginning to read from. Give one text or token file.")
        words, ids_N = Words(found.tokenizer or "unknown"), np.asarray(found[0:tokens], dtype=np.int64)
    around = len(words.before) + len(words.after)
    own = min(length - around, len(ids_N))
    if own < SHORTEST:
        raise UserError(
            f"{text} has {len(ids_N):,} tokens (tokenizer: {words.name}), which is too short: {SHORTEST} make the shortest row."
        )
    rows = max(min(tokens // (own + around), len(ids_N) // own), 1)
    ids_BT = np.asarray(ids_N[: rows * own], dtype=np.int64).reshape(rows, own)
    before, after = (np.tile(np.array(some, dtype=np.int64), (rows, 1)) for some in (words.before, words.after))
    tokens_BT = torch.from_numpy(np.concatenate([before, ids_BT, after], axis=1))
    known = streamed.model.get_input_embeddings().weight.shape[0]
    if (largest := int(tokens_BT.max())) >= known:
        raise UserError(
            f"{text} has the token id {largest}, and the embedding of {streamed.checkpoint.name} has {known} rows: "
            f"the tokenizer ({words.name}) is not the model's. Give a token file made with the model's own."
        )
    own_T = torch.tensor([False] * len(words.before) + [True] * own + [False] * len(words.after))
    return Rows(tokens_BT, str(text), words.name, own_T)


def _is_text(source: str | Path) -> bool:
    path = Path(source)
    return path.suffix != ".bin" and path.is_file()


def _encoded(words: Words, text: str, tokens: int) -> np.ndarray:
    """At least so many ids, or those of the whole text."""
    start = text[: tokens * _CHARACTERS]
    ids = words.encode(start)
    if len(ids) < tokens and len(start) < len(text):
        ids = words.encode(text)
    return np.asarray(ids, dtype=np.int64)


def own_tokenizer(streamed: Streamed) -> Words:
    """The tokenizer that lies with the model.

    Raises:
        UserError: none does.
    """
    checkpoint = streamed.checkpoint
    file = Path(next(iter(checkpoint.entries.values())).file)
    if not file.exists():
        raise UserError(
            f"{checkpoint.name} lies in memory and brings no tokenizer. Give a token file (.bin) as the text."
        )
    if streamed.model.config.model_type == "gnomon" and (run_of_path(file.parent) / RECIPE).exists():
        run = run_of_path(file.parent)
        ours = open_tokenizer(load_recipe(run), run)
        return Words(ours.name, (ours.end_of_text,), encode=lambda text: ours.encode(text).tolist())
    where: dict[str, Any] = {"gguf_file": gguf_file(checkpoint).name} if is_gguf(checkpoint) else {}
    with quietly():
        try:
            theirs = library().AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False, **where)
        except Exception as error:  # each kind of tokenizer fails in a way of its own
            raise UserError(
                f"{file.parent} has no tokenizer that transformers opens ({type(error).__name__}: "
                f"{next(iter(str(error).splitlines()), '')}). Put the model's tokenizer files beside it, or give a token file "
                "(.bin) as the text."
            ) from error
        before, after = _around(theirs)
    return Words(
        "the model's own", before, after, lambda text: theirs(text, add_special_tokens=False, verbose=False).input_ids
    )


def _around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and after a text ([CLS] and [SEP], <s>, nothing)."""
    bare = tokenizer("a b", add_special_tokens=False).input_ids
    whole = tokenizer("a b").input_ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    return (), ()
