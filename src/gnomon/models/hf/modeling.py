"""The transformer behind transformers' interface: `from_pretrained`, `generate`, `Trainer`.

Legend: B batch, T tokens, S tokens seen (T plus those in the cache), H query heads, D channels of the stream, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple, logging

from gnomon.errors import UserError
from gnomon.models.hf.configuration import GnomonConfig
from gnomon.models.hf.inputs import check_names, kept, places_and_mask
from gnomon.models.transformer import Block, Explicit, Stack, Transformer, soft_cap

logger = logging.get_logger(__name__)

# Keys and values were called `past_key_values` until transformers 5.2x and are called `cache` since.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"

# The head lay inside the model until 0.1, and lies there in the checkpoints of runs.
_FORMER_NAMES = {r"^(?:model\.)?head\.weight$": "lm_head.weight", r"^(?:model\.)?head_bias$": "lm_head.bias"}


class GnomonBlock(Block, GradientCheckpointingLayer):
    """A block that transformers may run a second time in place of keeping what it computed."""


class GnomonPreTrainedModel(PreTrainedModel):
    """What the stack alone and the stack with its head have in common."""

    config_class = GnomonConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["GnomonBlock"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    former_names = _FORMER_NAMES

    @classmethod
    def from_pretrained(cls, *arguments: Any, key_mapping: dict[str, str] | None = None, **options: Any) -> Any:
        """As transformers' own; also from a checkpoint of a run, and from folders in which the head lay inside the model."""
        found = super().from_pretrained(*arguments, key_mapping=_FORMER_NAMES | (key_mapping or {}), **options)
        # Saved again, weights have today's names.
        model: Any = found[0] if isinstance(found, tuple) else found
        model._weight_conversions = None
        return found

    def init_weights(self) -> None:
        """Nothing to draw: the transformer did so when it was made."""
        self.tie_weights()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Give weights missing in a checkpoint the values of a new model, and leave all others alone.

        transformers' own way resets each module by its type; here the values depend on the place in the model.
        """
        there = {name for name, p in self.named_parameters() if getattr(p, "_is_hf_initialized", False)}
        missing = dict(self.named_parameters()).keys() - there - self.all_tied_weights_keys.keys()
        if missing:
            fresh = dict(type(self)(self.config).named_parameters())
            for name in missing:
                self.get_parameter(name).copy_(fresh[name])

    def mark_tied_weights_as_initialized(self, *_: Any) -> None:
        """Nothing to mark, see above. While it has no memory, a tied head is the embedding itself, and the mark would hide that
        the embedding is missing."""


class GnomonModel(GnomonPreTrainedModel, Stack):
    """A `Transformer` without its head: tokens to the stream that a head would read.

    Args:
        config: the settings.
        whole: the transformer whose modules are taken; None for a new one.
    """

    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?(lm_head\.|head\.|head_bias$)"]

    def __init__(self, config: GnomonConfig, whole: Transformer | None = None):
        super().__init__(config)
        whole = Transformer(config.settings(), GnomonBlock) if whole is None else whole
        self.embed, self.positions, self.rope = whole.embed, whole.positions, whole.rope
        self.entry, self.blocks, self.exit = whole.entry, whole.blocks, whole.exit
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """The stream (B, T, D) after the blocks.

        Args:
            input_ids: (B, T).
            attention_mask: (B, S), 0 for padding on either side; or (B or 1, H or 1, T, S), True (1) or 0.0 where a token may
                look, False (0) or a large negative number where not, used as it is.
            position_ids: (B or 1, T); None to count tokens that are no padding. Without mask and cache, a place that does not
                follow the one before begins another sequence, which sees nothing of the last (packing without padding).
            cache, past_key_values: a cache of transformers that grows, under its new and its old name.
            inputs_embeds: (B, T, D), in place of `input_ids`.
            use_cache: return keys and values; None for the config's choice, and not in training.
            output_attentions: return each block's weights (B, H, T, S), which only the "eager" attention has.
            output_hidden_states: return the stream, (B, T, D), as it enters the blocks and after each of them.
            others: `seq_idx` (1, T) or `cu_seq_lens_q` (sequences + 1) for packing, and what trainers send along.

        Raises:
            UserError: a place beyond the context, a mask or cache of another kind, or an argument without a meaning here.
        """
        check_names(others)
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give either input_ids or inputs_embeds")
        x_BTD = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is not None and _CACHE == "cache":
            warnings.warn("`past_key_values` is deprecated in transformers. Use `cache` instead.", FutureWarning, stacklevel=2)
        past: Any = cache if cache is not None else past_key_values
        recomputes = self.training and torch.is_grad_enabled() and any(block.gradient_checkpointing for block in self.blocks)
        if past is None and (use_cache if use_cache is not None else self.config.use_cache and not self.training):
            past = None if recomputes else DynamicCache()
        if getattr(past, "is_compileable", False):
            raise UserError("a gnomon model keeps keys and values in a cache that grows; use cache_implementation='dynamic'")
        if past is not None and recomputes:
            raise UserError("gradient checkpointing runs each block twice, which a cache would note twice; use use_cache=False")
        held = 0 if past is None else past.get_seq_length()
        place, mask = places_and_mask(
            x_BTD.shape[1], held, self.config.context, x_BTD.device, attention_mask, position_ids, others
        )

        explicit = Explicit() if self.config._attn_implementation == "eager" else None
        if self.config.output_attentions if output_attentions is None else output_attentions:
            if explicit is None:
                logger.warning_once("attentions are None: the fused kernel has none; use attn_implementation='eager'")
            else:
                explicit.weights = []
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        seen: list[Tensor] | None = [] if wanted else None
        h_BTD = self.through(x_BTD, place, mask, past, seen, explicit)
        return BaseModelOutputWithPast(
            last_hidden_state=h_BTD,
            hidden_states=None if seen is None else tuple(seen),
            attentions=None if explicit is None or explicit.weights is None else tuple(explicit.weights),
            **{_CACHE: past},
        )


class GnomonForCausalLM(GnomonPreTrainedModel, GenerationMixin):
    """A `Transformer` in two parts: `model`, all but the head, and `lm_head`, the head with its bias."""

    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}

    def __init__(self, config: GnomonConfig):
        super().__init__(config)
        whole = Transformer(config.settings(), GnomonBlock)
        self.model = GnomonModel(config, whole)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=config.head_bias, device="meta")
        self.lm_head.weight = (whole.embed if whole.head is None else whole.head).weight
        self.lm_head.bias = whole.head_bias
        self.post_init()

    @classmethod
    def from_transformer(cls, ours: Transformer, **options: Any) -> GnomonForCausalLM:
        """A model with a copy of the weights; `options` are more of the config's values."""
        model = cls(GnomonConfig(**dataclasses.asdict(ours.config), **options))
        head = {"head.weight": "lm_head.weight", "head_bias": "lm_head.bias"}
        weights = {head.get(name, f"model.{name}"): tensor for name, tensor in ours.state_dict().items()}
        if ours.config.tied:
            weights["lm_head.weight"] = weights["model.embed.weight"]
        model.load_state_dict(weights)
        return model.train(ours.training)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, and the loss where labels are given; what is not named here as in `GnomonModel`.

        Args:
            labels: (B, T), the tokens themselves (they are shifted here), -100 where there is no loss.
            logits_to_keep: only the last so many logits, or those at these places; 0 for all.
            shift_labels: (B, T), labels that are already those of the next token; used in place of `labels`.
            num_items_in_batch: divide the summed loss by this; None for the number of labels.

        Raises:
            UserError: as `GnomonModel`.
        """
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **others,
        )
        h_BTD = kept(out.last_hidden_state, logits_to_keep)
        logits_BTV = soft_cap(self.lm_head(h_BTD), self.config.head_softcap)
        loss = None
        if labels is not None or shift_labels is not None:
            loss = self.loss_function(
                logits_BTV,
                labels,
                self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            **{_CACHE: out[_CACHE] if _CACHE in out else None},
        )
