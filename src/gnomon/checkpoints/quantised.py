"""Weights stored as small numbers with others beside them that say what they stand for, turned back when read.

Known by their names and shapes: fp8 and int8 with scales for the tensor, rows, columns or blocks (DeepSeek, compressed-tensors,
bitsandbytes' `SCB`), with zero points; MXFP8 and MXFP4 (gpt-oss, DeepSeek, compressed-tensors); NVFP4 (ModelOpt,
compressed-tensors); packed integers of compressed-tensors, GPTQ, AWQ and MLX; bitsandbytes' nf4 and fp4. Weights that weight_norm
keeps in two are put together as well. What is stored in another way keeps its name and raises when it is read: no number is given
that is not the model's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnomon.checkpoints import number_formats
from gnomon.checkpoints.checkpoint import Buffer, Checkpoint, Entry, size_text
from gnomon.errors import UserError

_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32")
_SCALES = ("weight_scale_inv", "scale_inv", "weight_scale", "scales", "scale", "SCB")
# Where torch's weight_norm keeps directions: as a parametrization, and before there were those.
_DIRECTIONS = (".parametrizations.weight.original1", ".weight_v")
# What sizes and settings that make no sense raise.
_ODD = (ValueError, TypeError, AttributeError, KeyError, ArithmeticError)
# What other methods keep beside their weights.
_BESIDE = ("scale", "scales", "zero", "zeros", "qzeros", "g_idx", "meta", "nbits", "group_size", "axis", "shape", "packing",
           "weight_scale", "weight_scales", "view_as_float", "compute_dtype", "unpack_view_dtype", "quant_scale", "quant_zero",
           "optimize", "round_zero", "channel_wise", "encoded_state_dict", "stores_quant_config", "offload_meta")  # fmt: skip
_STORED = re.compile(r"\.(weight|qweight|weight_packed|W_q)$|_(blocks|packed)$")
_NAMED_LIKE_WEIGHTS = re.compile(r"(weight|_proj|_packed|_data|experts?|W_q|_weight|codes|Qidxs|trellis)$")
# Tensors by which methods are known that are not decoded.
_METHODS = {
    "W_q": "HQQ", "q_weight": "EXL2", "trellis": "EXL3", "codebooks": "AQLM", "Qidxs": "QuIP#", "centroids": "VPTQ",
    "dense_weights": "SpQR", "_data": "quanto", "qdata": "torchao",
}  # fmt: skip


class Packed(NamedTuple):
    """A weight that is made from several tensors.

    Attributes:
        shape: of the matrix it stands for.
        parts: keyword of `decode` -> tensor; "weight" is the one whose place in the file counts.
        decode: keyword -> tensor, to the matrix in fp32.
    """

    shape: tuple[int, ...]
    parts: dict[str, str]
    decode: Callable[..., Tensor]


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with every quantised weight seen as the float matrix it stands for.

    What it is made from leaves the list of tensors. A weight that cannot be decoded stays in it and raises when it is read.
    """
    raw = checkpoint.entries
    found = _find(checkpoint)
    if not found:
        return checkpoint
    used = {part for packed in found.values() for part in packed.parts.values()}
    logical = {packed.parts["weight"]: name for name, packed in found.items()}
    entries: dict[str, Entry] = {}
    for name, entry in raw.items():
        if name in logical:
            packed = found[logical[name]]
            nbytes = sum(raw[part].nbytes for part in packed.parts.values())
            entries[logical[name]] = entry._replace(shape=packed.shape, nbytes=nbytes)
        elif name not in used:
            entries[name] = entry

    def load(name: str, buffer: Buffer | None, index: int | None) -> Tensor:
        packed = found.get(name)
        if packed is None:
            return checkpoint.load(name, buffer, index)
        stored = packed.parts["weight"]
        refused = isinstance(packed.decode, partial) and packed.decode.func is _refuse
        # One expert can be read alone where all that it is made from has the experts for its first axis.
        alone = index is not None and raw[stored].shape[0] == packed.shape[0]
        tensors = {}
        for key, part in packed.parts.items() if not refused else ():
            one = index if alone and raw[part].shape[:1] == packed.shape[:1] else None
            tensors[key] = checkpoint.load(part, buffer if key == "weight" else None, one)
        try:
            matrix = packed.decode(**tensors)
            expected = packed.shape[1:] if alone else packed.shape
            if tuple(matrix.shape) != expected:
                raise UserError(f"and the tensors beside it make {size_text(matrix.shape)} and not {size_text(expected)}.")
        except (*_ODD, RuntimeError, IndexError) as error:
            raise UserError(f"{raw[stored].file}: {stored!r} {(str(error) or type(error).__name__).splitlines()[0]}") from None
        return matrix if alone or index is None else matrix[index]

    methods = sorted({_method(packed) for packed in found.values()} - {""})
    notes = tuple(f"weights stored by {method} are not decoded: they are named, and not measured" for method in methods)
    return dataclasses.replace(checkpoint, entries=entries, load=load, notes=checkpoint.notes + notes)


