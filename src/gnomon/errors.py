"""Errors a user can mend.

A `UserError` says what was given, what was expected and how to mend it. The command line prints its
message without a traceback and exits 2; any other exception is a bug of ours and is shown in full.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can mend: a wrong name, file or value. The message carries the fix."""


def suggest(given: str, options: Iterable[str]) -> str:
    """A sentence naming the nearest valid names: `Did you mean 'sphere'?` or the whole (short) list."""
    options = sorted(options)
    lower = {option.lower(): option for option in options}
    near = [lower[m] for m in difflib.get_close_matches(given.lower(), lower, n=3, cutoff=0.6)]
    if near:
        return "Did you mean " + " or ".join(repr(name) for name in near) + "?"
    return "Known: " + ", ".join(options) + "."


def check_name(kind: str, given: str, options: Iterable[str]) -> str:
    """Return `given` if it is one of `options`; otherwise raise a `UserError` with a suggestion."""
    options = list(options)
    if given not in options:
        raise UserError(f"unknown {kind} {given!r}. {suggest(given, options)}")
    return given
