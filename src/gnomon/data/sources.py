"""What a source of text is: the same stream of pieces at every reading.

A *document* is one row of a data set, or the text between two `<|endoftext|>` marks of a text file. A long
document comes in several *pieces*. Because the stream never changes, resuming means to read it again and
skip what was written.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Length of a piece in characters: small enough to spread over threads, large enough not to matter.
PIECE = 1 << 16

# A blank between two characters that are not. GPT-2's word pattern begins a word at every such blank, so the
# ids of the pieces are the ids of the whole.
_CUT = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True)
class Piece:
    """A stretch of text.

    Attributes:
        text: at most 2 · PIECE characters, never empty.
        opens: it begins a document.
        position: how far its source is read after it, in the source's unit.
    """

    text: str
    opens: bool
    position: float


class Source(abc.ABC):
    """Where text comes from.

    Attributes:
        name: for messages and the sidecar.
        identity: JSON-able; two sources with the same identity give the same pieces.
        unit: of the amount read, for the progress.
        tokens: about how many GPT-2 tokens of English it holds.
    """

    name: str
    identity: dict[str, Any]
    unit: str
    tokens: float

    @abc.abstractmethod
    def total(self, part: str) -> float | None:
        """The amount to read for a part; None when unknown."""

    @abc.abstractmethod
    def pieces(self, part: str) -> Iterator[Piece]:
        """The pieces of the part "val" or "train"."""


def document(text: str, position: float, opens: bool = True) -> Iterator[Piece]:
    """A whole document (or, if not `opens`, the rest of one) as pieces; none if it is empty."""
    for piece in cut(text) if text else ():
        yield Piece(piece, opens, position)
        opens = False


def cut(text: str) -> Iterator[str]:
    """`text` in pieces of PIECE to 2 · PIECE characters, cut where no word is cut (if there is such a
    place)."""
    while len(text) > 2 * PIECE:
        found = _CUT.search(text, PIECE, 2 * PIECE)
        at = found.start() if found else 2 * PIECE
        yield text[:at]
        text = text[at:]
    yield text