def _find(checkpoint: Checkpoint) -> dict[str, Packed]:
    """Logical name -> what it is made from."""
    raw, settings = checkpoint.entries, _settings(checkpoint.config)
    found: dict[str, Packed] = {}
    for name, entry in raw.items():
        if name.endswith(_DIRECTIONS):
            found |= _weight_norm(name, checkpoint)
        if entry.dtype not in (*_FP8, *_INTEGERS) or len(entry.shape) < 2:
            continue
        for scheme in (_blocks, _bitsandbytes, _gptq_or_awq, _words, _mlx, _fp4, _scaled, _unknown):
            try:
                packed = scheme(name, checkpoint, settings)
            except UserError:
                raise
            except _ODD as error:
                packed = _refusal(name, entry, f"goes with settings that cannot be used ({type(error).__name__}: {error}).")
            if packed and not (min(packed.shape) > 0 and math.prod(packed.shape) <= 64 * entry.nbytes):
                packed = _refusal(name, entry, f"is said to be {size_text(packed.shape)}, which its {entry.nbytes} bytes cannot hold.")
            if packed:
                found[_logical(name)] = packed
                break
    beside = {part for packed in found.values() for key, part in packed.parts.items() if key != "weight"}
    return {name: packed for name, packed in found.items() if packed.parts["weight"] not in beside}


def _weight_norm(name: str, checkpoint: Checkpoint) -> dict[str, Packed]:
    """torch's weight_norm: a weight by its direction and its lengths."""
    raw, v = checkpoint.entries, checkpoint.entries[name]
    end = next(end for end in _DIRECTIONS if name.endswith(end))
    lengths = name.removesuffix(end) + {".weight_v": ".weight_g"}.get(end, end.replace("1", "0"))
    g = raw[lengths].shape if lengths in raw else None
    if g is None or (g and (len(g) != len(v.shape) or any(n not in (1, m) for n, m in zip(g, v.shape)))):
        return {}
    parts = {"weight": name, "lengths": lengths}
    return {f"{name.removesuffix(end)}.weight": Packed(v.shape, parts, partial(_by, number_formats.from_weight_norm, "v"))}


def _logical(name: str) -> str:
    if name.endswith(".weight"):
        return name
    base = re.sub(r"\.(qweight|weight_packed|W_q|q_weight|weight\._data|weight\.qdata)$", ".weight", name)
    return re.sub(r"_(blocks|packed)$", "", base)


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    for where in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            if isinstance(where.get(key), Mapping):
                return where[key]
    return {}


def _beside(name: str, raw: Mapping[str, Entry], *ends: str) -> str | None:
    """The tensor that stands beside a weight under one of these ends: x.weight -> x.scale, x -> x_scale."""
    base = _STORED.sub("", name)
    for end in ends:
        for option in (f"{base}.{end}", f"{name}_{end}", f"{base}_{end}", f"{name}.{end}"):
            if option in raw and option != name:
                return option
    return None


