"""Text from local files: .txt, .jsonl and .parquet, each also .gz."""

from __future__ import annotations

import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from gnomon.data.plain_text import not_utf8
from gnomon.data.sources import Source, TextPiece, cut_text, pieces_of, text_of
from gnomon.data.tokenizers import END_OF_TEXT
from gnomon.errors import UserError, suggest

_KINDS = (".txt", ".jsonl", ".parquet")


class LocalFiles(Source):
    """Files read one after the other.

    For validation it gives every (1/val_fraction)-th document, never the first; with fewer documents than
    that, none.
    """

    unit = "B"

    def __init__(self, paths: list[Path], field: str, val_fraction: float):
        self._paths, self._field, self._fraction = paths, field, val_fraction
        sizes = {path: path.stat().st_size for path in paths}
        for path, size in sizes.items():
            if not size:
                raise UserError(f"{path} is empty")
        self.name = paths[0].name + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        self.identity = {"files": [[path.name, size, _fingerprint(path)] for path, size in sizes.items()]}
        self._total = sum(sizes.values())
        # English has 4.3 bytes per GPT-2 token; gzip holds it in about two fifths, parquet in half the bytes.
        growth = {".gz": 2.6, ".parquet": 1.9}
        self.tokens = sum(size * growth.get(path.suffix, 1.0) for path, size in sizes.items()) / 4.3

    def total(self, part: str) -> float:
        return self._total

    def pieces(self, part: str) -> Iterator[TextPiece]:
        if part == "val" and not self._fraction:
            return
        before, number = 0, -1
        for path in self._paths:
            for piece in _READERS[_kind(path)](path, self._field):
                number += piece.opens
                for_val = int((number + 1) * self._fraction) > int(number * self._fraction)
                if for_val == (part == "val"):
                    yield TextPiece(piece.text, piece.opens, before + piece.position)
            before += path.stat().st_size


def find(source: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Path]:
    """The files of a path, a folder (read recursively), a glob, or a list of these, in order of name.

    Raises:
        UserError: nothing there, or a kind of file that gnomon does not read.
    """
    if not isinstance(source, str | os.PathLike):
        return [path for item in source for path in find(item)]
    path = Path(source)
    if path.is_file():
        if not _kind(path):
            raise UserError(f"{path}: gnomon reads {', '.join(_KINDS)}, each also .gz. Rename it if it is one of them.")
        return [path]
    if path.is_dir():
        found = [file for file in path.rglob("*") if _kind(file) and file.is_file() and not file.name.startswith(".")]
        what = f"the folder {path} holds no {', '.join(_KINDS)} (or .gz of one)"
    else:
        found = [Path(name) for name in glob.glob(str(source), recursive=True)]
        found = [file for file in found if _kind(file) and file.is_file()]
        near = path.parent.iterdir() if path.parent.is_dir() else ()
        what = f"{source}: no such file or folder. {suggest(path.name, [item.name for item in near][:50])}"
    if not found:
        raise UserError(what)
    return sorted(found)


def _kind(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return next((kind for kind in _KINDS if name.endswith(kind)), "")


def _fingerprint(path: Path, block: int = 1 << 20) -> str:
    """Of the first and last megabyte: cheap, and enough to notice that a file was exchanged."""
    with open(path, "rb") as file:
        head = file.read(block)
        file.seek(max(0, path.stat().st_size - block))
        return hashlib.sha256(head + file.read(block)).hexdigest()[:16]


@contextlib.contextmanager
def _lines(path: Path) -> Iterator[tuple[Iterator[tuple[int, bytes]], IO[bytes]]]:
    """(numbered lines, the file as it lies on disk: its tell() is the position)."""
    with open(path, "rb") as raw:
        stream = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
        try:
            yield enumerate(stream, 1), raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path} is a damaged gzip file: {error}. Copy it again.") from error


def _decoded(path: Path, number: int, offset: int, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"line {number}: " + not_utf8(str(path), offset + error.start, line[error.start])) from error


def _txt(path: Path, field: str) -> Iterator[TextPiece]:
    with _lines(path) as (lines, raw):
        text, opens, offset = "", True, 0
        for number, line in lines:
            *ended, rest = _decoded(path, number, offset, line).split(END_OF_TEXT)
            offset += len(line)
            for end in ended:
                yield from pieces_of((text + end).rstrip("\n"), raw.tell(), opens)
                text, opens = "", True
            # The line breaks around a mark belong to it, not to the documents.
            text += rest.lstrip("\n") if opens and not text else rest
            *pieces, text = cut_text(text)
            for piece in pieces:
                yield TextPiece(piece, opens, raw.tell())
                opens = False
        yield from pieces_of(text, raw.tell(), opens)


def _jsonl(path: Path, field: str) -> Iterator[TextPiece]:
    with _lines(path) as (lines, raw):
        offset = 0
        for number, line in lines:
            text = _decoded(path, number, offset, line)
            offset += len(line)
            if not text.isspace():
                yield from pieces_of(_json_text(text, f"{path}, line {number}", field), raw.tell())


def _json_text(line: str, where: str, field: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}): {line[:60]!r}. Each line must be one JSON object.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a JSON {type(row).__name__}, not an object with a field {field!r}")
    text = text_of(row, field, where)
    # JSON can spell half a surrogate pair ("\ud83d"), which no UTF-8 can hold.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if "\\u" in line else text


def _parquet(path: Path, field: str) -> Iterator[TextPiece]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f'{path}: reading parquet needs pyarrow: pip install "gnomon[data]"') from error
    size = path.stat().st_size
    try:
        with _seekable(path) as file:
            table = pyarrow.parquet.ParquetFile(file)
            if field not in table.schema_arrow.names:
                text_of(dict.fromkeys(table.schema_arrow.names), field, str(path))
            rows, number = table.metadata.num_rows, 0
            for block in table.iter_batches(batch_size=256, columns=[field]):
                for row in block.to_pylist():
                    number += 1
                    text = text_of(row, field, f"{path}, row {number}")
                    yield from pieces_of(text, size * number / rows)
    except (pyarrow.ArrowException, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is not a whole parquet file: {error}. Copy it again.") from error


@contextlib.contextmanager
def _seekable(path: Path) -> Iterator[IO[bytes]]:
    """Parquet is read from its end: a .gz is decompressed into a temporary file first."""
    if path.suffix != ".gz":
        with open(path, "rb") as file:
            yield file
        return
    with gzip.open(path) as packed, tempfile.TemporaryFile() as file:
        shutil.copyfileobj(packed, file)
        yield file


_READERS = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet}
