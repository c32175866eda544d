"""Text files: UTF-8, also gzip-compressed, and what is said of those that are not."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from gnomon.errors import UserError
from gnomon.files import check_readable


def read_bytes(path: Path) -> bytes:
    """The whole content of a file, decompressed if it ends in .gz; UserError if it cannot be read."""
    raw = check_readable(path).read_bytes()
    try:
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(damaged_gzip(path, error)) from error


def read_text(path: Path) -> str:
    """The whole text of a UTF-8 file (without its byte order mark), decompressed if it ends in .gz; UserError if it is none."""
    raw = read_bytes(path)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(not_utf8(str(path), error.start, raw[error.start])) from error


def damaged_gzip(path: Path, error: Exception) -> str:
    return f"{path} is a damaged gzip file: {error}. Copy it again."


def not_utf8(name: str, offset: int, byte: int) -> str:
    hint = "It looks like UTF-16. " if offset == 0 and byte in (0xFE, 0xFF) else ""
    return (
        f"{name} is not UTF-8: the byte 0x{byte:02x} at offset {offset:,} has no meaning there. {hint}"
        "Convert it first, for example with iconv -f latin1 -t utf-8."
    )
