"""Text to token ids and back: bytes, GPT-2's byte-pair encoding, or any Hugging Face `tokenizer.json`.

Text is always *ordinary* text: a document that happens to contain the characters `<|endoftext|>` cannot forge the
separator. Only gnomon itself writes `end_of_text`, before each document.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gnomon.data.corpus import packaged
from gnomon.errors import UserError, suggest
from gnomon.files import atomic, check_readable, read_json, write_json

END_OF_TEXT = "<|endoftext|>"
BUILT_IN = ("byte", "gpt2")

# What the end of a text is called in the tokenizers in use, where `tokenizer_config.json` does not say.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


class Tokenizer(abc.ABC):
    """The one face of every tokenizer.

    Attributes:
        name: what `tokenizer(name)` opens again: "byte", "gpt2" or a path.
        vocab_size: number of ids; the embedding of a model has at least this many rows.
        end_of_text: the id written before each document.
    """

    name: str
    vocab_size: int
    end_of_text: int

    @property
    def dtype(self) -> np.dtype:
        """The type of stored ids: uint16 where every id fits, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, shape (tokens,), without any special token added."""
        return self.encode_many([text])[0]

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly when each id stands for the same piece of text."""

    @abc.abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text. May run in several threads at once."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Bytes that are no UTF-8 (a character cut in two) become U+FFFD."""

    @abc.abstractmethod
    def library(self) -> Any:
        """A new `tokenizers.Tokenizer` with the same ids, for other programs. Unlike here, the characters of the
        end-of-text token become that token, as they expect."""

    def _checked(self, ids: Iterable[int]) -> list[int]:
        ids = np.asarray(ids if isinstance(ids, np.ndarray | list | tuple) else list(ids)).reshape(-1).tolist()
        for id in ids:
            if not 0 <= id < self.vocab_size:
                raise UserError(f"token id {id} is not in the {self.vocab_size} of tokenizer {self.name!r}")
        return ids

    def __repr__(self) -> str:
        return f"tokenizer({self.name!r})"


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte, and 256 for the end of a text. Needs no vocabulary and no extra."""

    name: str = "byte"
    vocab_size: int = 257
    end_of_text: int = 256

    @property
    def fingerprint(self) -> str:
        return "byte"

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(self.dtype) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        runs = itertools.groupby(self._checked(ids), key=self.end_of_text.__eq__)
        return "".join(
            END_OF_TEXT * len(list(run)) if ends else bytes(run).decode("utf-8", errors="replace") for ends, run in runs
        )

    def library(self) -> Any:
        inner = _byte_level(_library().models.BPE(vocab={symbol: b for b, symbol in byte_symbols().items()}, merges=[]))
        inner.add_special_tokens([END_OF_TEXT])
        return inner


class BPETokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library (byte-pair encoding, or whatever its file describes)."""

    def __init__(self, name: str, inner: Any, end_of_text: int):
        # A separator is ours to write: the text "<|endoftext|>" is tokenised like any other.
        inner.encode_special_tokens = True
        self.name: str = name
        self.end_of_text: int = end_of_text
        # Ids may have holes; the embedding needs a row for the largest.
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        self._inner = inner
        # A BPE without an unknown token drops characters it does not know, in silence, unless it is made of bytes.
        bpe, made_of_bytes = isinstance(inner.model, _library().models.BPE), vocabulary.keys() >= {*byte_symbols().values()}
        self._may_lose = bpe and not (made_of_bytes or inner.model.byte_fallback or inner.model.unk_token)

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own pickle forgets `encode_special_tokens`.
        return BPETokenizer, (self.name, self._inner, self.end_of_text)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            if self._may_lose:
                self._check_known(set().union(*texts))
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"tokenizer {self.name!r} cannot read a text: {error}. Give it an unknown token (unk_token, an entry of its "
                "vocabulary), or take one of bytes, which knows every text (`train_bpe`)."
            ) from error
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def _check_known(self, characters: set[str]) -> None:
        """UserError if one of them becomes nothing; blanks and what a normaliser removes may."""
        normal = self._inner.normalizer.normalize_str if self._inner.normalizer else str
        for character in characters - self._known:
            lost = not self._inner.encode(character, add_special_tokens=False).ids
            if lost and normal(character).strip():
                raise UserError(f"it has no unknown token, and {character!r} is not in its vocabulary")
            self._known.add(character)

    @functools.cached_property
    def _known(self) -> set[str]:
        return set()

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode(self._checked(ids), skip_special_tokens=False)

    def library(self) -> Any:
        inner = _library().Tokenizer.from_str(self._inner.to_str())
        inner.add_special_tokens([inner.id_to_token(self.end_of_text)])
        # What a post-processor would add ("<s>") was not there in training.
        inner.post_processor = None
        return inner

    @functools.cached_property
    def fingerprint(self) -> str:
        vocabulary = sorted((id, word) for word, id in self._inner.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a Hugging Face `tokenizer.json`, atomically: to `path` if it ends in .json, else into the folder `path`.

        Where its end-of-text token is not the one that would be looked for, `tokenizer_config.json` beside it says so.
        """
        path = Path(path)
        path = path if path.suffix == ".json" else path / "tokenizer.json"
        with atomic(path, "w") as file:
            file.write(self._inner.to_str(pretty=False))
        with contextlib.suppress(UserError):
            if _end_of_text(path, self._inner) == self.end_of_text:
                return path
        config = path.with_name("tokenizer_config.json")
        notes = read_json(config) if config.exists() else {}
        write_json(config, {**notes, "eos_token": self._inner.id_to_token(self.end_of_text)})
        return path


def tokenizer(name: str | os.PathLike[str] | Tokenizer) -> Tokenizer:
    """A tokenizer by name or path.

    Args:
        name: `"byte"` (257 ids: the 256 bytes, then end of text); `"gpt2"` (50,257 ids, shipped with gnomon);
            the path of a Hugging Face `tokenizer.json`, or of a folder that holds one; or a tokenizer, given back as it is.

    Raises:
        UserError: unknown name, unreadable file, no end-of-text token, or the extra `data` is missing.
    """
    if isinstance(name, Tokenizer):
        return name
    name = os.fspath(name)
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return _gpt2()
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not os.path.lexists(path):
        raise UserError(
            f"unknown tokenizer {name!r}, and no such file. {suggest(name, BUILT_IN)} "
            "A path of a tokenizer.json (or of its folder) works too."
        )
    check_readable(path)
    try:
        inner = _library().Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer.json that the tokenizers library reads: {error}") from error
    return BPETokenizer(name, inner, _end_of_text(path, inner))


def train_bpe(texts: Iterable[str], vocab_size: int, *, name: str = "bpe") -> BPETokenizer:
    """Train a byte-level BPE with GPT-2's word pattern; `save()` makes it a `tokenizer.json`.

    Args:
        texts: the training texts; read once.
        vocab_size: at least 257 (the bytes and end of text, which gets id 0). A small text gives fewer.
    """
    if vocab_size < 257:
        raise UserError(f"a byte-level vocabulary has at least 257 ids (256 bytes + end of text), not {vocab_size}")
    library = _library()
    inner = _byte_level(library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return BPETokenizer(name, inner, inner.token_to_id(END_OF_TEXT))


@functools.cache
def _gpt2() -> BPETokenizer:
    raw = packaged(
        "gpt2_merges.txt.gz",
        size=456_318,
        sha256="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    )
    vocabulary, merges = gpt2_vocabulary(raw.decode("utf-8"))
    inner = _byte_level(_library().models.BPE(vocab=vocabulary, merges=merges))
    return BPETokenizer("gpt2", inner, vocabulary[END_OF_TEXT])


def gpt2_vocabulary(merges_text: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """GPT-2's vocabulary from its merges alone: 256 byte symbols, one per merge, then end of text."""
    symbols = list(byte_symbols().values())
    lines = merges_text.strip("\n").split("\n")[1:]  # the first is "#version: 0.2"
    merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
    words = symbols + [left + right for left, right in merges] + [END_OF_TEXT]
    return {word: id for id, word in enumerate(words)}, merges


def byte_symbols() -> dict[int, str]:
    """How byte-level tokenizers write each byte, in GPT-2's order: as itself where that is a visible Latin-1 character; the
    others follow from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def _byte_level(model: Any) -> Any:
    library = _library()
    inner = library.Tokenizer(model)
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    return inner


def _end_of_text(path: Path, inner: Any) -> int:
    names = list(_END_NAMES)
    config = path.with_name("tokenizer_config.json")
    if config.exists():
        eos = read_json(config).get("eos_token")
        names.insert(0, eos["content"] if isinstance(eos, dict) else eos or END_OF_TEXT)
    for name in names:
        if (id := inner.token_to_id(name)) is not None:
            return id
    raise UserError(
        f"{path} has no end-of-text token (looked for {', '.join(names)}). "
        f'Put {{"eos_token": "…"}} into {config.name} beside it.'
    )


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise UserError(
            'this tokenizer needs the tokenizers library: pip install "gnomon[data]". '
            'The tokenizer "byte" needs nothing.'
        ) from error
    return tokenizers
