"""One token file: its header, its sidecar, and reading it. (`tokenwriter` writes it.)

    offset 0     256 little-endian int32: magic, version, number of tokens, zeros
    offset 1024  the ids, little-endian

    magic     version  ids     who writes it
    20240520  1        uint16  llm.c (GPT-2), modded-nanogpt, gnomon
    20240801  7        uint32  llm.c (Llama 3), gnomon when the vocabulary is larger than 65,536
    none      none     uint16  nanoGPT: ids from offset 0

No date of 2024 can begin a headerless file of GPT-2 ids: read as two uint16, the first is above 50,256.
Beside `x.bin` gnomon writes `x.bin.json`: tokenizer, vocabulary (a fingerprint), vocab_size, count, dtype, sha256 of the
ids, documents, bytes_per_token (of UTF-8; end-of-text ids count as tokens), source.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnomon.errors import UserError
from gnomon.files import check_readable, read_json

HEADER_BYTES = 1024
# The count in the header is an int32.
MAX_TOKENS = 2**31 - 1

FORMATS: dict[int, tuple[int, np.dtype]] = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}

_OTHER_KINDS = {
    b"version https://git-lfs": "is a Git LFS pointer, not the data: run `git lfs pull` where it came from",
    b"\x1f\x8b": "is gzip-compressed: a token file must be decompressed (a text goes through `gnomon data`)",
    b"PAR1": "is a parquet file: turn it into token files with `gnomon data`",
    b"PK\x03\x04": "is a zip archive",
    b"\x93NUMPY": "is a .npy file: write it again with array.tofile(path)",
}


@dataclass(frozen=True)
class TokenFile:
    """A token file, memory-mapped and checked.

    Attributes:
        array: ids, shape (tokens,), uint16 or uint32, read-only, on disk.
        vocab_size, tokenizer, vocabulary, sha256, bytes_per_token: from the sidecar; None without one. `vocabulary` is
            the fingerprint of the tokenizer's.
    """

    path: Path
    array: np.ndarray
    vocab_size: int | None
    tokenizer: str | None
    vocabulary: str | None
    sha256: str | None
    bytes_per_token: float | None = None

    @property
    def made_with(self) -> tuple[str | None, int | None]:
        """What two files must share to be read as one."""
        return self.vocabulary or self.tokenizer, self.vocab_size

    def check(self) -> None:
        """Read the whole file: the hash of its ids, and that each is below vocab_size. UserError if not."""
        if self.sha256 is not None and hashlib.sha256(self.array.data).hexdigest() != self.sha256:
            raise UserError(
                f"{self.path} was changed or damaged: its ids do not have the sha256 that its .json gives. "
                "Make it again with `gnomon data`, or copy it again."
            )
        if self.vocab_size is not None and (largest := int(self.array.max())) >= self.vocab_size:
            raise UserError(too_large(str(self.path), largest, self.vocab_size))


def sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def too_large(name: str, id: int, vocab_size: int) -> str:
    return (
        f"{name} holds the token id {id}, but its tokenizer has only {vocab_size} ids. "
        "The file is damaged or was made with another tokenizer: make it again with `gnomon data`."
    )


def read(path: str | os.PathLike[str]) -> TokenFile:
    """Open a token file of any of the three formats.

    Raises:
        UserError: missing, empty, truncated or too long, unknown header, an id count that differs from the
            header's or the sidecar's, or another kind of file.
    """
    path = check_readable(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEADER_BYTES)
    if not size:
        raise UserError(f"{path} is empty: the process that wrote it did not finish. Make it again.")
    for start, what in _OTHER_KINDS.items():
        if head.startswith(start):
            raise UserError(f"{path} {what}.")
    notes = _read_sidecar(path)
    offset, dtype, count = _layout(path, head, size, notes)
    array = np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)))
    name = notes.get("tokenizer")
    if name and name.endswith(".json"):
        # A tokenizer.json lies beside the file, wherever the folder has been moved to.
        name = str(path.with_name(name))
    known = {key: notes.get(key) for key in ("vocab_size", "vocabulary", "sha256", "bytes_per_token")}
    return TokenFile(path, array, tokenizer=name, **known)


def _layout(path: Path, head: bytes, size: int, notes: dict[str, Any]) -> tuple[int, np.dtype, int]:
    """(offset of the ids, their dtype, their count); UserError where the size tells another story."""
    magic = int.from_bytes(head[:4], "little")
    if magic in FORMATS:
        version, dtype = FORMATS[magic]
        fields = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
        if len(head) < HEADER_BYTES:
            raise UserError(f"{path} ends inside its {HEADER_BYTES}-byte header ({size} bytes). Copy or make it again.")
        if fields[1] != version:
            raise UserError(f"{path} has header version {fields[1]}; gnomon reads version {version} of magic {magic}.")
        offset, count = HEADER_BYTES, int(fields[2])
    else:
        if 20240101 <= magic <= 20241231:
            known = " or ".join(map(str, FORMATS))
            raise UserError(
                f"{path} begins with the magic {magic}, which is not that of a token file ({known}). "
                "Is it an evaluation set or a checkpoint of llm.c?"
            )
        if not notes and path.suffix != ".bin":
            # Any text of an even length would pass for ids.
            raise UserError(
                f"{path} is no token file: it has no header, no sidecar, and no name that ends in .bin. "
                f"Is it a text? gnomon data {path} OUT"
            )
        dtype = np.dtype(notes.get("dtype", "uint16")).newbyteorder("<")
        offset, count = 0, notes.get("count", size // dtype.itemsize)
        if size % dtype.itemsize:
            raise UserError(
                f"{path} has {size:,} bytes, which is no whole number of {dtype.name} ids: it was cut off, "
                "or it is not a token file. Copy or make it again."
            )
    expected = offset + count * dtype.itemsize
    if size != expected:
        state = "was cut off" if size < expected else "has bytes too many"
        raise UserError(
            f"{path} {state}: {count:,} {dtype.name} ids take {expected:,} bytes, the file has {size:,}. "
            "Copy or make it again."
        )
    if count <= 0:
        raise UserError(f"{path} holds no tokens ({count} according to its header). Make it again.")
    if notes.get("count", count) != count:
        raise UserError(
            f"{path} holds {count:,} tokens, but {sidecar(path).name} says {notes['count']:,}: the two "
            "do not belong together. Delete the .json if the file is right."
        )
    return offset, dtype, count


def _read_sidecar(path: Path) -> dict[str, Any]:
    beside = sidecar(path)
    if not beside.exists():
        return {}
    try:
        notes = read_json(beside)
        np.dtype(notes.get("dtype", "uint16"))
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{beside} is damaged ({error}). Delete it; {path.name} can be read without it.") from error
    return notes
