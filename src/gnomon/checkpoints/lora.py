"""LoRA adapters (PEFT): the update scale * B A of every adapted weight, alone or added to its base.

Hu et al., arXiv:2106.09685, equation 3: W = W_0 + (alpha / r) B A, with A (r, in) and B (out, r); rank-stabilised adapters
divide by sqrt(r) (arXiv:2312.03732). DoRA gives each output a length of its own (arXiv:2402.09353, equation 5):
W = m (W_0 + scale B A) / |W_0 + scale B A|. Packed experts (E, ., .) have A (E r, .), expert by expert, and B (., r E), rank by rank.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnomon.checkpoints.checkpoint import Buffer, Checkpoint, Entry, size_text
from gnomon.errors import UserError

_PART = re.compile(
    r"^(?P<module>.+)\.lora_(?:(?P<embedding>embedding_)?(?P<side>[AB])|(?P<magnitude>magnitude_vector))"
    r"(?:\.(?P<adapter>(?!weight$)[^.]+))?(?:\.weight)?$"
)
# What other adapters leave in their files.
_OTHERS = {
    "lora_E": "AdaLoRA", "ranknum": "AdaLoRA", "hada_w": "LoHa", "lokr_w": "LoKr", "vera_lambda": "VeRA", "oft_": "OFT",
    "boft_": "BOFT", "ia3_l": "IA3", "lora_bias": "LoRA with biases", "lora_B.bias": "LoRA with biases",
}  # fmt: skip
_OTHER = re.compile(rf"\.({'|'.join(map(re.escape, _OTHERS))})")
_TRANSPOSED_EXPERTS = ("gpt_oss", "llama4", "llama4_text")


class Factors(NamedTuple):
    """Names of what adapts one module, and the scale of their product."""

    module: str
    A: str
    B: str
    magnitude: str | None
    embedding: bool
    scale: float


def is_adapter(checkpoint: Checkpoint) -> bool:
    return any(".lora_" in name for name in checkpoint.entries)


def check_known(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Raise a `UserError` where the adapter is of another kind than LoRA."""
    kind = str(config.get("peft_type") or "LORA")
    told = next((told for name in checkpoint.entries if (told := _OTHER.search(name))), None)
    found = _OTHERS[told[1]] if told else None
    if found or kind != "LORA":
        raise UserError(
            f"{checkpoint.name} is an adapter of the kind {found or kind}, and only LoRA and DoRA are read. Merge it into its "
            "base (peft's merge_and_unload) and save that."
        )


def update(adapter: Checkpoint, config: Mapping[str, Any], base: Checkpoint | None = None) -> Checkpoint:
    """A checkpoint of the updates of `adapter`; with `base`, of the base with the updates added.

    A full state dict that holds its base beside the factors is its own base.

    Args:
        config: contents of adapter_config.json; empty when it is lost, and then alpha / r is taken as 1 where no base is
            added: no measure of directions depends on it.

    Raises:
        UserError: a factor has no partner, the factors do not fit each other, a target is not in `base`, or the scale is
            needed and not known.
    """
    rest = {_plain(name): name for name in adapter.entries if ".lora_" not in name}
    if any(".base_layer." in name for name in rest.values()):
        if base is not None:
            raise UserError(f"{adapter.name} holds its own base weights beside the factors. Leave the base out.")
        base, rest = _renamed(adapter, rest), {}
    if base is not None and not config:
        raise UserError(f"{adapter.name} has no adapter_config.json; its lora_alpha is needed to add the update to a base.")
    notes = [] if config else ["adapter_config.json is missing: alpha / r was taken as 1"]
    load: dict[str, Any] = {}
    entries: dict[str, Entry] = dict(base.entries) if base else {}
    replaced = {name: own for name, own in rest.items() if base and name in base.entries}
    for name, own in replaced.items():
        entries[name], load[name] = adapter.entries[own], partial(adapter.load, own, None, None)
    for one in _factors(adapter, config):
        packed, target = _target(one, adapter, base, set(load))
        if packed and base is None:
            notes.append(f"{one.module}: the update of packed experts was left out; how they lie is only known with the base")
            continue
        entry, made = _sum(one, target, packed, adapter, config, base)
        entries[target], load[target] = entry, made
    if not load:
        raise UserError(f"{adapter.name} holds no LoRA factors (…lora_A.weight, …lora_B.weight) that can be used. {'; '.join(notes)}")
    if rest and base is None:
        notes.append(f"{len(rest)} whole tensors beside the factors (such as {next(iter(rest))}) were left out")
    if base is None and any("magnitude" in name for name in adapter.entries):
        notes.append("DoRA: the lengths (magnitudes) were left out, since what they change is only known with the base (--base)")
    if str(config.get("init_lora_weights")).startswith(("pissa", "olora", "corda", "loftq")) and base:
        notes.append(f"init_lora_weights is {config['init_lora_weights']}: the base must be the one that was changed with it")
    notes.append(f"LoRA update added to {base.name}" if base else "LoRA update alone (no base given)")

    def read(name: str, buffer: Buffer | None, index: int | None) -> Tensor:
        if name not in load:
            assert base is not None
            return base.load(name, buffer, index)
        return load[name]() if index is None else load[name]()[index]

    known = adapter.config or (base.config if base else {})
    return dataclasses.replace(
        adapter, entries=entries, load=read, config=known, notes=(*adapter.notes, *(base.notes if base else ()), *notes)
    )


