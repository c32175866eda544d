"""Text files: UTF-8, also gzip-compressed, and what is said of those that are not."""

from __future__ import annotations

import gzip
from pathlib import Path

from gnomon.errors import UserError


def read_text(path: Path) -> str:
    """The whole text of a UTF-8 file (without its byte order mark), decompressed if it ends in .gz; UserError if it is none."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(not_utf8(str(path), error.start, raw[error.start])) from error


def not_utf8(name: str, offset: int, byte: int) -> str:
    hint = "It looks like UTF-16. " if offset == 0 and byte in (0xFE, 0xFF) else ""
    return (
        f"{name} is not UTF-8: the byte 0x{byte:02x} at offset {offset:,} has no meaning there. {hint}"
        "Convert it first, for example with iconv -f latin1 -t utf-8."
    )
