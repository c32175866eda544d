"""Tokens: what a model is trained on, wherever it lies (one file, many shards, a text, the embedded corpus).

N number of windows, L length of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gnomon.data import tokenfile
from gnomon.data.tokenizers import Tokenizer, tokenizer
from gnomon.errors import UserError


class Joined:
    """Several arrays of ids in one row, read as one array: `len`, `joined[i]`, `joined[a:b]` (a copy where it crosses a
    border). Nothing is loaded."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays: list[np.ndarray] = list(arrays)
        self.dtype: np.dtype = np.result_type(*self.arrays)
        self._ends = np.cumsum([len(array) for array in self.arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, key: int | slice) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise IndexError("tokens in several files can only be sliced with step 1")
            parts = self.parts(start, stop)
            return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])
        key = range(len(self))[key]
        return self[key : key + 1][0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)

    def parts(self, start: int, stop: int) -> list[np.ndarray]:
        """The pieces of [start, stop), each a view of one array."""
        parts: list[np.ndarray] = []
        first = int(np.searchsorted(self._ends, start, side="right"))
        for array, end in zip(self.arrays[first:], self._ends[first:].tolist()):
            begin = end - len(array)
            if begin >= stop:
                break
            parts.append(array[max(start - begin, 0) : stop - begin])
        return parts


def mean_bytes(parts: Sequence[tuple[int, float | None]]) -> float | None:
    """Bytes of text a token over parts, each (its tokens, its bytes a token); None if those of one are not known."""
    known = [(count, each) for count, each in parts if each is not None]
    return sum(count * each for count, each in known) / sum(count for count, _ in known) if len(known) == len(parts) else None


# Without eq, as an object is its own key: what is found out about it can be remembered.
@dataclass(frozen=True, eq=False)
class Tokens:
    """A row of token ids with its name.

    Attributes:
        array: shape (tokens,), uint16 or uint32, memory-mapped where it comes from files; a `Joined` for several.
        name: what messages call it.
        vocab_size: ids are below it; None when unknown (a file without sidecar).
        tokenizer: what `gnomon.data.tokenizer` opens to read them ("byte", "gpt2" or a path); None when unknown.
        vocabulary: the tokenizer's `fingerprint`; None when unknown.
        bytes_per_token: of UTF-8, on average over the whole source: a loss in nats a token is loss / bytes_per_token / ln 2
            in bits a byte. None when the text is not known.
        files: those the ids lie in.
    """

    array: np.ndarray | Joined
    name: str
    vocab_size: int | None = None
    tokenizer: str | None = None
    vocabulary: str | None = None
    bytes_per_token: float | None = None
    files: tuple[tokenfile.TokenFile, ...] = ()

    @property
    def made_with(self) -> tuple[str | None, int | None]:
        """What two sources must share to be used together."""
        return self.vocabulary or self.tokenizer, self.vocab_size

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer the ids were made with; UserError if it is not known, or no longer where it was."""
        if self.tokenizer is None:
            raise UserError(f"{self.name} does not say which tokenizer made it; name it when opening")
        found = tokenizer(self.tokenizer)
        if self.vocabulary not in (None, found.fingerprint):
            raise UserError(f"{self.name} was made with another tokenizer than {self.tokenizer!r} is now; put that back")
        return found

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, key: slice) -> np.ndarray:
        return self.array[key]

    def part(self, start: int, stop: int) -> Tokens:
        """The tokens [start, stop) as Tokens; nothing is copied."""
        start, stop, _ = slice(start, stop).indices(len(self))
        parts = self.array.parts(start, stop) if isinstance(self.array, Joined) else []
        return replace(self, array=Joined(parts) if len(parts) > 1 else self.array[start:stop])

    def windows(self, starts: np.ndarray, length: int, counts: np.ndarray | None = None, fill: int = 0) -> np.ndarray:
        """`length` tokens from each of `starts` (N,), as int64 (N, length); of row n only `counts[n]`, the rest `fill`.

        Raises:
            UserError: an id is not below `vocab_size`; an embedding would fail on it with a riddle, or not at all.
        """
        ids_NL = np.full((len(starts), length), fill, np.int64)
        lengths = [length] * len(starts) if counts is None else counts.tolist()
        for row, (start, count) in enumerate(zip(starts.tolist(), lengths)):
            ids_NL[row, :count] = self.array[start : start + count]
        if self.vocab_size is not None and ids_NL.size and (largest := int(ids_NL.max())) >= self.vocab_size:
            raise UserError(tokenfile.too_large(self.name, largest, self.vocab_size))
        return ids_NL

    def check(self) -> None:
        """Read every file whole and compare it with its sidecar; UserError naming the damaged one."""
        for file in self.files:
            file.check()

    def __repr__(self) -> str:
        return f"Tokens({self.name!r}, {len(self):,} tokens, tokenizer={self.tokenizer!r})"
