"""How likely a model finds given tokens, and what it says after given tokens; many requests at once.

Every evaluation goes through `loglikelihoods`: answers of a multiple-choice task, and whole documents for perplexity.

Legend: B rows, T tokens, N scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from gnomon.errors import UserError
from gnomon.models.transformer import Cache, Transformer
from gnomon.progress import Progress

Ids = Sequence[int]

# Tokens in a batch, and logits held at once (fp32: half a gigabyte).
_BATCH_TOKENS = 1 << 14
_BATCH_LOGITS = 1 << 27


class Scored(Protocol):
    """What is scored: a `Transformer`, or a model on disk (`gnomon.running.last_words`).

    Attributes:
        embed: its weight is where the model is.
        config: says `context` and `vocab_size`.
    """

    embed: Any
    config: Any

    def stream(self, tokens_BT: torch.Tensor, /) -> torch.Tensor:
        """(B, T, D), as the head reads it."""
        ...

    def logits(self, h_ND: torch.Tensor, /) -> torch.Tensor:
        """(N, V) of any tokens of a stream."""
        ...


@torch.inference_mode()
def loglikelihoods(
    model: Scored, requests: Sequence[tuple[Ids, Ids]], what: str = "scoring", batch_tokens: int = _BATCH_TOKENS
) -> list[tuple[float, bool]]:
    """log p(continuation | context) in nats for each (context, continuation), and whether greedy decoding would say it.

    What does not fit the model's context is cut off on the left. A continuation longer than that is scored in windows:
    each token once, as `windows` says. Equal inputs are computed once, longest first, so that memory runs out at the
    beginning if it does.

    Args:
        requests: token ids; a context has one token at least.
        what: is told with the progress.
        batch_tokens: computed at once, padding counted.

    Raises:
        UserError: an empty context.
    """
    device, T = model.embed.weight.device, model.config.context
    wanted: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for owner, (context, continuation) in enumerate(requests):
        if not len(context):
            raise UserError("a continuation is scored after something: its context needs one token at least")
        ids = [*context, *continuation]
        for first, stop, count in windows(len(context), len(ids), T):
            wanted.setdefault(tuple(ids[first : stop - 1]), []).append((owner, ids[stop - count : stop]))
    total_N = torch.zeros(len(requests), dtype=torch.float64)
    misses_N = torch.zeros(len(requests), dtype=torch.int64)
    inputs = sorted(wanted, key=len, reverse=True)
    with Progress(what, sum(map(len, inputs)), "tok") as progress:
        for batch in _batches(inputs, batch_tokens):
            x_BT = torch.zeros(len(batch), len(batch[0]), dtype=torch.int64)
            picks: list[tuple[int, int, int, int]] = []  # row, place, target, owner
            for row, ids in enumerate(batch):
                x_BT[row, : len(ids)] = torch.tensor(ids)
                for owner, targets in wanted[ids]:
                    start = len(ids) - len(targets)
                    picks += [(row, start + i, target, owner) for i, target in enumerate(targets)]
            # Padding is on the right, where no token looks.
            h_BTD = model.stream(x_BT.to(device))
            for row_N, place_N, target_N, owner_N in _columns(picks, max(1, _BATCH_LOGITS // model.config.vocab_size)):
                logits_NV = model.logits(h_BTD[row_N.to(device), place_N.to(device)]).float()
                target_N = target_N.to(device)
                logp_N = logits_NV.log_softmax(-1).gather(1, target_N[:, None]).squeeze(1)
                total_N.index_add_(0, owner_N, logp_N.double().cpu())
                misses_N.index_add_(0, owner_N, (logits_NV.argmax(-1) != target_N).long().cpu())
            progress.advance(sum(map(len, batch)))
    return [(total, misses == 0) for total, misses in zip(total_N.tolist(), misses_N.tolist())]


def windows(start: int, stop: int, context: int) -> Iterator[tuple[int, int, int]]:
    """(first, end, count): the windows in which tokens `start` to `stop` of a row are predicted, each once.

    A window has the tokens [first, end); the last `count` of them are predicted from those before. The first windows
    predict as many tokens as the model can read; the last one predicts what is left, from as many as it can read. (The
    rolling windows of lm_eval, with one token of context.)
    """
    while start < stop:
        end = min(start + context, stop)
        yield max(0, end - context - 1), end, end - start
        start = end


@torch.inference_mode()
def complete(
    model: Transformer,
    prompts: Sequence[Ids],
    tokens: int,
    *,
    stop: Callable[[list[int]], bool],
    choose: Callable[[torch.Tensor], torch.Tensor] = lambda logits_BV: logits_BV.argmax(-1),
) -> list[list[int]]:
    """What the model says after each prompt.

    Args:
        prompts: at least one token each; the last `context - tokens` of them are read.
        tokens: how many to add at most; less than the model's context.
        stop: given the ids said so far, whether that is enough.
        choose: next ids (B,) from logits (B, V); greedy if not given.

    Raises:
        UserError: an empty prompt, or as many tokens wanted as the context has.
    """
    room = model.config.context - tokens
    if room < 1:
        raise UserError(
            f"{tokens} tokens to generate leave no room for a prompt in the model's context of {model.config.context}"
        )
    if not all(map(len, prompts)):
        raise UserError("a prompt needs one token at least")
    cut = [list(prompt)[-room:] for prompt in prompts]
    order = sorted(range(len(cut)), key=lambda i: -len(cut[i]))
    said: list[list[int]] = [[] for _ in cut]
    rows = max(1, _BATCH_TOKENS // model.config.context)
    with Progress("generating", len(cut), "answer") as progress:
        for start in range(0, len(order), rows):
            batch = order[start : start + rows]
            for i, ids in zip(batch, _complete([cut[i] for i in batch], model, tokens, stop, choose)):
                said[i] = ids
            progress.advance(len(batch))
    return said


def _complete(
    prompts: list[list[int]], model: Transformer, tokens: int, stop: Callable, choose: Callable
) -> list[list[int]]:
    """One batch, padded on the left so that all rows go on at the same place."""
    device, longest = model.embed.weight.device, max(map(len, prompts))
    x_BT = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts], device=device)
    keep_BS = torch.tensor([[False] * (longest - len(ids)) + [True] * len(ids) for ids in prompts], device=device)
    cache, said, open_rows = Cache(), [[] for _ in prompts], set(range(len(prompts)))
    for _ in range(tokens):
        next_B = choose(model.logits(model.stream(x_BT, cache, keep_BS)[:, -1]).float())
        for row, id in enumerate(next_B.tolist()):
            if row in open_rows:
                said[row].append(id)
                if stop(said[row]):
                    open_rows.discard(row)
        if not open_rows:
            break
        x_BT = next_B[:, None]
        keep_BS = torch.cat((keep_BS, torch.ones_like(x_BT, dtype=torch.bool)), dim=1)
    return said


def _batches(inputs: list[tuple[int, ...]], tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Inputs sorted by length, as many at a time as fit when padded to the first."""
    start = 0
    while start < len(inputs):
        rows = max(1, tokens // len(inputs[start]))
        yield inputs[start : start + rows]
        start += rows


def _columns(picks: list[tuple[int, ...]], at_most: int) -> Iterator[torch.Tensor]:
    for start in range(0, len(picks), at_most):
        yield torch.tensor(picks[start : start + at_most]).T
