"""Errors a user can mend.

A `UserError` says what was given, what was expected and how to mend it. The command line prints its
message without a traceback and exits 2, and does the same with what the system refuses (`refused`); any other exception is
a bug of ours and is shown in full.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can mend: a wrong name, file or value. The message carries the fix.

    Attributes:
        told_by: of several processes that meet it, which tell it: "host", one on each computer; "main", the first of all, since
            every one meets it; "all", since it may be the only one.
    """

    told_by: str = "host"

    def of(self, told_by: str) -> UserError:
        """Itself, to be told by others."""
        self.told_by = told_by
        return self

    @property
    def is_told_here(self) -> bool:
        """Whether this process is to tell it; torchrun numbers processes."""
        number = {"host": "LOCAL_RANK", "main": "RANK"}.get(self.told_by, "")
        return os.environ.get(number, "0") == "0"


class MissingExtra(UserError):
    """A package of one of gnomon's extras is not installed; the message says how to install it."""


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


_REMEDIES = {
    errno.EACCES: "See who may read and write it: ls -ld",
    errno.EPERM: "See who may read and write it: ls -ld",
    errno.EROFS: "Choose a place that can be written to.",
    errno.ENOSPC: "Free some space, or choose another place.",
    errno.EDQUOT: "Free some space, or choose another place.",
    errno.EFBIG: "The system limits the size of a file (ulimit -f).",
    errno.EISDIR: "Give a file.",
    errno.ENOTDIR: "Give a folder.",
    errno.EEXIST: "Choose another name.",
}


def refused(error: OSError) -> UserError | None:
    """What the system would not do to a file (no permission, a full disk), in one line; None if it is about something else."""
    if error.filename is None and error.errno not in _REMEDIES:
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    return UserError(f"{where}{error.strerror}. {_REMEDIES.get(error.errno or 0, '')}".rstrip())


# Control characters except the line break and the tab, halves of surrogate pairs, and marks that change the order of what follows.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_OVERLONG = re.compile(r"\S{500,}"), re.compile(r".{5000,}")


def printable(text: str) -> str:
    """Text with names from elsewhere in it, safe on a terminal: escape codes are spelled out, overlong words shortened."""
    for overlong in _OVERLONG:
        text = overlong.sub(lambda found: f"{found[0][:200]}…{found[0][-50:]} ({len(found[0]):,} characters)", text)
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
