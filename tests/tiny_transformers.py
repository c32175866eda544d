"""Every causal, masked and sequence-to-sequence class of the installed transformers, as small as its config lets it be."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch

T, T_ENCODER = 11, 13  # lengths that no width equals

# One value for each name a config may give a size; sizes that mean different things are different.
_SIZES = {
    64: "hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim n_embed model_dim encoder_hidden_size "
    "d_embed projection_dim lru_width vocab_size_per_layer max_position_embeddings n_positions max_target_positions "
    "max_source_positions max_seq_len n_ctx max_sequence_length seq_length index_topk",
    3: "num_hidden_layers num_layers n_layers n_layer encoder_layers decoder_layers num_encoder_layers num_decoder_layers "
    "num_attention_layers encoder_num_layers decoder_num_layers",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads "
    "attention_heads num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_tok "
    "num_experts_per_token moe_top_k moe_topk moe_k router_top_k top_k_experts mamba_n_heads mamba_num_heads num_mem_heads "
    "linear_num_value_heads",
    2: "num_key_value_heads num_kv_heads n_head_kv kv_n_heads multi_query_group_num encoder_num_key_value_heads "
    "decoder_num_key_value_heads type_vocab_size mamba_expand expand linear_num_key_heads eos_token_id sep_token_id "
    "index_n_heads",
    1: "n_group topk_group n_shared_experts first_k_dense_replace moe_layer_start_index num_shared_experts mamba_n_groups "
    "n_groups bos_token_id decoder_start_token_id",
    0: "pad_token_id num_kv_shared_layers num_nextn_predict_layers",
    96: "intermediate_size n_inner ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size intermediate_size_mlp "
    "block_ff_dim hidden_dim",
    80: "moe_intermediate_size expert_ffn_size",
    72: "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size",
    24: "head_dim d_kv kv_channels attention_head_dim global_head_dim",
    20: "kv_lora_rank qk_head_dim",
    28: "q_lora_rank o_lora_rank",
    12: "qk_nope_head_dim linear_key_head_dim linear_value_head_dim",
    8: "qk_rope_head_dim rotary_dim time_step_rank mamba_dt_rank hidden_size_per_layer_input laurel_rank",
    18: "v_head_dim",
    128: "vocab_size mamba_d_ssm vocab_size_per_layer_input",
    16: "mamba_d_state ssm_state_size state_size index_head_dim",
    32: "mamba_d_head mamba_head_dim attention_window_size sliding_window",
}  # fmt: skip
_NAMES = {name: size for size, names in _SIZES.items() for name in names.split()}
# Some configs demand that sizes agree; the first of these that builds and runs is taken.
_CHANGES: list[dict[str, int]] = [
    {},
    {"num_key_value_heads": 4, "num_kv_heads": 4},
    {"head_dim": 16, "d_kv": 16, "kv_channels": 16, "attention_head_dim": 16},
    {"head_dim": 16, "num_key_value_heads": 4},
    {"num_experts_per_tok": 2},
    {"num_hidden_layers": 4, "num_layers": 4, "n_layer": 4},
    {"hidden_size": 128},
    {"head_dim": 32},
]


def classes() -> dict[tuple[str, str], bool]:
    """(model type, class name) -> whether it has an encoder and a decoder."""
    from transformers.models.auto import modeling_auto as auto

    maps = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
    return {pair: "SEQ" in kind for kind in maps for pair in getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").items()}


def build(model_type: str, name: str, encoder_decoder: bool) -> tuple[torch.nn.Module, dict[str, Any]] | None:
    """A tiny random model and inputs it takes; None when no shrunken config of its class builds and runs."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    for changes in _CHANGES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _build(
                    getattr(transformers, name), _shrunk(CONFIG_MAPPING[model_type], changes), encoder_decoder
                )
        except Exception:  # each class refuses what it cannot be in its own way
            continue
    return None


def _build(cls: Any, config: Any, encoder_decoder: bool) -> tuple[torch.nn.Module, dict[str, Any]]:
    parts = [config, *(getattr(config, name, None) for name in getattr(type(config), "sub_configs", {}))]
    for part in filter(None, parts):
        part._attn_implementation = part._experts_implementation = "eager"
    with torch.device("meta"):
        if sum(p.numel() for p in cls(config).parameters()) > 5e6:
            raise ValueError("it does not get small")
    torch.manual_seed(0)
    model = cls(config).eval().float()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(0.09 * torch.randn(parameter.shape, generator=generator))
    ids = {name: torch.randint(5, 100, (1, n), generator=generator) for name, n in (("short", T), ("long", T_ENCODER))}
    inputs = (
        {"input_ids": ids["long"], "decoder_input_ids": ids["short"]}
        if encoder_decoder
        else {"input_ids": ids["short"]}
    )
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    with torch.no_grad():
        model(**inputs)
    return model, inputs


def _shrunk(cls: Any, changes: dict[str, int]) -> Any:
    default = cls()
    new: dict[str, Any] = {}
    for name, size in {**_NAMES, **changes}.items():
        value, found = getattr(default, name, None), getattr(cls, name, None)
        read_only = isinstance(found, property) and found.fset is None
        if isinstance(value, int) and not isinstance(value, bool) and not read_only:
            new[name] = size
    if hasattr(default, "pad_token_id"):
        new["pad_token_id"] = 0
    if hasattr(default, "qk_rope_head_dim"):
        new.pop("head_dim", None)
    for alias, name in getattr(cls, "attribute_map", {}).items():
        if alias in new and name in new:
            del new[alias]
    for name in getattr(cls, "sub_configs", {}):
        if hasattr(part := getattr(default, name, None), "to_dict"):
            new[name] = _shrunk(type(part), changes)
    return cls(**new)
