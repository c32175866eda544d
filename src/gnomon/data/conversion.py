"""A job that turns a source into shards and can be killed at any moment.

`out/prepare.json` says, for each part (val, train), which shards are finished and where in the stream of pieces the next
one begins. It is written after each shard, so a restarted job reads the source again up to there and goes on; its files
are byte for byte those of a job that was never stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gnomon.data.sources import Source, TextPiece
from gnomon.data.tokenizers import BUILT_IN, BPETokenizer, Tokenizer
from gnomon.data.tokenizers import tokenizer as open_tokenizer
from gnomon.data.tokenwriter import TokenWriter
from gnomon.data.workers import encoded
from gnomon.errors import UserError
from gnomon.files import read_json, remove_partials, write_json
from gnomon.progress import Progress

STATE = "prepare.json"

# Characters given to the tokenizer at once; it spreads the pieces over the cores.
_BATCH = 1 << 22


@dataclass(frozen=True)
class PartState:
    """How far one part (val, train) is.

    Attributes:
        shards: the finished files; `tokens`: how many they hold together.
        piece, skip: the next shard begins in this piece of the stream, after this many of its tokens.
        position: how far the source is read.
        done: nothing is left to do.
    """

    shards: tuple[str, ...] = ()
    tokens: int = 0
    piece: int = 0
    skip: int = 0
    position: float = 0.0
    done: bool = False


class Conversion:
    """One folder of shards in the making."""

    def __init__(self, out: Path, source: Source, tokenizer: Tokenizer, shard_tokens: int, workers: int = 1):
        self.out: Path = out
        self._source, self._tokenizer, self._shard_tokens = source, tokenizer, shard_tokens
        self._workers = workers
        self._state: dict[str, Any] = {}

    def begin(self, settings: dict[str, Any]) -> bool:
        """Take up what an earlier call has left, or start anew (True)."""
        self.out.mkdir(parents=True, exist_ok=True)
        remove_partials(self.out)
        path = self.out / STATE
        if path.exists():
            self._state = _read_state(path)
            if self._state["val"].shards or self._state["train"].shards:
                _refuse_change(self.out, self._state["settings"], settings)
                return False
        if strangers := sorted(self.out.glob("*.bin")):
            raise UserError(f"{strangers[0]} is there already, and no {STATE} lists it. Choose a new folder.")
        if isinstance(self._tokenizer, BPETokenizer) and portable_name(self._tokenizer) == "tokenizer.json":
            self._tokenizer.save(self.out / "tokenizer.json")
        self._state = {"settings": settings, "val": PartState(), "train": PartState()}
        self._save("val", PartState())
        return True

    def run(self, name: str, limit: int | None) -> PartState:
        """Bring the part `name` ("val" or "train") to its end, from wherever it stands."""
        part: PartState = self._state[name]
        left = math.inf if limit is None else limit - part.tokens
        if part.done or not left:
            return part
        what = "tokenising" if name == "train" else "tokenising the validation part"
        total, unit = (self._source.total(name), self._source.unit) if limit is None else (limit, "tok")
        writer: TokenWriter | None = None
        with Progress(what, total, unit, done=part.position if limit is None else part.tokens) as progress:
            try:
                stream = self._tokens(name, part.piece)
                for ids, text_bytes, resume_at, full in _cut_into_shards(stream, part, self._shard_tokens, left):
                    writer = writer or self._writer(name, part)
                    writer.append(ids, text_bytes)
                    step = resume_at["position"] - progress.done if limit is None else len(ids)
                    progress.advance(step, note=writer.path.name)
                    if full:
                        part, writer = self._finish(name, part, writer, resume_at), None
                if writer:
                    part, writer = self._finish(name, part, writer, resume_at), None
            finally:
                if writer:
                    writer.abort()
        return self._save(name, replace(part, done=True))

    def _tokens(self, name: str, first: int) -> Iterator[tuple[int, TextPiece, np.ndarray]]:
        """(index, piece, ids) of the part's pieces from number `first` on, in order."""
        pieces = itertools.islice(enumerate(self._source.pieces(name)), first, None)
        end = np.array([self._tokenizer.end_of_text], self._tokenizer.dtype)
        batches = ((batch, [piece.text for _, piece in batch]) for batch in _batches(pieces))
        with contextlib.closing(encoded(self._tokenizer, batches, self._workers)) as stream:
            for batch, ids in stream:
                for (index, piece), bare in zip(batch, ids):
                    yield index, piece, np.concatenate([end, bare]) if piece.opens else bare

    def _writer(self, name: str, part: PartState) -> TokenWriter:
        # The first shard is the validation's, number 0; training counts from 1, as in modded-nanogpt's sets.
        number = len(part.shards) + (name == "train")
        path = self.out / f"{name}_{number:06d}.bin"
        return TokenWriter(path, self._tokenizer, source=self._source.name, recorded=portable_name(self._tokenizer))

    def _finish(self, name: str, part: PartState, writer: TokenWriter, resume_at: dict[str, Any]) -> PartState:
        path = writer.close()
        shards = (*part.shards, path.name)
        return self._save(name, replace(part, shards=shards, tokens=part.tokens + writer.count, **resume_at))

    def _save(self, name: str, part: PartState) -> PartState:
        self._state[name] = part
        parts = {each: asdict(self._state[each]) for each in ("val", "train")}
        write_json(self.out / STATE, {**self._state, **parts})
        return part


