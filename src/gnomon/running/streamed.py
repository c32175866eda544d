"""A model whose weights stay on disk: each block comes into memory when it is called and leaves after it.

Embedding, masks, rotary tables and the head are run by the model's own `forward` of transformers; only where its weights come
from, and what happens at each block, is ours.

Legend: B rows, T tokens, D channels of the stream, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnomon import anatomy
from gnomon.checkpoints import Checkpoint, open_checkpoint
from gnomon.errors import UserError
from gnomon.running.architecture import config_of, empty_models, has_next_token_head
from gnomon.running.block_list import blocks_of
from gnomon.running.weight_names import Sources, sources_of

Block = Callable[[Tensor], Tensor]
"""A block with everything but the stream given: (B, T, D) -> (B, T, D)."""

Visit = Callable[[int, Tensor, Block], Tensor]
"""What happens at block `index` to the stream that reaches it; `block(h)` runs it, its weights are there while this runs."""


class Streamed:
    """A checkpoint as a model of transformers, whose parameters have numbers only while `run` is in the module they belong to.

    Attributes:
        model: the model.
        prefix, blocks: name and modules of the list of blocks.
        checkpoint: where the weights come from.
        predicts: whether its logits are those of the next token.
    """

    def __init__(self, model: Any, sources: Sources):
        self.model: Any = model
        self.sources: Sources = sources
        self.checkpoint: Checkpoint = sources.checkpoint
        self.prefix: str
        self.blocks: nn.ModuleList
        self.prefix, self.blocks = blocks_of(model)
        self.predicts: bool = has_next_token_head(model)
        self.block_names: list[str] = [f"{self.prefix}.{index}" for index in range(len(self.blocks))]
        # Some models ask their embedding for its device: so not on the meta device, but of the right shape, without memory, and
        # NaN wherever it would be used by mistake.
        self._empty = {name: _placeholder(p) for name, p in model.named_parameters(remove_duplicate=False)}
        for name, parameter in self._empty.items():
            self._put(name, parameter)
        self._pieces = self._cut()
        self._users: Counter[str] = Counter()
        self._visit: Visit = _run_it
        self._due = 0
        self._more: dict[int, int | None] = {}
        for index, block in enumerate(self.blocks):
            # In place of a hook, so that a block that is passed over is not read.
            block.forward = functools.partial(self._at_block, index, block.forward)
        for name in self.table_names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_, name=name: self._take(name))
            module.register_forward_hook(lambda *_, name=name: self._drop(name), always_call=True)

    @property
    def table_names(self) -> list[str]:
        """The pieces outside the blocks: embedding, norms, head."""
        return [name for name in self._pieces if name not in self.block_names]

    @functools.cached_property
    def anatomy(self) -> anatomy.Anatomy:
        """What each parameter of `model` is."""
        return anatomy.read(self.model)

    @property
    def context(self) -> int:
        """How many tokens a row may have."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20)

    def nbytes(self, piece: str) -> int:
        """Memory of a piece's weights."""
        return sum(4 * self._empty[name].numel() for name in self._pieces[piece])

    def piece_of(self, name: str) -> str | None:
        """The piece that a parameter is loaded with; None for a buffer."""
        return next((piece for piece, names in self._pieces.items() if name in names), None)

    @property
    def without_cache(self) -> dict[str, Any]:
        """What tells `forward` to keep no keys and values for a next token; they would be as large as the states."""
        return {"use_cache": False} if hasattr(self.model.config.get_text_config(), "use_cache") else {}

    @property
    def without_logits(self) -> dict[str, Any]:
        """What tells `forward` to make the logits of the last token alone; those of a long text can be larger than the model."""
        known = inspect.signature(self.model.forward).parameters
        return {"logits_to_keep": 1} if self.predicts and "logits_to_keep" in known else {}

    @torch.no_grad()
    def run(self, tokens_BT: Tensor, visit: Visit | None = None, **options: Any) -> Any:
        """The model's own output on these tokens.

        Args:
            tokens_BT: ids, every row full.
            visit: stands in the place of each block; None runs them all.
            options: for the model's `forward`.
        """
        with self.visited(visit or _run_it):
            try:
                return self.model(input_ids=tokens_BT, **self.without_cache | options)
            except RuntimeError as error:
                if "single memory location" not in str(error):
                    raise
                name = type(self.model).__name__
                raise UserError(f"{name} writes into its weights while it runs, and they are on disk") from error

    def stream(self, tokens_BT: Tensor, visit: Visit) -> Tensor:
        """(B, T, D) after the last block, with `visit` at each; the head has as little to do as can be."""
        last: list[Tensor] = []

        def keeping(index: int, h_BTD: Tensor, block: Block) -> Tensor:
            last[:] = [visit(index, h_BTD, block)]
            return last[0]

        self.run(tokens_BT, keeping, **self.without_logits)
        return last[0]

    @contextlib.contextmanager
    def visited(self, visit: Visit) -> Iterator[None]:
        """While open, `visit` stands in the place of each block, in one call of `model`."""
        self._visit, self._due = visit, 0
        try:
            yield
        finally:
            self._visit = _run_it

    def logits(self, tokens_BT: Tensor, h_BTD: Tensor) -> Iterator[Tensor]:
        """What norm and head make of the stream after the last block, after a whole `run`: logits (1, T, V), row by row."""
        last = len(self.blocks) - 1
        with self.held(self.table_names):
            for row_1T, h_1TD in zip(tokens_BT.split(1), h_BTD.split(1)):
                yield self.run(row_1T, lambda index, h, _, given=h_1TD: given if index == last else h).logits

    @contextlib.contextmanager
    def held(self, pieces: Sequence[str]) -> Iterator[None]:
        """While open, these pieces stay in memory."""
        with contextlib.ExitStack() as stack:
            for name in pieces:
                self._take(name)
                stack.callback(self._drop, name)
            yield

    def _at_block(self, index: int, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if index != self._due:
            raise UserError(f"{type(self.model).__name__} does not run its blocks once and in order, as is needed here")
        self._due += 1
        h_BTD, *others = arguments or (options.pop("hidden_states"),)
        more: list[Any] | None = None  # what it returns besides the stream, where that is a tuple

        def block(x_BTD: Tensor) -> Tensor:
            nonlocal more
            with self.held([self.block_names[index]]):
                out = forward(x_BTD, *others, **options)
            if not isinstance(out, (Tensor, tuple, list)):
                raise UserError(f"a block of {type(self.model).__name__} returns a {type(out).__name__}, and no states")
            more = None if isinstance(out, Tensor) else list(out[1:])
            self._more[index] = None if more is None else len(more)
            return out if isinstance(out, Tensor) else out[0]

        h_BTD = self._visit(index, h_BTD, block)
        if more is None and (count := self._more.get(index)) is not None:
            more = [None] * count
        return h_BTD if more is None else (h_BTD, *more)

    def _cut(self) -> dict[str, tuple[str, ...]]:
        """Pieces that are loaded and freed as one: each block, and outside them each module with parameters of its own."""
        pieces = {}
        for name, module in self.model.named_modules():
            whole = name in self.block_names
            if name.startswith(f"{self.prefix}.") and not whole:
                continue
            own = [key for key, _ in module.named_parameters(name, recurse=whole, remove_duplicate=False)]
            if own:
                pieces[name] = tuple(own)
        return pieces

    def _take(self, piece: str) -> None:
        self._users[piece] += 1
        if self._users[piece] > 1:
            return
        names, owners = self._pieces[piece], self.model.all_tied_weights_keys
        aliases = [name for name in names if name not in self.sources.of and name in owners]
        self._load([name for name in names if name not in aliases])
        for name in aliases:
            owner = owners[name]
            if self.model.get_parameter(owner) is self._empty[owner]:
                self._load([owner])
                self._put(name, self.model.get_parameter(owner))
                self._put(owner, self._empty[owner])
            else:
                self._put(name, self.model.get_parameter(owner))

    def _load(self, names: Sequence[str]) -> None:
        stored = tuple(stored for name in names for stored in self.sources.of.get(name, ()))
        if stored:
            self.sources.load(self.model, stored)

    def _drop(self, piece: str) -> None:
        self._users[piece] -= 1
        if not self._users[piece]:
            for name in self._pieces[piece]:
                self._put(name, self._empty[name])

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        path, _, last = name.rpartition(".")
        self.model.get_submodule(path)._parameters[last] = parameter


def _placeholder(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.full((1,), torch.nan, dtype=parameter.dtype).expand(parameter.shape), requires_grad=False)


def _run_it(_index: int, h_BTD: Tensor, block: Block) -> Tensor:
    return block(h_BTD)


def open_streamed(source: Any, config: Mapping[str, Any] | None = None) -> Streamed:
    """A checkpoint that `gnomon inspect` reads, ready to run.

    Args:
        source: what `open_checkpoint` takes.
        config: used instead of config.json.

    Raises:
        UserError: transformers cannot run it: the architecture is unknown to it, tensors are missing, or the layers are not one
            list of blocks.
    """
    checkpoint = open_checkpoint(source, config=config)
    settings = config_of(checkpoint)
    first: Sources | None = None
    for model in empty_models(settings):
        sources = sources_of(model, checkpoint)
        if not sources.missing:
            return Streamed(model, sources)
        first = first or sources
    assert first is not None
    some = ", ".join(first.missing[:4]) + " …" * (len(first.missing) > 4)
    raise UserError(
        f"{checkpoint.name}: {len(first.missing)} weights that {settings.model_type!r} needs are not there under a name that "
        f"transformers knows ({some}). It is no whole model of this kind, or its names are those of another library."
    )
