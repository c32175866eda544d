"""WikiText-2 and WikiText-103 as perplexities are quoted on them: by article, with or without its tokenised spelling.

The sets come with blanks around punctuation ("rock , paper @-@ scissors") and, in their older form, with rare words as
<unk>. lm_eval's `wikitext` splits them into articles, undoes that spelling, and divides by the words there were before:
the number does not depend on the tokenizer. (The test and validation articles of WikiText-2 and WikiText-103 are the
same; only what is <unk> differs.)
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from gnomon.data.opening import not_utf8
from gnomon.errors import UserError, suggest

HUB_SETS = {"wikitext-2": "wikitext-2-raw-v1", "wikitext-103": "wikitext-103-raw-v1"}

# In this order; what lm_eval 0.4 does (its task "wikitext", version 2), without a pattern of its that matches nothing.
_STRINGS_BEFORE = (
    ("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."),
    (" : ", ": "), (" ; ", "; "), (" . ", ". "), (" ! ", "! "), (" ? ", "? "), (" , ", ", "),
)  # fmt: skip
_BRACKETS = (
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"), (r"\[\s*([^\]]*?)\s*\]", r"[\1]"), (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'"),
)  # fmt: skip
_STRINGS_AFTER = (
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°"),
    (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
)  # fmt: skip


def articles(source: str | Path, split: str = "test") -> list[str]:
    """The articles of a file in WikiText's form, or of "wikitext-2" or "wikitext-103" from the hub.

    Raises:
        UserError: no such file or set, no network, or a text without WikiText's headings.
    """
    if str(source) in HUB_SETS and not Path(source).exists():
        text = _from_hub(str(source), split)
    else:
        text = _from_file(Path(source))
    found = split_articles(text)
    if len(found) < 2 and not _is_title(next((line for line in text.split("\n") if line.strip()), "")):
        raise UserError(f"{source} is not in WikiText's form: no line like ' = Title = ' begins an article")
    return found


def split_articles(text: str) -> list[str]:
    """A new article begins with each line of the form ` = Title = `; a section has more of the signs."""
    found: list[str] = []
    lines: list[str] = []
    for line in text.split("\n"):
        if _is_title(line):
            if any(each.strip() for each in lines):
                found.append("\n".join(lines))
            lines = []
        lines.append(line)
    return [*found, "\n".join(lines)]


def _is_title(line: str) -> bool:
    line = line.replace("= = =", "===").replace("= =", "==").strip()
    return line.startswith("= ") and line.endswith(" =")


def detokenised(article: str) -> str:
    """The article as one would print it: "rock, paper-scissors"."""
    for old, new in _STRINGS_BEFORE:
        article = article.replace(old, new)
    for pattern, new in _BRACKETS:
        article = re.sub(pattern, new, article)
    for old, new in _STRINGS_AFTER:
        article = article.replace(old, new)
    return article


def words(article: str) -> int:
    """How many words lm_eval divides by: stretches between blanks, the empty ones at both ends included."""
    return len(re.split(r"\s+", article))


def _from_file(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"there is no file {path}. {suggest(str(path), HUB_SETS)} Those come from the hub.")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(not_utf8(str(path), error.start, raw[error.start])) from error


def _from_hub(name: str, split: str) -> str:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f'reading {name} needs datasets: pip install "gnomon[data]"') from error
    try:
        rows = datasets.load_dataset("Salesforce/wikitext", HUB_SETS[name], split=split)
    except Exception as error:  # of the network; there are dozens of types
        raise UserError(
            f"reading {name} from the hub failed: {type(error).__name__}: {error}. Without a network, give a file."
        ) from error
    # A row is a line; empty lines come without the blank and the line break that they have in the file.
    return "".join(text or " \n" for text in rows["text"])
