"""Text from local files: .txt, .jsonl and .parquet, each also .gz."""

from __future__ import annotations

import contextlib
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from gnomon.data.plain_text import damaged_gzip, not_utf8
from gnomon.data.sources import PIECE_CHARS, LeftOut, Source, TextPiece, cut_text, pieces_of, text_of
from gnomon.data.tokenizers import END_OF_TEXT
from gnomon.errors import UserError, suggest
from gnomon.files import check_readable

_KINDS = (".txt", ".jsonl", ".parquet")
_LINE_END = re.compile(r"\r?\n\Z")


class LocalFiles(Source):
    """Files read one after the other.

    For validation it gives every (1/val_fraction)-th document, never the first; with fewer documents than
    that, none.
    """

    unit = "B"

    def __init__(self, paths: list[Path], field: str, val_fraction: float, skip_bad: bool = False):
        self._paths, self._field, self._fraction, self._skip_bad = paths, field, val_fraction, skip_bad
        self.left_out: dict[str, LeftOut] = {}
        sizes = {path: check_readable(path).stat().st_size for path in paths}
        for path, size in sizes.items():
            if not size:
                raise UserError(f"{path} is empty")
        self.name: str = paths[0].name + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        self.identity: dict[str, Any] = {"files": [[path.name, size, _fingerprint(path)] for path, size in sizes.items()]}
        self._total = sum(sizes.values())
        # English has 4.3 bytes per GPT-2 token; gzip holds it in about two fifths, parquet in half the bytes.
        growth = {".gz": 2.6, ".parquet": 1.9}
        self.tokens: float = sum(size * growth.get(path.suffix, 1.0) for path, size in sizes.items()) / 4.3

    def total(self, part: str) -> float:
        return self._total

    def pieces(self, part: str) -> Iterator[TextPiece]:
        if part == "val" and not self._fraction:
            return
        before, number = 0, -1
        left_out = self.left_out["files"] = LeftOut(self._skip_bad)
        for path in self._paths:
            for piece in _READERS[_kind(path)](path, self._field, left_out):
                number += piece.opens
                for_val = int((number + 1) * self._fraction) > int(number * self._fraction)
                if for_val == (part == "val"):
                    yield TextPiece(piece.text, piece.opens, before + piece.position)
            before += path.stat().st_size


def find(source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> tuple[list[Path], Counter[str]]:
    """The files of a path, a folder (read recursively), a glob, or a list of these, in order of name; and how many of
    each other kind (by suffix; empty ones) a folder or a glob holds, which are not read.

    Raises:
        UserError: nothing there, or a kind of file that gnomon does not read.
    """
    if not source:
        raise UserError("an empty name or list was given in place of files to read")
    if not isinstance(source, str | os.PathLike):
        lists, others = zip(*map(find, source))
        return list(itertools.chain(*lists)), sum(others, Counter())
    path = Path(source)
    if path.is_dir():
        there = [Path(folder, name) for folder, _, names in os.walk(path, onerror=_raise) for name in names]
        missing = f"the folder {path} holds no {', '.join(_KINDS)} (or .gz of one)"
    elif os.path.lexists(path):
        if not _kind(check_readable(path)):
            raise UserError(f"{path}: gnomon reads {', '.join(_KINDS)}, each also .gz. Rename it if it is one of them.")
        return [path], Counter()
    else:
        there = [Path(name) for name in glob.glob(str(source), recursive=True) if not Path(name).is_dir()]
        near = path.parent.iterdir() if path.parent.is_dir() else ()
        missing = f"{source}: no such file or folder. {suggest(path.name, [item.name for item in near][:50])}"
    there = sorted({file for file in there if not file.name.startswith(".")})
    found = [file for file in there if _kind(file) and file.is_file() and file.stat().st_size]
    others = Counter(_other_kind(file) for file in sorted({*there} - {*found}))
    if not found:
        raise UserError(missing + (f". There: {counted(others)}." if others else ""))
    return found, others


def counted(kinds: Counter[str]) -> str:
    """`7 .md, 2 .csv`, the most frequent first, of at most ten kinds."""
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(10)) + (", …" if len(kinds) > 10 else "")


def _other_kind(path: Path) -> str:
    if not path.is_file():
        return "pipe or broken link"
    return "empty" if _kind(path) else path.suffix or path.name


def _raise(error: OSError) -> None:
    raise error


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
            raise UserError(damaged_gzip(path, error)) from error


def _decoded(path: Path, number: int, offset: int, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"line {number}: " + not_utf8(str(path), offset + error.start, line[error.start])) from error


def _txt(path: Path, field: str, left_out: LeftOut) -> Iterator[TextPiece]:
    """The separator is a line that holds nothing else; the line breaks on both of its sides belong to it."""
    with _lines(path) as (lines, raw):
        held, size, opens, separated, offset = [], 0, True, False, 0
        for number, line in lines:
            text = _decoded(path, number, offset, line)
            offset += len(line)
            if text.rstrip("\r\n") == END_OF_TEXT:
                # A file may begin with a separator; two of them with nothing between are an empty document.
                if held or separated:
                    yield from pieces_of(_LINE_END.sub("", "".join(held)), raw.tell(), left_out, opens)
                held, size, opens, separated = [], 0, True, True
                continue
            held.append(text)
            size += len(text)
            if size > 2 * PIECE_CHARS:
                *pieces, rest = cut_text("".join(held))
                held, size = [rest], len(rest)
                for piece in pieces:
                    yield TextPiece(piece, opens, raw.tell())
                    opens = False
        if held:
            yield from pieces_of("".join(held), raw.tell(), left_out, opens)


def _jsonl(path: Path, field: str, left_out: LeftOut) -> Iterator[TextPiece]:
    with _lines(path) as (lines, raw):
        offset = 0
        for number, line in lines:
            text = None if line.isspace() else left_out.text(_json_text, path, number, offset, line, field)
            offset += len(line)
            if text is not None:
                yield from pieces_of(text, raw.tell(), left_out)


def _json_text(path: Path, number: int, offset: int, raw: bytes, field: str) -> str:
    line, where = _decoded(path, number, offset, raw), f"{path}, line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}): {line[:60]!r}. Each line must be one JSON object.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a JSON {type(row).__name__}, not an object with a field {field!r}.")
    text = text_of(row, field, where)
    # JSON can spell half a surrogate pair ("\ud83d"), which no UTF-8 can hold.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if "\\u" in line else text


def _parquet(path: Path, field: str, left_out: LeftOut) -> Iterator[TextPiece]:
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
                    text = left_out.text(text_of, row, field, f"{path}, row {number}")
                    if text is not None:
                        yield from pieces_of(text, size * number / rows, left_out)
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