def _blocks(name: str, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Packed | None:
    raw, shape = checkpoint.entries, checkpoint.entries[name].shape
    scales = name.removesuffix("_blocks") + "_scales"
    if not name.endswith("_blocks") or scales not in raw or len(shape) < 3:
        return None
    *lead, rows, groups, size = shape
    parts = {"weight": name, "scales": scales}
    return Packed((*lead, groups * size * 2, rows), parts, lambda weight, scales: number_formats.from_mxfp4(weight, scales))


def _bitsandbytes(name: str, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Packed | None:
    raw, entry = checkpoint.entries, checkpoint.entries[name]
    if entry.dtype != "U8":
        return None
    states = (f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
    state = next((state for state in states if state in raw), None)
    if state is None:
        return None
    parts = {"weight": name, "absmax": f"{name}.absmax", "table": f"{name}.quant_map"}
    beside = {"state": state, "inner": f"{name}.nested_quant_map", "largest": f"{name}.nested_absmax"}
    parts |= {key: part for key, part in beside.items() if part in raw}
    if missing := [part for part in parts.values() if part not in raw]:
        return _refusal(name, entry, f"is 4-bit of bitsandbytes, and {missing[0]!r} is missing.")
    try:
        told = json.loads(bytes(checkpoint.load(state, None, None).tolist()))
        shape, block = tuple(int(n) for n in told["shape"]), int(told["blocksize"])
        nested = (int(told["nested_blocksize"]), float(told["nested_offset"])) if "nested_blocksize" in told else None
    except (ValueError, KeyError, TypeError) as error:
        return _refusal(name, entry, f"has a quant_state that cannot be read ({error}).", list(parts.values())[1:])

    def decode(weight: Tensor, absmax: Tensor, table: Tensor, state: Tensor, **inner: Tensor) -> Tensor:
        if nested and len(inner) < 2:
            raise UserError("says that its absmax is quantised, and what it is quantised by is missing.")
        of_absmax = (inner["inner"], inner["largest"], *nested) if nested else None
        return number_formats.from_bitsandbytes(weight, absmax, table, shape, block, of_absmax)

    return Packed(shape, parts, decode)


def _gptq_or_awq(name: str, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Packed | None:
    raw, entry = checkpoint.entries, checkpoint.entries[name]
    if not name.endswith(".qweight") or entry.dtype != "I32":
        return None
    zeros, scales = _beside(name, raw, "qzeros"), _beside(name, raw, "scales")
    if not (zeros and scales) or len(raw[scales].shape) != 2:
        return None
    parts = {"weight": name, "zeros": zeros, "scales": scales}
    (rows, columns), M = entry.shape, raw[scales].shape[1]
    if columns == M:
        bits = 32 * raw[zeros].shape[1] // M
        if order := _beside(name, raw, "g_idx"):
            parts["order"] = order
        told = str(settings.get("checkpoint_format") or settings.get("packing_format") or settings.get("quant_method") or "")
        version = 2 if "v2" in told or told == "auto_round" else 1 if told else None
        gptq = partial(_by, number_formats.from_gptq, "words", bits=bits, version=version)
        return Packed((M, rows * 32 // bits), parts, gptq) if bits in (2, 3, 4, 8) else None
    if columns * 8 == M and str(settings.get("version", "gemm")).lower() == "gemm":
        return Packed((M, rows), parts, partial(_by, number_formats.from_awq, "words"))
    return None


def _words(name: str, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Packed | None:
    raw, entry = checkpoint.entries, checkpoint.entries[name]
    if not name.endswith("_packed") or entry.dtype != "I32":
        return None
    scale, shape = _beside(name, raw, "weight_scale", "scale"), _beside(name, raw, "weight_shape", "shape")
    if not (scale and shape):
        return None
    parts = {"weight": name, "scale": scale, "size": shape}
    for key, end in (("zero", "weight_zero_point"), ("order", "weight_g_idx")):
        if part := _beside(name, raw, end):
            parts[key] = part
    full = (*entry.shape[:-2], *(int(n) for n in checkpoint.load(shape, None, None).flatten()[-2:]))
    # Packed without gaps; where the bits divide a word, older versions agree.
    told = [group.get("weights", {}).get("num_bits") for group in (settings.get("config_groups") or {}).values()]
    bits = next((b for b in (*told, 4, 8, 2, 1) if b and -(-full[-1] * b // 32) == entry.shape[-1]), None)
    if bits is None:
        return _refusal(name, entry, f"holds {full[-1]} numbers in {entry.shape[-1]} words, which is no packing known here.")

    def decode(weight: Tensor, scale: Tensor, size: Tensor, **more: Tensor) -> Tensor:
        return number_formats.from_words(weight, scale, bits, full, **more)

    return Packed(full, parts, decode)


def _mlx(name: str, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Packed | None:
    raw, entry = checkpoint.entries, checkpoint.entries[name]
    if entry.dtype != "U32":
        return None
    scale, bias = _beside(name, raw, "scales"), _beside(name, raw, "biases")
    if not (scale and bias):
        return None
    # Each matrix may have settings of its own.
    own = settings.get(name.removesuffix(".weight"))
    own = {**settings, **own} if isinstance(own, Mapping) else settings
    bits, left = divmod(32 * entry.shape[-1], raw[scale].shape[-1] * int(own.get("group_size", 64)))
    if left or bits not in (2, 3, 4, 5, 6, 8) or own.get("bits", bits) != bits:
        return _refusal(name, entry, f"is MLX's, and its shape is not that of {own.get('bits')} bits in groups of "
                        f"{own.get('group_size')}.")  # fmt: skip
    parts = {"weight": name, "scale": scale, "bias": bias}
    shape = (*entry.shape[:-1], entry.shape[-1] * 32 // bits)
    return Packed(shape, parts, partial(_by, number_formats.from_mlx, "words", bits=bits))


def _fp4(name: str, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Packed | None:
    """Pairs of 4-bit floats: MXFP4 with exponents for 32 numbers, NVFP4 with fp8 scales for 16 and one more for all."""
    raw, entry = checkpoint.entries, checkpoint.entries[name]
    if entry.dtype not in ("U8", "I8"):
        return None
    scale = _beside(name, raw, "weight_scale", "weight_scale_inv", "scale_inv", "scale", "scales")
    if scale is None or len(raw[scale].shape) != len(entry.shape):
        return None
    numbers, groups = 2 * entry.shape[-1], raw[scale].shape[-1]
    kind = raw[scale].dtype
    parts = {"weight": name, "scale": scale}
    shape = (*entry.shape[:-1], numbers)
    if kind in ("F8_E8M0", "U8") and numbers == 32 * groups:
        return Packed(shape, parts, partial(_by, number_formats.from_fp4, "packed"))
    if kind in _FP8 and numbers == 16 * groups:
        factor, divisor = _beside(name, raw, "weight_scale_2", "scale_2"), _beside(name, raw, "weight_global_scale")
        if (factor is None) == (divisor is None):
            return _refusal(name, entry, "is NVFP4, and its second scale (weight_scale_2 or weight_global_scale) is missing.")
        parts |= {"factor": factor} if factor else {"divisor": str(divisor)}
        return Packed(shape, parts, _nvfp4)
    return None


def _nvfp4(weight: Tensor, scale: Tensor, factor: Tensor | None = None, divisor: Tensor | None = None) -> Tensor:
    # The largest weight is 6 x 448 times the factor, or over the divisor. No matrix of weights reaches thousands: one that
    # would was written with the other meaning.
    number = factor if factor is not None else 1 / divisor if divisor is not None else torch.ones(())
    if not bool((number.float() <= 1).all()):
        name = "weight_scale_2, which multiplies," if factor is not None else "weight_global_scale, which divides,"
        raise UserError(f"is NVFP4 with a {name} of {float((factor if factor is not None else divisor).flatten()[0]):.3g}: "  # type: ignore[union-attr]
                        "its weights would reach thousands. Its writer may have stored the inverse; mend the file.")  # fmt: skip
    return number_formats.from_fp4(weight, scale, factor, divisor)


def _scaled(name: str, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Packed | None:
    raw, entry = checkpoint.entries, checkpoint.entries[name]
    if entry.dtype not in (*_FP8, "I8") or len(entry.shape) < 2:
        return None
    scale = _beside(name, raw, *_SCALES)
    if scale is None:
        what = "fp8" if entry.dtype in _FP8 else "int8"
        if what == "int8" or settings:
            told = " though the config speaks of quantisation" if what == "fp8" else ""
            looked = f"has no scale beside it{told} (looked for {', '.join('.' + end for end in _SCALES)})"
            return _refusal(name, entry, f"is {what} and {looked}; its numbers cannot be known.")
        return Packed(entry.shape, {"weight": name}, lambda weight: weight.float())
    exponents = raw[scale].dtype in ("U8", "F8_E8M0")
    if exponents and entry.dtype == "I8":
        return _refusal(name, entry, "is int8 with exponents for scales, in which layout is not known here.")
    parts = {"weight": name, "scale": scale}
    if entry.dtype == "I8" and (zero := _beside(name, raw, "weight_zero_point", "zero_point", "zeros", "qzeros")):
        parts["zero"] = zero
    unit = 127.0 if scale.endswith("SCB") else 1.0
    block = settings.get("weight_block_size") or (128, 128)

    def decode(weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        return number_formats.scaled(weight, scale, (int(block[0]), int(block[1])), zero) / unit

    return Packed(entry.shape, parts, decode)


def _unknown(name: str, checkpoint: Checkpoint, settings: Mapping[str, Any]) -> Packed | None:
    raw, entry = checkpoint.entries, checkpoint.entries[name]
    if not _NAMED_LIKE_WEIGHTS.search(name) or entry.dtype not in _INTEGERS:
        return None
    stem = re.sub(r"[^.]*$", "", name)
    told = settings.get("quant_method") or settings.get("quant_algo") or ""
    method = next((m for end, m in _METHODS.items() if name.endswith(end) or stem + end in raw), str(told))
    said = f" by {method}" if method else ""
    beside = [stem + end for end in _BESIDE if stem + end in raw]
    why = f"is stored{said} as {entry.dtype} {entry.shape}, which is not decoded here."
    return _refusal(name, entry, why, beside, method, _told_shape(name, checkpoint))


def _told_shape(name: str, checkpoint: Checkpoint) -> tuple[int, ...] | None:
    told = _beside(name, checkpoint.entries, "shape", "weight_shape") if name.endswith("W_q") else None
    if told is None or checkpoint.entries[told].shape != (2,):
        return None
    return tuple(int(n) for n in checkpoint.load(told, None, None))


def _by(decode: Callable[..., Tensor], first: str, *, weight: Tensor, **more: Any) -> Tensor:
    """`decode` with the weight under the name of its first argument."""
    return decode(**{first: weight}, **more)


def _refusal(
    name: str,
    entry: Entry,
    why: str,
    beside: Iterable[str] = (),
    method: str = "",
    shape: tuple[int, ...] | None = None,
) -> Packed:
    """A weight that raises when it is read; `beside` are the tensors that belong to it."""
    parts = {"weight": name} | {f"part{number}": part for number, part in enumerate(beside)}
    return Packed(shape or entry.shape, parts, partial(_refuse, why=why, method=method))


def _refuse(*, why: str, method: str) -> Tensor:
    raise UserError(f"{why} Use the model's float weights, or one stored in another way.")


def _method(packed: Packed) -> str:
    return packed.decode.keywords.get("method", "") if isinstance(packed.decode, partial) else ""