def _cut_into_shards(
    stream: Iterable[tuple[int, TextPiece, np.ndarray]], part: PartState, shard_tokens: int, left: float
) -> Iterator[tuple[np.ndarray, float, dict[str, Any], bool]]:
    """The ids of a stream that starts with `part.piece`, cut where a shard is full, at most `left` of them:
    (ids, bytes of text they stand for, where in the stream to resume after them, whether they fill a shard)."""
    room = shard_tokens
    for index, piece, ids in stream:
        used = part.skip if index == part.piece else 0
        # Of a piece in two shards each has its share.
        bytes_per_id = len(piece.text.encode()) / max(len(ids), 1)
        while used < len(ids):
            taken = ids[used : used + min(room, left)]
            used, room, left = used + len(taken), room - len(taken), left - len(taken)
            yield taken, len(taken) * bytes_per_id, {"piece": index, "skip": used, "position": piece.position}, not room
            room = room or shard_tokens
            if not left:
                return


def _batches(pieces: Iterable[tuple[int, TextPiece]]) -> Iterator[list[tuple[int, TextPiece]]]:
    batch, size = [], 0
    for numbered in pieces:
        batch.append(numbered)
        size += len(numbered[1].text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def portable_name(tokenizer: Tokenizer) -> str:
    """The name in the sidecars: one that opens the tokenizer wherever the folder is moved to."""
    built_in = tokenizer.name in BUILT_IN and tokenizer.fingerprint == open_tokenizer(tokenizer.name).fingerprint
    return tokenizer.name if built_in or not isinstance(tokenizer, BPETokenizer) else "tokenizer.json"


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = read_json(path)
        state = {
            "settings": state["settings"],
            "val": PartState(**state["val"]),
            "train": PartState(**state["train"]),
        }
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}). Remove the folder and start again.") from error
    for name in [*state["val"].shards, *state["train"].shards]:
        if not path.with_name(name).exists():
            raise UserError(f"{path.with_name(name)} is gone, but {STATE} lists it as finished. Remove the folder.")
    return state


def _refuse_change(out: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [f"{key} was {then.get(key)!r} and is now {now[key]!r}" for key in now if now[key] != then.get(key)]
    if changed:
        raise UserError(
            f"{out} was begun with other settings: {'; '.join(changed)}. Give the same ones to continue it, "
            "or choose a new folder."
        )
