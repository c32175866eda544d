"""What training leaves beside weights, and files that hold less than a model: told or refused, never measured as one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnomon.checkpoints.checkpoint import Checkpoint, size_text
from gnomon.errors import UserError

_STATE = re.compile(
    r"^(optimizer|optim|optimizers|optimizer_state|lr_scheduler|scheduler|grad_scaler|scaler|rng_state|dataloader|train_state)[./]"
    r"|\.(exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer)$"
)
_FLAT = re.compile(r"(^|\.)_?flat_param(_\d+)?$")
# Files of one process each, by a number in their names: Meta's, Megatron's and DeepSpeed's, and those of hand-written saves.
_PART = re.compile(r"^(consolidated\.|mp_rank_|.*[._-](?:tp|mp|rank)[._-]?)(\d+)([._].*)?\.(pth|pt|bin|safetensors)$")
# Names of matrices whose size a config tells: (pattern, axis, which size).
_SIZED = (
    (re.compile(r"(q_proj|wq|query|q_lin)\.weight$"), 0, "attention"),
    (re.compile(r"(o_proj|wo|out_lin)\.weight$"), 1, "attention"),
    (re.compile(r"(gate_proj|up_proj|w1|w3|fc1|fc_in)\.weight$"), 0, "mlp"),
    (re.compile(r"(down_proj|w2|fc2|fc_out)\.weight$"), 1, "mlp"),
)


def checked(checkpoint: Checkpoint) -> Checkpoint:
    """Without what training left beside the weights; notes say what that was.

    Raises:
        UserError: the weights are FSDP's flat parameters, or one process's part of each matrix.
    """
    entries, notes = dict(checkpoint.entries), []
    if flat := next((name for name in entries if _FLAT.search(name)), None):
        raise UserError(
            f"{checkpoint.name} holds FSDP's flat parameters ({flat!r}): all of a unit's weights in one row, which only the model's "
            "code can cut. Save it with StateDictType.FULL_STATE_DICT, or load it into the model first."
        )
    if state := [name for name in entries if _STATE.search(name)]:
        notes.append(f"{len(state)} tensors are training's (such as {state[0]}) and were passed over")
    if empty := [name for name, entry in entries.items() if 0 in entry.shape]:
        notes.append(
            f"{len(empty)} tensors hold nothing (such as {empty[0]}) and were passed over: DeepSpeed's ZeRO-3 leaves them so where "
            "the weights lie in other files; put them together with its zero_to_fp32.py"
        )
    for name in {*state, *empty}:
        del entries[name]
    if not entries:
        raise UserError(f"{checkpoint.name} holds no weights. {'; '.join(notes)}.")
    _check_whole(checkpoint)
    return dataclasses.replace(checkpoint, entries=entries, notes=(*checkpoint.notes, *notes)) if notes else checkpoint


def check_parts(path: Path) -> None:
    """Raise a `UserError` when the files beside this one are other processes' parts of the same model."""
    one = _PART.match(path.name)
    if one is None:
        return
    beside = [found for item in path.parent.iterdir() if (found := _PART.match(item.name))]
    others = [found for found in beside if found.group(1, 3, 4) == one.group(1, 3, 4)]
    if len(others) > 1:
        raise UserError(
            f"{path} is one of {len(others)} files ({', '.join(sorted(found[0] for found in others)[:4])}), each of which holds a part "
            "of every matrix. Put them together first, as their framework does (for Meta's: transformers' convert_llama_weights_to_hf)."
        )


def meta_config(params: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's sizes from the `params.json` beside Meta's consolidated.*.pth (facebookresearch/llama, model.py)."""
    if not all(type(params.get(key)) is int for key in ("dim", "n_heads", "n_layers")):
        return {}
    more = {key: value for key, value in params.items() if isinstance(value, (int, float)) and value > 0}
    wide = int(int(8 * params["dim"] / 3) * more.get("ffn_dim_multiplier", 1))
    step = int(more.get("multiple_of", 256)) or 256
    sizes = {
        "hidden_size": params["dim"],
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": more.get("n_kv_heads", params["n_heads"]),
        "num_hidden_layers": params["n_layers"],
        "intermediate_size": more.get("hidden_dim") or -(-wide // step) * step,
    }
    return sizes | ({"vocab_size": more["vocab_size"]} if "vocab_size" in more else {})


def _check_whole(checkpoint: Checkpoint) -> None:
    """Attention and MLP that are all narrower than the config says, by one factor, are a tensor-parallel part."""
    config: Mapping[str, Any] = checkpoint.config
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config

    def number(*keys: str) -> int:
        return next((value for key in keys if type(value := config.get(key)) is int), 0)

    heads = number("num_attention_heads", "n_head", "n_heads")
    width = number("hidden_size", "n_embd", "d_model")
    sizes = {
        "attention": heads * number("head_dim") or width,
        "mlp": number("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    }
    factors: dict[str, set[int]] = {"attention": set(), "mlp": set()}
    example = ""
    for name, entry in checkpoint.entries.items():
        if len(entry.shape) != 2 or "expert" in name:
            continue
        for pattern, axis, kind in _SIZED:
            if sizes[kind] and pattern.search(name):
                whole, here = sizes[kind], entry.shape[axis]
                factors[kind].add(whole // here if here and whole % here == 0 else 0)
                example = example or f"{name} is {size_text(entry.shape)}, where the config tells of {whole}"
    found = factors["attention"] | factors["mlp"]
    if all(factors.values()) and len(found) == 1 and min(found) > 1:
        raise UserError(
            f"{checkpoint.name} is one of {min(found)} tensor-parallel parts of a model: {example}, and so are all others. "
            "Put the parts together first, as their framework does, and give the whole."
        )
