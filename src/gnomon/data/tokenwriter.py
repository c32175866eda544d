"""Writing a token file: whole, with header and sidecar, or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gnomon.data.tokenfile import FORMATS, HEADER_BYTES, MAX_TOKENS, sidecar
from gnomon.data.tokenizers import Tokenizer
from gnomon.errors import UserError
from gnomon.files import atomic, write_json
from gnomon.progress import quantity


class TokenWriter:
    """Appends ids to a new token file, which appears whole at `close()` or not at all.

    >>> with TokenWriter("novel.bin", tokenizer("gpt2")) as writer:
    ...     writer.append(ids)

    Args:
        path: the file to make; one that is there already is replaced at `close()`.
        tokenizer: whose ids they are; decides between uint16 and uint32.
        source: one line on where the text is from; goes into the sidecar.
        recorded: the tokenizer's name in the sidecar if not its own; a "….json" is looked for beside the file.

    Raises:
        UserError: an id outside the vocabulary, more than 2^31 - 1 tokens, nothing written, or a full disk. Whatever the
            error, other files stay as they are and no partial file is left.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tokenizer: Tokenizer,
        *,
        source: str | None = None,
        recorded: str | None = None,
    ):
        self.path: Path = Path(path)
        self.count: int = 0
        self.documents: int = 0
        self._tokenizer, self._source, self._recorded = tokenizer, source, recorded or tokenizer.name
        self._dtype = tokenizer.dtype.newbyteorder("<")
        self._text_bytes = 0.0
        self._hash = hashlib.sha256()
        self._stack = contextlib.ExitStack()
        with self._failing_cleanly():
            self._file = self._stack.enter_context(atomic(self.path))
            self._file.write(bytes(HEADER_BYTES))

    def append(self, ids: np.ndarray, text_bytes: float | None = None) -> None:
        """Add `ids`, shape (tokens,), any integer type; `text_bytes` is the size in UTF-8 of the text they stand for."""
        ids = np.asarray(ids).reshape(-1)
        if not ids.size:
            return
        with self._failing_cleanly():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self._tokenizer.vocab_size:
                bad = low if low < 0 else high
                raise UserError(f"{self.path}: token id {bad} is not one of {self._tokenizer}")
            if self.count + ids.size > MAX_TOKENS:
                raise UserError(f"{self.path}: a token file holds at most {MAX_TOKENS:,} tokens. Use more shards.")
            raw = ids.astype(self._dtype).tobytes()
            self._file.write(raw)
            self._hash.update(raw)
        self.count += ids.size
        # NaN when that of one stretch is not known.
        self._text_bytes += math.nan if text_bytes is None else text_bytes
        self.documents += int(np.count_nonzero(ids == self._tokenizer.end_of_text))

    def close(self) -> Path:
        """Write the header, flush to disk, rename, and write the sidecar."""
        magic, version = next((m, v) for m, (v, dtype) in FORMATS.items() if dtype == self._dtype)
        with self._failing_cleanly():
            if not self.count:
                raise UserError(f"{self.path}: nothing was written, and an empty token file is of no use")
            header = np.zeros(HEADER_BYTES // 4, "<i4")
            header[:3] = magic, version, self.count
            self._file.seek(0)
            self._file.write(header.tobytes())
            self._file.flush()
            os.fsync(self._file.fileno())
            # A sidecar of an older file must not describe the new one, should we be killed between the two.
            sidecar(self.path).unlink(missing_ok=True)
            self._stack.close()
            write_json(sidecar(self.path), self._notes())
        return self.path

    def abort(self) -> None:
        """Give up: remove the partial file."""
        self._leave(RuntimeError("given up"))

    def _notes(self) -> dict[str, Any]:
        notes = {
            "tokenizer": self._recorded,
            "vocabulary": self._tokenizer.fingerprint,
            "vocab_size": self._tokenizer.vocab_size,
            "count": self.count,
            "dtype": self._dtype.name,
            "sha256": self._hash.hexdigest(),
            "documents": self.documents,
            "bytes_per_token": None if math.isnan(self._text_bytes) else round(self._text_bytes / self.count, 6),
            "source": self._source,
        }
        return {key: value for key, value in notes.items() if value is not None}

    @contextlib.contextmanager
    def _failing_cleanly(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._leave(error)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise UserError(self._disk_full(error)) from error
            raise

    def _leave(self, error: BaseException) -> None:
        # Closing a file on a full disk fails once more; what matters is that the partial file goes.
        with contextlib.suppress(OSError, type(error)):
            self._stack.__exit__(type(error), error, error.__traceback__)

    def _disk_full(self, error: OSError) -> str:
        free = shutil.disk_usage(self.path.parent).free
        written = HEADER_BYTES + self.count * self._dtype.itemsize
        return (
            f"cannot write {self.path} beyond {quantity(written, 'B')}: {error.strerror} "
            f"({quantity(free, 'B')} free). The unfinished file was removed, files finished before are "
            "untouched. Free some space or choose another folder, then run the same command."
        )

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self._leave(error)
