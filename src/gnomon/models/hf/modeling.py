"""The transformer behind transformers' interface: `from_pretrained`, `generate`, `Trainer`.

Legend: B batch, T tokens, S tokens seen (T plus those in the cache), D channels of the stream, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple

from gnomon.errors import UserError
from gnomon.models.hf.configuration import GnomonConfig
from gnomon.models.transformer import Transformer

# Keys and values were called `past_key_values` until transformers 5.2x and are called `cache` since.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class GnomonForCausalLM(PreTrainedModel, GenerationMixin):
    """A `Transformer` in the attribute `model`, its weights under the names it has there."""

    config_class = GnomonConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]

    def __init__(self, config: GnomonConfig):
        super().__init__(config)
        self.model = Transformer(config.settings())
        self.post_init()

    def init_weights(self) -> None:
        """Nothing to draw: the transformer did so when it was made. A tied head is no parameter, so nothing to tie either."""
        self.tie_weights()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Give weights missing in a checkpoint the values of a new model, and leave all others alone.

        transformers' own way resets each module by its type; here the values depend on the place in the model.
        """
        missing = [name for name, p in self.model.named_parameters() if not getattr(p, "_is_hf_initialized", False)]
        if missing:
            fresh = dict(Transformer(self.config.settings()).named_parameters())
            for name in missing:
                self.model.get_parameter(name).copy_(fresh[name])

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.head = value

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> nn.Module:
        embed = super().resize_token_embeddings(*arguments, **options)
        bias, rows = self.model.head_bias, embed.weight.shape[0]
        if bias is not None and len(bias) != rows:
            # New tokens start as the average old one, as their embeddings do.
            added = bias.detach().mean().expand(max(rows - len(bias), 0))
            self.model.head_bias = nn.Parameter(torch.cat((bias.detach()[:rows], added)))
        return embed

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, and the loss where labels are given.

        Args:
            input_ids: (B, T).
            attention_mask: (B, S), 0 for padding on either side; positions count the other tokens.
            cache, past_key_values: a cache of transformers that grows, under its new and its old name.
            labels: (B, T), the tokens themselves (they are shifted here), -100 where there is no loss.
            use_cache: return keys and values; None for the config's choice, and not in training.
            output_hidden_states: return the stream, (B, T, D), as it enters the blocks and after each of them.
            logits_to_keep: only the last so many logits, or those at these places; 0 for all.
            num_items_in_batch: divide the summed loss by this; None for the number of labels.

        Raises:
            UserError: more tokens than the context holds, or a mask or cache of another kind.
        """
        past: Any = cache if cache is not None else past_key_values
        if past is None and (use_cache if use_cache is not None else self.config.use_cache and not self.training):
            past = DynamicCache()
        if getattr(past, "is_compileable", False):
            raise UserError(
                "a gnomon model keeps keys and values in a cache that grows; use cache_implementation='dynamic'"
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        seen: list[Tensor] | None = [] if output_hidden_states else None
        h_BTD = self.model.stream(input_ids, past, _padding(attention_mask), seen)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.model.logits(h_BTD[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_BTV, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch)
        hidden = None if seen is None else tuple(seen)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, hidden_states=hidden, **{_CACHE: past})


def _padding(mask: Tensor | None) -> Tensor | None:
    """The mask as `Transformer.stream` takes it; None where there is no padding, which is faster."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise UserError(f"attention_mask must be (batch, tokens), 0 for padding; got shape {tuple(mask.shape)}")
    if not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask.bool()
