"""The embedded corpus: the Jargon File 4.4.7, so that everything runs without a network."""

from __future__ import annotations

import functools
import gzip
import hashlib
import zlib
from importlib import resources

from gnomon.errors import UserError

CITATION = "Jargon File 4.4.7 (29 December 2003), edited by Eric S. Raymond; public domain"

_BYTES = 1_448_700
_SHA256 = "04e2a31668b87521127f60b34f5e12577340e11aaff1e32b6f13b2e0834d9aac"


@functools.cache
def jargon() -> str:
    """The Jargon File 4.4.7 as one text: 1,448,700 bytes of UTF-8, 355,986 GPT-2 tokens.

    A compendium of hacker slang in the public domain; the maintainers ask for a citation with the version
    number (`CITATION`).
    """
    raw = packaged("jargon_file_4.4.7.txt.gz", size=_BYTES, sha256=_SHA256)
    return raw.decode("utf-8")


def packaged(name: str, *, size: int, sha256: str) -> bytes:
    """The decompressed bytes of a file inside this package, checked against their known size and hash."""
    compressed = resources.files("gnomon.data").joinpath(name).read_bytes()
    try:
        raw = gzip.decompress(compressed)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{_damaged(name)}: {error}") from error
    if len(raw) != size or hashlib.sha256(raw).hexdigest() != sha256:
        raise UserError(f"{_damaged(name)}: {len(raw):,} bytes instead of {size:,}, or another hash")
    return raw


def _damaged(name: str) -> str:
    return f"the installed gnomon is damaged (gnomon/data/{name}); install it again"
