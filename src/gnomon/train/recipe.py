"""A recipe is a run written down: everything that decides the result, in one frozen, typed value.

Saved whole in the run folder, compared on resume, and editable by dotted path: `replace(recipe, {"optim.lr": 3e-3})`.
Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gnomon.errors import UserError, check_name, suggest
from gnomon.files import flatten, restored, spelled
from gnomon.models.config import TransformerConfig


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how many a step takes.

    Args:
        train: "jargon" (the embedded corpus), a token file, a folder of shards, a .txt file, or several of these with
            their shares of the rows: "0.7*out/novels + 0.3*out/code".
        val: the same for validation; None takes a folder's own validation shards, else the tail of `train`.
        val_fraction: how much of `train` that tail is.
        tokenizer: "byte", "gpt2" or a tokenizer.json; used for text, checked against token files.
        batch: sequences a step, over all micro-batches and processes.
        accumulate: micro-batches a step; the gradient equals that of the whole batch.
        boundaries: "ignore" cuts rows anywhere, as nanoGPT does; "respect" gives each row tokens of one document only,
            and no loss to what is left of the row after its end. Validation rows are always cut anywhere.
    """

    train: str = "jargon"
    val: str | None = None
    val_fraction: float = 0.05
    tokenizer: str = "byte"
    batch: int = 16
    accumulate: int = 1
    boundaries: str = "ignore"


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer.

    Args:
        name: "adamw"; "muon", torch.optim.Muon on the blocks' matrices and AdamW on the rest; or "manifold-muon",
            `gnomon.ManifoldMuon` with `assignment`.
        lr: peak learning rate: of everything under AdamW, of the matrices otherwise.
        adamw_lr: peak learning rate of the rest under "muon" and "manifold-muon".
        betas: decay of AdamW's two moments.
        eps: AdamW's epsilon.
        weight_decay: decoupled, on AdamW's matrices (embeddings included) and Muon's; never on norms, biases and scalars.
        clip: bound on the global gradient norm; None for none.
        assignment: manifolds of attention and MLP by the names of arXiv 2606.13276.
        manifold_decay: weight decay of matrices on a manifold, where it means something; none in the paper.
        momentum: of the matrices.
        scale: how the rate of a matrix depends on its shape: "none", "spectral", "rms", "muon".
        solver_steps: refinements of the direction of descent.
        dgram_cap: bound on DGram's column norms, which are its singular values.
        paper: the paper's fixed-step solver and sorted DGram retraction, for reproduction.
        logit_clip: every ten steps, where an attention logit exceeds this, scale query and key down (QK-clip).
    """

    name: str = "adamw"
    lr: float = 1e-3
    adamw_lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0
    assignment: str = "hetero"
    manifold_decay: float = 0.0
    momentum: float = 0.95
    scale: str = "none"
    solver_steps: int = 0
    dgram_cap: float | None = None
    paper: bool = False
    logit_clip: float | None = None


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the steps.

    Args:
        name: "cosine", "wsd" (warm-up, stable, linear decay) or "constant"; all start with a linear warm-up.
        warmup: steps of warm-up.
        floor: final rate as a fraction of the peak.
        decay: for "wsd", the fraction of the run spent decaying.
    """

    name: str = "cosine"
    warmup: int = 20
    floor: float = 0.1
    decay: float = 0.2


@dataclass(frozen=True)
class ComputeConfig:
    """How to compute.

    Args:
        device: "auto" (cuda, then mps, then cpu), "cpu", "cuda", "cuda:1", "mps".
        precision: "fp32", or "bf16" for autocast with fp32 weights.
        compile: run the model through torch.compile.
    """

    device: str = "auto"
    precision: str = "fp32"
    compile: bool = False


@dataclass(frozen=True)
class ParallelConfig:
    """How processes share a run, and where memory is short. It does not change what is computed, only how it is rounded,
    so a resumed run may have other settings here.

    Args:
        strategy: "auto" ("ddp" when torchrun started several processes), "none", "ddp" (weights on every process) or
            "fsdp" (weights, gradients and optimizer state cut over processes, block by block).
        recompute: keep only the input of each block for the backward pass, and compute the rest again.
        async_save: with several processes, write checkpoints while training goes on.
    """

    strategy: str = "auto"
    recompute: bool = False
    async_save: bool = True


@dataclass(frozen=True)
class WatchConfig:
    """What to measure and keep, in steps; 0 means never. The last step is always evaluated, probed and saved.

    Args:
        log_every: training metrics.
        eval_every: validation loss.
        eval_tokens: size of the fixed validation slice.
        probe_every: stream norm, angles, attention logits and entropy on a fixed batch.
        probe_tokens: size of that batch.
        track_every: continuity across depth of gradients, their sum and the weights (keeps two copies of the matrices).
        save_every: checkpoints.
        keep: checkpoints kept; older ones are removed after a newer one is whole.
    """

    log_every: int = 1
    eval_every: int = 100
    eval_tokens: int = 32768
    probe_every: int = 50
    probe_tokens: int = 1024
    track_every: int = 0
    save_every: int = 100
    keep: int = 2


