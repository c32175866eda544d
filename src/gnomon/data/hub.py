"""Data sets of the Hugging Face hub, through the library `datasets` of the extra `data`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gnomon.errors import UserError


def load_rows(path: str, config: str | None = None, *, split: str, streaming: bool = False) -> Iterator[Any]:
    """The rows of a split, each a dict, in order.

    Args:
        path, config: the set's name on the hub and which of its versions.
        streaming: read it as it comes, in place of downloading it whole first.

    Raises:
        UserError: the extra is not installed, or reading fails (at any row, when streaming).
    """
    name = f"{path} {config or ''}".rstrip()
    try:
        import datasets
    except ImportError as error:
        raise UserError(f'reading {name} from the hub needs datasets: pip install "gnomon[data]"') from error
    try:
        yield from datasets.load_dataset(path, config, split=split, streaming=streaming)
    except Exception as error:  # of the network; there are dozens of types
        kept = "Finished shards are kept: run the same command again to continue. " if streaming else ""
        raise UserError(
            f"reading {name} from the hub failed: {type(error).__name__}: {error}. {kept}"
            "Without a network, give local files."
        ) from error
