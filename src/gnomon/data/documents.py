"""Rows that respect documents: none holds two, so that nothing is predicted from another document.

A document goes from its end-of-text id (which stands before it) to the next one, and is cut into rows of `context` tokens
from its own beginning. The last row of a document is shorter; what is left of it carries no loss. The target of a
document's last token is the next end-of-text id: a model must learn where texts end.
"""

from __future__ import annotations

import functools

import numpy as np

from gnomon.data.tokens import Joined, Tokens
from gnomon.errors import UserError

# Ids searched at once: a file larger than memory stays on disk.
_STRETCH = 1 << 24


class DocumentRows:
    """The rows of a row of tokens.

    Attributes:
        rows: how many there are.
        tokens: how many targets they have together.

    Raises:
        UserError: no end-of-text id in the tokens, or no tokenizer known that could tell which id it is.
    """

    def __init__(self, tokens: Tokens, context: int):
        self.end_of_text: int = tokens.open_tokenizer().end_of_text
        starts_D = _positions_of(tokens.array, self.end_of_text)
        if not len(starts_D):
            raise UserError(
                f"{tokens.name} has no end-of-text id ({self.end_of_text}): it is one document. "
                'Leave data.boundaries at "ignore", or prepare the text with `gnomon data`.'
            )
        if starts_D[0]:
            starts_D = np.concatenate([[0], starts_D])
        # The last token of all has no target.
        length_D = np.diff(starts_D, append=len(tokens) - 1)
        self._context, self._starts_D, self._length_D = context, starts_D, length_D
        self._first_row_D = np.concatenate([[0], np.cumsum(-(-length_D // context))])
        self.rows: int = int(self._first_row_D[-1])
        self.tokens: int = int(length_D.sum())

    def row(self, rows_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first token, number of targets) of rows, both (B,)."""
        document_B = np.searchsorted(self._first_row_D, rows_B, side="right") - 1
        offset_B = (rows_B - self._first_row_D[document_B]) * self._context
        return self._starts_D[document_B] + offset_B, np.minimum(self._length_D[document_B] - offset_B, self._context)


def _positions_of(array: np.ndarray | Joined, id: int) -> np.ndarray:
    found = [
        np.flatnonzero(np.asarray(array[start : start + _STRETCH]) == id) + start
        for start in range(0, len(array), _STRETCH)
    ]
    return np.concatenate(found)


@functools.lru_cache(maxsize=16)
def document_rows(tokens: Tokens, context: int) -> DocumentRows:
    """The rows of `tokens`; the search for end-of-text ids reads them once and is remembered."""
    return DocumentRows(tokens, context)
