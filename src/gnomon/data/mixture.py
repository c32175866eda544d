"""Several sources in one run, each with its share of the rows: `0.7*out/novels + 0.3*out/code`.

The samples of a run come in blocks of 1000. In each block source k has the same whole number of rows, spread at random;
so which source sample g comes from, and how many that source has given before, are functions of (seed, g) alone. Each
source then goes through epochs of its own, as it would alone.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np

from gnomon.data.tokenizers import Tokenizer
from gnomon.data.tokens import Tokens, mean_bytes
from gnomon.errors import UserError

BLOCK = 1000

# The weight comes first, so that a glob (shards/*.bin) can follow. A + within a name joins nothing, if no weight follows.
_WEIGHT = r"(?:\d+(?:\.\d*)?|\.\d+)\s*\*"
_PLUS = re.compile(rf"\s+\+\s+|\s*\+\s*(?={_WEIGHT})")
_TERM = re.compile(rf"\s*(?P<weight>{_WEIGHT})\s*(?P<source>\S.*?)\s*")


@dataclass(frozen=True)
class Mixture:
    """Sources with their shares.

    Attributes:
        sources: what is mixed; all of one tokenizer.
        counts: rows of each source in a block of `BLOCK`; they add up to it.
    """

    sources: tuple[Tokens, ...]
    counts: tuple[int, ...]

    @property
    def name(self) -> str:
        return " + ".join(f"{count / BLOCK:g}*{source.name}" for count, source in zip(self.counts, self.sources))

    @property
    def vocab_size(self) -> int | None:
        return self.sources[0].vocab_size

    @property
    def tokenizer(self) -> str | None:
        return self.sources[0].tokenizer

    @property
    def vocabulary(self) -> str | None:
        return self.sources[0].vocabulary

    def open_tokenizer(self) -> Tokenizer:
        """See `Tokens.open_tokenizer`."""
        return self.sources[0].open_tokenizer()

    @property
    def made_with(self) -> tuple[str | None, int | None]:
        return self.sources[0].made_with

    @property
    def bytes_per_token(self) -> float | None:
        """Of a batch, in which each source has its share of the tokens; None if that of one is not known."""
        return mean_bytes([(count, source.bytes_per_token) for count, source in zip(self.counts, self.sources)])

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def check(self) -> None:
        """Read every file whole and compare it with its sidecar; UserError naming the damaged one."""
        for source in self.sources:
            source.check()

    def deal(self, samples_B: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, index) of each sample, both (B,) int64: the sample is number `index` of what its source gives."""
        source_B, index_B = np.empty_like(samples_B), np.empty_like(samples_B)
        for block in np.unique(samples_B // BLOCK).tolist():
            here = samples_B // BLOCK == block
            source_N, before_N = _block(seed, block, self.counts)
            at = samples_B[here] - block * BLOCK
            source_B[here] = source_N[at]
            index_B[here] = block * np.array(self.counts)[source_N[at]] + before_N[at]
        return source_B, index_B


def mix(sources: list[Tokens], weights: list[float]) -> Mixture:
    """Sources in the ratio of `weights`, rounded to a thousandth of the rows.

    Raises:
        UserError: a weight is not positive or its share rounds to nothing, or the tokenizers differ.
    """
    if not sources or len(sources) != len(weights) or not all(0 < weight < float("inf") for weight in weights):
        raise UserError(
            f"a mixture needs one positive weight for each source, got {weights} for {len(sources)} sources"
        )
    first = sources[0]
    for other in sources[1:]:
        if other.made_with != first.made_with:
            raise UserError(
                f"{first.name} was made with tokenizer {first.tokenizer!r}, {other.name} with {other.tokenizer!r}: "
                "they cannot be mixed. Prepare one of them again."
            )
    shares = np.array(weights) / sum(weights) * BLOCK
    counts = np.floor(shares).astype(int)
    # What rounding down has left goes to the largest remainders.
    counts[np.argsort(counts - shares, kind="stable")[: BLOCK - counts.sum()]] += 1
    for source, count in zip(sources, counts.tolist()):
        if not count:
            raise UserError(f"the share of {source.name} rounds to 0 of {BLOCK} rows; leave it out or give it more")
    return Mixture(tuple(sources), tuple(counts.tolist()))


def parse_mixture(source: str) -> list[tuple[float, str]]:
    """(weight, source) of each term of "0.7*a + 0.3*b"; empty if it is no mixture."""
    found = [_TERM.fullmatch(term) for term in _PLUS.split(source)]
    if not all(found):
        if any(found):
            raise UserError(
                f"{source!r} is half a mixture: each term is WEIGHT*SOURCE, as in '0.7*out/novels + 0.3*out/code'"
            )
        return []
    return [(float(match["weight"].rstrip("* ")), match["source"]) for match in found if match]


@functools.lru_cache(maxsize=8)
def _block(seed: int, block: int, counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(source, how many of that source come before) of the samples of a block, each (BLOCK,)."""
    key = np.array([seed, block], np.uint64)
    # The upper half of the counter keeps this stream apart from those of the epochs (`batches`).
    raw = np.random.Philox(key=key, counter=1 << 255).random_raw(BLOCK)
    source_N = np.repeat(np.arange(len(counts)), counts)[np.argsort(raw, kind="stable")]
    before_N = np.empty(BLOCK, np.int64)
    for k, count in enumerate(counts):
        before_N[source_N == k] = np.arange(count)
    return source_N, before_N