@dataclass(frozen=True)
class Recipe:
    """One run.

    Args:
        name: the preset it came from.
        steps: optimizer steps.
        model: see `TransformerConfig`.
        seed: of the init and of the order of batches.
        init: a checkpoint to start from instead of the seed's weights: a Hugging Face GPT-2 or Llama, or one of gnomon's own,
            by folder, file or hub id.
    """

    name: str
    steps: int
    model: TransformerConfig
    seed: int = 0
    init: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self) -> None:
        check_name("optim.name", self.optim.name, ("adamw", "muon", "manifold-muon"))
        check_name("optim.assignment", self.optim.assignment, ("none", "stiefel", "dgram", "hetero", "hetero-inv"))
        check_name("data.boundaries", self.data.boundaries, ("ignore", "respect"))
        check_name("schedule.name", self.schedule.name, ("cosine", "wsd", "constant"))
        check_name("compute.precision", self.compute.precision, ("fp32", "bf16"))
        check_name("parallel.strategy", self.parallel.strategy, ("auto", "none", "ddp", "fsdp"))
        if self.steps < 1:
            raise UserError(f"steps must be at least 1, got {self.steps}")
        if self.data.batch % self.data.accumulate:
            raise UserError(
                f"data.batch {self.data.batch} is not a multiple of data.accumulate {self.data.accumulate}; "
                "batch counts the sequences of a whole step"
            )
        if not self.optim.lr > 0:
            raise UserError(f"optim.lr must be positive, got {self.optim.lr}")

    def at(self, lr: float, seed: int) -> Recipe:
        """The same recipe at another learning rate and seed, the two things that are swept most."""
        return dataclasses.replace(self, seed=seed, optim=dataclasses.replace(self.optim, lr=lr))

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch * self.model.context


def to_dict(recipe: Any) -> dict[str, Any]:
    """Nested plain values of a recipe or a part of one, as in recipe.json. Infinity, which JSON lacks, reads "inf"."""
    return spelled(dataclasses.asdict(recipe))


def from_dict(values: Mapping[str, Any], kind: type = Recipe) -> Any:
    """The inverse of `to_dict`. Strict: an unknown key or a value of the wrong type is a `UserError` with its path."""
    return _build(kind, values, "")


def replace(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A recipe with some values changed by dotted path, e.g. {"model.width": 256, "model.residual_options.p": 2}.

    String values are read as JSON where they are JSON (`3`, `true`, `null`, `[0.9, 0.99]`) and as themselves otherwise.
    """
    values = to_dict(recipe)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node = values
        for key in parents:
            if not isinstance(node.get(key), dict):
                raise UserError(f"unknown setting {path!r}. {suggest(path, flatten(values))}")
            node = node[key]
        if last not in node and parents != ["model", "residual_options"]:
            raise UserError(f"unknown setting {path!r}. {suggest(path, flatten(values))}")
        node[last] = _parse(value)
    return from_dict(values)


def difference(old: Recipe, new: Recipe) -> list[str]:
    """Lines `path: old -> new` for every value that differs."""
    a, b = flatten(to_dict(old)), flatten(to_dict(new))
    absent = "(not set)"
    return [
        f"{k}: {a.get(k, absent)} -> {b.get(k, absent)}" for k in sorted(a | b) if a.get(k, absent) != b.get(k, absent)
    ]


def _parse(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _build(kind: type, values: Any, path: str) -> Any:
    if not isinstance(values, Mapping):
        raise UserError(f"{path or 'recipe'} must be a table of settings, got {values!r}")
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise UserError(f"unknown setting {path + key!r}. {suggest(key, hints)}")
    missing = [f.name for f in dataclasses.fields(kind) if _required(f) and f.name not in values]
    if missing:
        raise UserError(f"missing setting {', '.join(path + name for name in missing)}")
    return kind(**{key: _convert(hints[key], value, path + key) for key, value in values.items()})


def _required(f: dataclasses.Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Check `value` against a type hint; int is accepted for float and a list for a tuple."""
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, path + ".")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = [a for a in arguments if a is not type(None)]
        return _convert(hint, value, path)
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(arguments):
        return tuple(_convert(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(arguments, value)))
    if origin is dict and isinstance(value, Mapping):
        return restored(value)
    if hint is float:
        value = restored(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    expected = getattr(hint, "__name__", str(hint))
    raise UserError(f"{path} should be of type {expected}, got {value!r} ({type(value).__name__})")
