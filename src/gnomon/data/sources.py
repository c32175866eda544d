"""What a source of text is: the same stream of pieces at every reading.

A *document* is one row of a data set, or the text between two separators of a text file. A long document comes in several
*pieces*. Because the stream never changes, resuming means to read it again and skip what was written.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gnomon.errors import UserError

# Length of a piece in characters: small enough to spread over threads, large enough not to matter.
PIECE_CHARS = 1 << 16

# A blank between two characters that are not. GPT-2's word pattern begins a word at every such blank, so the ids of the
# pieces are the ids of the whole.
_CUT = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True)
class TextPiece:
    """A stretch of text.

    Attributes:
        text: at most 2 · PIECE_CHARS characters, never empty.
        opens: it begins a document.
        position: how far its source is read after it, in the source's unit.
    """

    text: str
    opens: bool
    position: float


@dataclass
class LeftOut:
    """What one reading of some rows did not give, counted so that nothing vanishes without a word.

    Attributes:
        skip_bad: leave rows without a text out; else the first ends the job.
        empty: documents without a character.
        bad: rows without a text; `first_bad` tells the first.
    """

    skip_bad: bool
    empty: int = 0
    bad: int = 0
    first_bad: str = ""

    def text(self, read: Callable[..., str], *row: Any) -> str | None:
        """What `read(*row)` gives; None for a bad row, of which `read` raises a `UserError`, if such are skipped."""
        try:
            return read(*row)
        except UserError as error:
            if not self.skip_bad:
                raise UserError(f"{error} (--skip-bad leaves such rows out and counts them.)") from error
            self.bad += 1
            self.first_bad = self.first_bad or str(error)
            return None


class Source(abc.ABC):
    """Where text comes from.

    Attributes:
        name: for messages and the sidecar.
        identity: JSON-able; two sources with the same identity give the same pieces.
        unit: of the amount read, for the progress.
        tokens: about how many GPT-2 tokens of English it holds.
        left_out: what the last reading of each set of rows did not give.
    """

    name: str
    identity: dict[str, Any]
    unit: str
    tokens: float
    left_out: dict[str, LeftOut]

    @abc.abstractmethod
    def total(self, part: str) -> float | None:
        """The amount to read for a part; None when unknown."""

    @abc.abstractmethod
    def pieces(self, part: str) -> Iterator[TextPiece]:
        """The pieces of the part "val" or "train"."""


def pieces_of(text: str, position: float, left_out: LeftOut, opens: bool = True) -> Iterator[TextPiece]:
    """A whole document (or, if not `opens`, the rest of one) as pieces; none if it is empty."""
    left_out.empty += opens and not text
    for piece in cut_text(text) if text else ():
        yield TextPiece(piece, opens, position)
        opens = False


def cut_text(text: str) -> Iterator[str]:
    """`text` in pieces of PIECE_CHARS to 2 · PIECE_CHARS characters, cut between words if there is a blank to cut at."""
    while len(text) > 2 * PIECE_CHARS:
        found = _CUT.search(text, PIECE_CHARS, 2 * PIECE_CHARS)
        at = found.start() if found else 2 * PIECE_CHARS
        yield text[:at]
        text = text[at:]
    yield text


def text_of(row: dict[str, Any], field: str, where: str) -> str:
    """The text of a row; UserError if it has none."""
    if field not in row:
        raise UserError(f"{where}: there is no field {field!r}. Its fields: {', '.join(row)}. Name one with --field.")
    if not isinstance(row[field], str):
        raise UserError(f"{where}: the field {field!r} holds {repr(row[field])[:60]}, not a text.")
    return row[field]
