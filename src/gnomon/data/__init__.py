"""From text to the batches of a training run: corpora, tokenizers, token files, the order of batches.

>>> from gnomon import data
>>> train, val = data.split(data.open_tokens("jargon", tokenizer="byte"), 0.05)
>>> x_BT, y_BT = data.batch(train, seed=0, step=7, batch=16, context=128)
"""

from __future__ import annotations

# Nothing here imports torch, tokenizers, datasets or pyarrow; they are imported when first needed.
from gnomon.data.batches import NO_TARGET, batch, chunks_per_epoch, entropy, frequencies, slices
from gnomon.data.corpus import CITATION, jargon
from gnomon.data.mixture import Mixture, mix
from gnomon.data.mnist import mnist
from gnomon.data.opening import open_tokens, open_train_val, split
from gnomon.data.prepare import prepare
from gnomon.data.tokenizers import Tokenizer, tokenizer, train_bpe
from gnomon.data.tokens import Tokens
from gnomon.data.tokenwriter import TokenWriter

__all__ = [
    "CITATION",
    "Mixture",
    "NO_TARGET",
    "TokenWriter",
    "Tokenizer",
    "Tokens",
    "batch",
    "chunks_per_epoch",
    "entropy",
    "frequencies",
    "jargon",
    "mix",
    "mnist",
    "open_tokens",
    "prepare",
    "slices",
    "split",
    "tokenizer",
    "train_bpe",
    "open_train_val",
]