def _factors(adapter: Checkpoint, config: Mapping[str, Any]) -> list[Factors]:
    modules: dict[str, dict[str, str]] = {}
    kinds: set[str] = set()
    embeddings: set[str] = set()
    for name in adapter.entries:
        if found := _PART.match(name):
            modules.setdefault(found["module"], {})[found["side"] or "magnitude"] = name
            kinds |= {found["adapter"] or "default"}
            embeddings |= {found["module"]} if found["embedding"] else set()
    if len(kinds) > 1:
        raise UserError(f"{adapter.name} holds several adapters ({', '.join(sorted(kinds))}). Save the one you mean alone.")
    factors = []
    for module, sides in modules.items():
        if not {"A", "B"} <= set(sides):
            raise UserError(
                f"{adapter.name}: {next(iter(sides.values()))!r} has no partner lora_{'B' if 'A' in sides else 'A'}. "
                "The file is cut; download it again."
            )
        A, B = (adapter.entries[sides[side]] for side in "AB")
        if len(A.shape) != 2 or len(B.shape) != 2 or A.shape[0] != B.shape[1] or not A.shape[0]:
            raise UserError(f"{adapter.name}: the factors of {module!r} do not fit: A {A.shape}, B {B.shape}.")
        rank = _number(config, "r", "rank_pattern", module, A.shape[0])
        # Packed experts share a tensor: its first axis is a multiple of the rank.
        rank = rank if rank and A.shape[0] % rank == 0 and config.get("target_parameters") else A.shape[0]
        alpha = _number(config, "lora_alpha", "alpha_pattern", module, None) if config else rank
        if alpha is None:
            raise UserError(f"adapter_config.json of {adapter.name} has no lora_alpha; it is needed to scale the update.")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        magnitude = sides.get("magnitude")
        factors.append(Factors(module, sides["A"], sides["B"], magnitude, module in embeddings, scale))
    return factors


def _number(config: Mapping[str, Any], key: str, patterns: str, module: str, otherwise: Any) -> Any:
    """A number of adapter_config.json, where a pattern may give a module one of its own."""
    found = [config.get(key)]
    own = config.get(patterns) or {}
    if not isinstance(own, Mapping):
        raise UserError(f"{patterns} of adapter_config.json is {own!r}; expected a table from patterns to numbers.")
    for pattern, value in own.items():
        try:
            # As peft reads it: the whole name, or its end after a dot.
            if re.match(rf"(.*\.)?({pattern})$", _plain(module)):
                found.insert(0, value)
                break
        except re.error as error:
            raise UserError(f"{patterns} of adapter_config.json has {pattern!r}, which is no regular expression ({error}).") from None
    if found[0] is None:
        return otherwise
    if isinstance(found[0], bool) or not isinstance(found[0], (int, float)) or not math.isfinite(found[0]):
        raise UserError(f"{key} of adapter_config.json is {found[0]!r} for {module!r}; expected a number.")
    return found[0]


def _plain(name: str) -> str:
    """A tensor's name in the base: without what peft wraps it in."""
    name = re.sub(r"^base_model\.model\.", "", name).replace(".base_layer", "")
    return re.sub(r"\.modules_to_save\.[^.]+(?=\.)", "", name)


