"""Text to token files: `gnomon data SOURCE OUT`."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gnomon.data.conversion import STATE, Conversion, PartState, portable_name
from gnomon.data.hub_source import HUB, HubSource
from gnomon.data.local_source import LocalFiles, counted, find
from gnomon.data.sources import Source
from gnomon.data.tokenfile import MAX_TOKENS
from gnomon.data.tokenizers import Tokenizer
from gnomon.data.tokenizers import tokenizer as open_tokenizer
from gnomon.errors import UserError
from gnomon.progress import quantity, tell


def prepare(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    tokenizer: str | Tokenizer = "gpt2",
    field: str = "text",
    val_fraction: float = 0.01,
    shard_tokens: int = 100_000_000,
    limit: int | None = None,
    workers: int = 1,
    skip_bad: bool = False,
) -> list[Path]:
    """Tokenise `source` into `out/val_000000.bin, …` and `out/train_000001.bin, …`.

    Each document is preceded by the tokenizer's end_of_text, as in the shards of llm.c and modded-nanogpt.
    The call can be repeated after any interruption: finished shards are kept, and the files come out the
    same, whatever the number of workers.

    Args:
        source: .txt, .jsonl or .parquet files, each also .gz (one, several, a folder, a glob), or a set of
            the hub: "openwebtext", "fineweb-edu" (sample-10BT), "wikitext-103". In a .txt a line `<|endoftext|>`
            separates documents. Other files of a folder are counted, not read.
        out: folder for the shards, their sidecars and `prepare.json`.
        tokenizer: see `gnomon.data.tokenizer`; a tokenizer.json is copied into `out`.
        field: the field of a .jsonl, .parquet or hub row that holds the text.
        val_fraction: share of the documents held out for validation, in [0, 0.5]. From local files every
            (1/val_fraction)-th document, so a source with fewer has no validation shard (`open_train_val` then
            holds out the tail); from the hub the first documents, or the set's own validation split.
        shard_tokens: tokens per file; the last one of a part is shorter.
        limit: at most this many tokens in all.
        workers: processes that tokenise. One uses all cores through the threads of the tokenizers library (or as many as
            RAYON_NUM_THREADS says), which is enough for a few cores; with many, or with the tokenizer "byte", processes
            are faster. From a script of your own, call under `if __name__ == "__main__":`, as they import it again.
        skip_bad: leave out rows without a text (null, no field, not JSON, not UTF-8) and count them; else the first ends
            the job.

    Returns:
        the paths of all shards, validation first.

    Raises:
        UserError: nothing to read, text that is not UTF-8, a bad line, a missing field (naming file and
            place), a full disk, or an `out` that was begun with other settings (naming the difference).
    """
    if not 0 <= val_fraction <= 0.5:
        raise UserError(f"val_fraction is a share of the documents, from 0 to 0.5, not {val_fraction}")
    if not 1 <= shard_tokens <= MAX_TOKENS:
        raise UserError(f"shard_tokens must be from 1 to {MAX_TOKENS:,}, not {shard_tokens:,}")
    if limit is not None and limit < 1:
        raise UserError(f"limit is a number of tokens, at least 1, not {limit}")
    if workers < 1:
        raise UserError(f"workers is a number of processes, at least 1, not {workers}")
    opened = open_tokenizer(tokenizer)
    text, others = _source(source, field, val_fraction, limit, skip_bad)
    settings = {
        "source": text.identity,
        "tokenizer": [portable_name(opened), opened.fingerprint],
        "field": field,
        "val_fraction": val_fraction,
        "shard_tokens": shard_tokens,
        "limit": limit,
        "skip_bad": skip_bad or None,
    }
    job = Conversion(Path(out), text, opened, shard_tokens, workers)
    if job.begin(settings):
        tell(_size_estimate(text, opened, shard_tokens, limit, job.out))
    val = job.run("val", None if limit is None else round(limit * val_fraction))
    train = job.run("train", None if limit is None else limit - val.tokens)
    left_out = _left_out(text, others)
    if not train.shards:
        raise UserError(f"{text.name} holds no text: nothing was written but {job.out / STATE}. {left_out}".rstrip())
    if left_out:
        tell(left_out)
    tell(_summary(job.out, val, train))
    return [job.out / name for name in [*val.shards, *train.shards]]


def _source(source: Any, field: str, val_fraction: float, limit: int | None, skip_bad: bool) -> tuple[Source, Counter]:
    """The source, and the files of other kinds that lie there."""
    if isinstance(source, str) and source in HUB and not Path(source).exists():
        return HubSource(source, field, val_fraction, limit, skip_bad), Counter()
    try:
        paths, others = find(source)
    except UserError as error:
        if isinstance(source, str) and not Path(source).exists():
            raise UserError(f"{error} Sets of the hub: {', '.join(HUB)}.") from error
        raise
    return LocalFiles(paths, field, val_fraction, skip_bad), others


def _left_out(source: Source, others: Counter[str]) -> str:
    """What of the source is in no shard, in a line; empty if nothing is."""
    counts = source.left_out.values()
    empty, bad = sum(each.empty for each in counts), sum(each.bad for each in counts)
    first = next((each.first_bad for each in counts if each.bad), "")
    parts = [
        f"{empty:,} empty documents" if empty else "",
        f"{bad:,} bad rows (the first: {first})" if bad else "",
        f"{others.total():,} files of other kinds ({counted(others)})" if others else "",
    ]
    return "left out: " + "; ".join(filter(None, parts)) if any(parts) else ""


def _size_estimate(source: Source, tokenizer: Tokenizer, shard_tokens: int, limit: int | None, out: Path) -> str:
    # Source.tokens counts GPT-2 tokens, 4.3 bytes each; no other tokenizer of words is far from that.
    tokens = min(limit or math.inf, source.tokens * (4.3 if tokenizer.vocab_size == 257 else 1.0))
    size, free = tokens * tokenizer.dtype.itemsize, shutil.disk_usage(out).free
    shards = math.ceil(tokens / shard_tokens)
    text = f"{source.name}: about {quantity(tokens)} tokens, {quantity(size, 'B')} in {shards} shards of {out}"
    return text + f" ({quantity(free, 'B')} free" + (", which may not be enough)" if size > free else ")")


def _summary(out: Path, val: PartState, train: PartState) -> str:
    text = f"{out}: {train.tokens:,} training tokens in {len(train.shards)} shards, "
    if val.shards:
        return text + f"{val.tokens:,} validation tokens in {len(val.shards)}"
    return text + "no validation shard (no document was held out; the tail can be: gnomon.data.open_train_val)"
