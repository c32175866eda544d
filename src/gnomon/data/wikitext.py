"""WikiText-2 and WikiText-103 as perplexities are quoted on them: by article, with or without its tokenised spelling.

The sets come with blanks around punctuation ("rock , paper @-@ scissors") and, in their older form, with rare words as
<unk>. lm_eval's `wikitext` splits them into articles, undoes that spelling, and divides by the words there were before:
the number does not depend on the tokenizer. (The test and validation articles of WikiText-2 and WikiText-103 are the
same; only what is <unk> differs.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from gnomon.data.hub import load_rows
from gnomon.data.plain_text import read_text
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
        rows = load_rows("Salesforce/wikitext", HUB_SETS[str(source)], split=split)
        # A row is a line; empty lines come without the blank and the line break that they have in the file.
        text = "".join(row["text"] or " \n" for row in rows)
    elif Path(source).is_file():
        text = read_text(Path(source))
    else:
        raise UserError(f"there is no file {source}. {suggest(str(source), HUB_SETS)} Those come from the hub.")
    found = ["\n".join(lines) for lines in split_articles(text.split("\n"))]
    if len(found) < 2 and not _is_title(next((line for line in text.split("\n") if line.strip()), "")):
        raise UserError(f"{source} is not in WikiText's form: no line like ' = Title = ' begins an article")
    return found


def split_articles(lines: Iterable[str], *, after_blank: bool = False) -> Iterator[list[str]]:
    """The lines of each article, which begins with a line of the form ` = Title = `; a section has more of the signs.

    Args:
        after_blank: only after an empty line, as a formula ` = x = ` within a text may stand alone: gives the 60 articles
            that the authors count in WikiText-2's test set (arXiv 1609.07843). Without it, what lm_eval takes for articles.
    """
    article: list[str] = []
    blank = True
    for line in lines:
        if _is_title(line) and (blank or not after_blank):
            if any(each.strip() for each in article):
                yield article
            article = []
        blank = not line.strip()
        article.append(line)
    if article:
        yield article


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
