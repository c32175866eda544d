"""What ends a command of ours, and with which exit code.

Exit 0: done. Exit 2: something the user can mend, told in one message. Exit 130: interrupted. Exit 141: nobody reads on (a pipe
was closed). Anything else is our bug.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from gnomon.errors import UserError, printable, refused


def exit_code(command: Callable[[], object]) -> int:
    """Run `command`; what the user can mend is told on stderr."""
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, OSError) as error:
        told = refused(error) if isinstance(error, OSError) else error
        if told is None:
            raise
        if told.is_told_here:
            print(printable(f"gnomon: {told}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def end(main: Callable[..., Any], module: str) -> NoReturn:
    """What `python -m MODULE` does: the words behind it are the arguments of `main`, whose docstring is its `--help`."""
    import tyro

    sys.exit(exit_code(lambda: tyro.cli(main, prog=f"python -m {module}")))
