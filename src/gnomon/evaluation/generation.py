"""Continuing a prompt with a trained model.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gnomon.errors import UserError
from gnomon.models.transformer import Cache, Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    tokenizer: Any,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[str]:
    """Yield the prompt, then pieces of text as they are drawn; the pieces joined are the continuation.

    When the context is full, the older half is dropped and the rest read again.

    Args:
        temperature: 0 takes the likeliest token every time.
        top_k: draw from this many likeliest tokens; 0 for all.

    Raises:
        UserError: the prompt is empty, or an option is out of range.
    """
    if temperature < 0 or top_k < 0 or tokens < 0:
        raise UserError("temperature, top_k and tokens must not be negative")
    ids = [int(i) for i in tokenizer.encode(prompt)]
    if not ids:
        raise UserError("the prompt is empty; give at least one character, e.g. --prompt 'The'")
    device = model.embed.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    context, cache, fresh = model.config.context, Cache(), ids[-model.config.context :]
    yield prompt
    text = _Unfinished(tokenizer)
    for _ in range(tokens):
        if cache.get_seq_length() + len(fresh) > context:
            cache, fresh = Cache(), ids[-(context // 2) :]
        ids.append(_draw(_next_logits(model, fresh, cache, device), temperature, top_k, generator))
        fresh = ids[-1:]
        if ids[-1] == tokenizer.end_of_text:
            break
        yield text.add(ids[-1])
    yield text.flush()


def _next_logits(model: Transformer, fresh: list[int], cache: Cache, device: torch.device) -> Tensor:
    return model(torch.tensor([fresh], device=device), cache)[0, -1].float()


def _draw(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k:
        floor = logits_V.topk(min(top_k, len(logits_V))).values[-1]
        logits_V = logits_V.masked_fill(logits_V < floor, float("-inf"))
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))


class _Unfinished:
    """Text of one token after another. A token may end inside a UTF-8 character, which then waits for the next ones."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.ids = tokenizer, []

    def add(self, token: int) -> str:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        # A character has at most four bytes, so after that many tokens U+FFFD is no unfinished one.
        return "" if text.endswith("\ufffd") and len(self.ids) < 4 else self.flush()

    def flush(self) -> str:
        text, self.ids = self.tokenizer.decode(self.ids), []
        return text
