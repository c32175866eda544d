"""From a name or a path to tokens: `open_tokens`, and the split into training and validation."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon.data import tokenfile
from gnomon.data.corpus import jargon
from gnomon.data.mixture import Mixture, mix, parse_mixture
from gnomon.data.plain_text import read_text
from gnomon.data.tokenizers import Tokenizer
from gnomon.data.tokenizers import tokenizer as open_tokenizer
from gnomon.data.tokens import Joined, Tokens, mean_bytes
from gnomon.errors import UserError, suggest

# Files up to this size are verified whole when opened (about 0.1 s); larger ones by `Tokens.check()`.
_VERIFY_BYTES = 1 << 26

_TEXT_SUFFIXES = (".txt", ".txt.gz")

# val_000000.bin, fineweb_val_000000.bin, val.bin, test.bin; not interval.bin
_PART = re.compile(r"(?:^|[_.-])(?P<part>val(?:id(?:ation)?)?|test)(?:[_.-]|$)")

Location = str | os.PathLike[str]


def open_tokens(source: Location | Sequence[Location], *, tokenizer: str | Tokenizer | None = None) -> Tokens | Mixture:
    """Open tokens by name or path.

    Args:
        source: `"jargon"` (the embedded corpus); a token file; a glob or a list of token files, read as one
            in that order; a folder, of which the training shards are read (all `*.bin`, less those called
            "val" or "test" if there are others); a text (`.txt`, `.txt.gz`), tokenised in memory; or several
            of these with weights, "0.7*a + 0.3*b" (see `mixture`).
        tokenizer: for a text, which tokenizer (default `"byte"`); for token files, the one they must be made
            with (default: whichever it was).

    Raises:
        UserError: no such file, a damaged one, or another tokenizer than asked for.
    """
    if not isinstance(source, str | os.PathLike):
        return _from_files([Path(item) for item in source], tokenizer)
    if parts := _terms(source):
        return mix([_open_one(part, tokenizer) for _, part in parts], [weight for weight, _ in parts])
    return _open_one(source, tokenizer)


def _open_one(source: Location, tokenizer: str | Tokenizer | None) -> Tokens:
    if source == "jargon":
        return _from_text(jargon(), "jargon", tokenizer)
    path = Path(source)
    if path.name.endswith(_TEXT_SUFFIXES) and path.exists() and not path.is_dir():
        return _from_text(read_text(path), str(path), tokenizer)
    if path.is_dir():
        return _from_files(_shards(path)["train"], tokenizer, name=str(path))
    if glob.has_magic(str(source)) and not path.exists():
        found = sorted(map(Path, glob.glob(str(source), recursive=True)))
        if not found:
            raise UserError(f"no file matches {str(source)!r}")
        return _from_files(found, tokenizer, name=str(source))
    return _from_files([path], tokenizer)


def split(tokens: Tokens | Mixture, fraction: float) -> tuple[Any, Any]:
    """(training, validation): the validation part is the last `fraction` of the tokens; in a mixture, of each source.

    Raises:
        UserError: a fraction outside (0, 1), or a part would be empty.
    """
    if not 0 < fraction < 1:
        raise UserError(f"the validation fraction must be between 0 and 1, not {fraction}")
    if isinstance(tokens, Mixture):
        pairs = [split(source, fraction) for source in tokens.sources]
        train, val = (replace(tokens, sources=side) for side in zip(*pairs))
        return train, val
    cut = len(tokens) - round(len(tokens) * fraction)
    if not 0 < cut < len(tokens):
        raise UserError(f"{tokens.name} has {len(tokens)} tokens: too few to hold out a fraction of {fraction}")
    return tokens.part(0, cut), tokens.part(cut, len(tokens))


def open_train_val(
    source: Location | Sequence[Location],
    val: Location | Sequence[Location] | None = None,
    *,
    fraction: float = 0.1,
    tokenizer: str | Tokenizer | None = None,
) -> tuple[Any, Any]:
    """(training, validation) tokens of `source`: validation is `val`, if given; else a folder's own validation shards
    (`*val*.bin`) where it has them, else the last `fraction` of everything; of a mixture, a mixture of each. Arguments
    and errors as in `open_tokens` and `split`, and the two must be of one tokenizer."""
    if val is not None:
        ours, theirs = (open_tokens(each, tokenizer=tokenizer) for each in (source, val))
        if None not in (ours.tokenizer, theirs.tokenizer) and ours.made_with != theirs.made_with:
            raise UserError(
                f"{ours.name} was made with tokenizer {ours.tokenizer!r}, the validation tokens {theirs.name} with "
                f"{theirs.tokenizer!r}: their losses have nothing in common. Prepare one of them again."
            )
        return ours, theirs
    if isinstance(source, str) and (parts := _terms(source)):
        pairs = [open_train_val(part, fraction=fraction, tokenizer=tokenizer) for _, part in parts]
        ours, theirs = (mix(list(side), [weight for weight, _ in parts]) for side in zip(*pairs))
        return ours, theirs
    if isinstance(source, str | os.PathLike) and source != "jargon" and Path(source).is_dir():
        shards = _shards(Path(source))
        if shards["val"] and not set(shards["val"]) & set(shards["train"]):
            ours = _from_files(shards["train"], tokenizer, name=str(source))
            return ours, _from_files(shards["val"], tokenizer, name=f"{source} (validation)")
    return split(open_tokens(source, tokenizer=tokenizer), fraction)


def _terms(source: Location) -> list[tuple[float, str]]:
    return parse_mixture(source) if isinstance(source, str) and not Path(source).exists() else []


def _shards(folder: Path) -> dict[str, list[Path]]:
    files = sorted(folder.glob("*.bin"))
    if not files:
        texts = [path.name for path in sorted(folder.iterdir()) if not path.name.startswith(".")][:3]
        raise UserError(
            f"the folder {folder} holds no token files (*.bin)"
            + (f", only {', '.join(texts)}…" if texts else "; it is empty")
            + f". Make some: gnomon data {folder} OUT"
        )
    part = {path: _PART.search(path.stem) for path in files}
    train = [path for path in files if not part[path]]
    val = [path for path in files if (found := part[path]) and found["part"].startswith("val")]
    return {"train": train or files, "val": val}


def _from_text(text: str, name: str, tokenizer: str | Tokenizer | None) -> Tokens:
    tokenizer = open_tokenizer(tokenizer or "byte")
    ids = tokenizer.encode(text)
    if not len(ids):
        raise UserError(f"{name} is empty: there is no text in it")
    ids.flags.writeable = False
    bytes_per_token = len(text.encode()) / len(ids)
    return Tokens(ids, name, tokenizer.vocab_size, tokenizer.name, tokenizer.fingerprint, bytes_per_token)


def _from_files(paths: list[Path], tokenizer: str | Tokenizer | None, name: str | None = None) -> Tokens:
    if not paths:
        raise UserError("an empty list of token files was given")
    for path in paths:
        if not path.exists():
            raise UserError(_missing(path))
        if path.name.endswith(_TEXT_SUFFIXES):
            raise UserError(f"{path} is a text; a list holds token files (*.bin). Prepare it: gnomon data {path} OUT")
    files = [tokenfile.read(path) for path in paths]
    first = files[0]
    for file in files[1:]:
        if file.made_with != first.made_with:
            raise UserError(
                f"{first.path} was made with tokenizer {first.tokenizer!r}, {file.path} with "
                f"{file.tokenizer!r}: they cannot be read as one."
            )
    vocab_size, recorded, vocabulary = first.vocab_size, first.tokenizer, first.vocabulary
    if tokenizer is not None:
        wanted = open_tokenizer(tokenizer)
        known = (first.vocabulary or wanted.fingerprint, vocab_size or wanted.vocab_size)
        if known != (wanted.fingerprint, wanted.vocab_size):
            raise UserError(
                f"{first.path} was made with tokenizer {recorded!r} ({vocab_size} ids), not {wanted.name!r} "
                f"({wanted.vocab_size}). Leave the tokenizer out to take that one (in a recipe: data.tokenizer=null), or "
                f"prepare the text again: gnomon data TEXT OUT --tokenizer {wanted.name}"
            )
        vocab_size, recorded, vocabulary = wanted.vocab_size, wanted.name, wanted.fingerprint
        files = [replace(file, vocab_size=vocab_size) for file in files]
    for file in files:
        if file.array.nbytes <= _VERIFY_BYTES:
            file.check()
    array = first.array if len(files) == 1 else Joined([file.array for file in files])
    bytes_per_token = mean_bytes([(len(file.array), file.bytes_per_token) for file in files])
    return Tokens(array, name or str(paths[0]), vocab_size, recorded, vocabulary, bytes_per_token, tuple(files))


def _missing(path: Path) -> str:
    folder = path.parent
    near = [item.name for item in folder.iterdir()] if folder.is_dir() else []
    hint = f" {suggest(path.name, ['jargon', *near])}" if len(near) < 50 else ""
    return f"there is no file or folder {path}.{hint} The embedded corpus is called 'jargon'."