def _renamed(adapter: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    def load(name: str, buffer: Buffer | None, index: int | None) -> Tensor:
        return adapter.load(names[name], buffer, index)

    entries = {name: adapter.entries[own] for name, own in names.items()}
    return dataclasses.replace(adapter, entries=entries, load=load, name=f"the base in {adapter.name}", notes=())


def _target(one: Factors, adapter: Checkpoint, base: Checkpoint | None, taken: set[str]) -> tuple[bool, str]:
    """Whether packed experts are adapted, and the tensor of the base (or the name the update gets without one)."""
    module = _plain(one.module)
    A, B = adapter.entries[one.A].shape, adapter.entries[one.B].shape
    name = f"{module}.weight"
    if base is None:
        return bool(re.search(r"\.experts$", module)), name
    sides = {A[1], B[0]}
    near = [other for other in base.entries if other == name] or [
        other for other in base.entries if other.endswith("." + name) or name.endswith("." + other)
    ]
    if len(near) == 1:
        return False, near[0]
    # A parameter that is no module's weight: peft names its owner, and the shapes tell which it is.
    inner = [
        other
        for other, entry in base.entries.items()
        if other.rpartition(".")[0].endswith(module) and len(entry.shape) == 3
        and set(entry.shape[1:]) == sides and A[0] % entry.shape[0] == 0 and other not in taken
    ]  # fmt: skip
    if len(inner) == 1:
        return True, inner[0]
    raise UserError(
        f"the adapter changes {name!r}, and {base.name} has {len(near) or len(inner)} tensors of that name. "
        "Give the base this adapter was trained on."
    )


def _sum(
    one: Factors, target: str, packed: bool, adapter: Checkpoint, config: Mapping[str, Any], base: Checkpoint | None
) -> tuple[Entry, Any]:
    """The entry of an adapted weight, and how its numbers are made."""
    A, B = adapter.entries[one.A], adapter.entries[one.B]
    was = base.entries[target] if base else None
    transposed = one.embedding or bool(config.get("fan_in_fan_out"))
    as_stored = False
    if packed and was is not None:
        _, first, second = was.shape
        as_stored = _in_first(config, base, first, second) if first == second else A.shape[1] == first
        shape = was.shape
    else:
        shape = (A.shape[1], B.shape[0]) if transposed else (B.shape[0], A.shape[1])
    if was is not None and was.shape != shape:
        raise UserError(
            f"{adapter.name}: the update of {target!r} is {size_text(shape)}, its target in {base.name if base else ''} is "
            f"{size_text(was.shape)}. This adapter belongs to another base."
        )

    def make() -> Tensor:
        a, b = (adapter.load(name, None, None).float() for name in (one.A, one.B))
        if packed:
            experts = shape[0]
            # A is expert by expert, B rank by rank.
            a_Eri, b_orE = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts)
            delta = torch.einsum("ore,eri->eio" if as_stored else "ore,eri->eoi", b_orE, a_Eri) * one.scale
        else:
            delta = one.scale * (b @ a)
            delta = delta.T if transposed else delta
        if base is None:
            return delta
        whole = base.load(target, None, None).float() + delta
        if one.magnitude is None:
            return whole
        m = adapter.load(one.magnitude, None, None).float().flatten()
        outputs = 1 if transposed else 0
        if len(m) != whole.shape[outputs]:
            raise UserError(f"{adapter.name}: {one.magnitude!r} has {len(m)} numbers for {whole.shape[outputs]} outputs.")
        m = m if transposed else m[:, None]
        norm = whole.norm(dim=1 - outputs, keepdim=True)
        return m * whole / norm.masked_fill(norm == 0, 1)

    nbytes = A.nbytes + B.nbytes + (was.nbytes if was else 0)
    return (was or A)._replace(shape=shape, nbytes=nbytes), make


def _in_first(config: Mapping[str, Any], base: Checkpoint | None, first: int, second: int) -> bool:
    """Of square packed experts, whether A reads their first axis. Before peft 0.19.1 it did; since then it reads the inputs."""
    version = tuple(int(n) for n in re.findall(r"\d+", str(config.get("peft_version") or ""))[:3])
    if not version:
        raise UserError(
            f"the adapted experts are square ({first} x {second}), and adapter_config.json has no peft_version to tell which side "
            "the factors read (it changed at 0.19.1). Add it."
        )
    model = str((base.config if base else {}).get("model_type", ""))
    return version < (0, 19, 1) or model in _TRANSPOSED_EXPERTS
