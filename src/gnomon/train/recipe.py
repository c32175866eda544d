"""A recipe is a run written down: everything that decides the result, in one frozen, typed value.

Saved whole in the run folder, compared on resume, and editable by dotted path: `replace(recipe, {"optim.lr": 3e-3})`.
Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from gnomon.errors import UserError, check_name, suggest
from gnomon.files import flatten, spelled
from gnomon.models.config import WITHOUT_NORM, TransformerConfig
from gnomon.ranges import Count, Decay, Fraction, Natural, NonNegative, Positive, ProperFraction, check_ranges, convert


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how many a step takes.

    Args:
        train: "jargon" (the embedded corpus), a token file, a folder of shards, a .txt file, or several of these with
            their shares of the rows: "0.7*out/novels + 0.3*out/code".
        val: the same for validation; None takes a folder's own validation shards, else the tail of `train`.
        val_fraction: how much of `train` that tail is.
        tokenizer: "byte", "gpt2" or a tokenizer.json; used for text, checked against token files. None takes that of the
            token files, and as many ids.
        batch: sequences a step, over all micro-batches and processes.
        accumulate: micro-batches a step; the gradient equals that of the whole batch.
        boundaries: "ignore" cuts rows anywhere, as nanoGPT does; "respect" gives each row tokens of one document only,
            and no loss to what is left of the row after its end. Validation rows are always cut anywhere.
    """

    train: str = "jargon"
    val: str | None = None
    val_fraction: ProperFraction = 0.05
    tokenizer: str | None = "byte"
    batch: Count = 16
    accumulate: Count = 1
    boundaries: str = "ignore"


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer.

    Args:
        name: "adamw"; "muon", torch.optim.Muon on the blocks' matrices and AdamW on the rest; or "manifold-muon",
            `gnomon.ManifoldMuon` with `assignment`.
        lr: peak learning rate: of everything under AdamW, of the matrices otherwise.
        adamw_lr: peak learning rate of the rest under "muon" and "manifold-muon".
        embedding_lr, head_lr, vector_lr: peak rates of AdamW's on embeddings, on an untied head, and on what has one axis
            (norms, biases, step sizes); None for AdamW's own.
        betas: decay of AdamW's two moments.
        eps: AdamW's epsilon.
        weight_decay: decoupled, on AdamW's matrices (embeddings included) and Muon's; never on norms, biases and scalars.
        adamw_weight_decay: of AdamW's matrices under "muon" and "manifold-muon"; None for `weight_decay`.
        clip: bound on the global gradient norm; None for none.
        assignment: manifolds of attention and MLP: "none", "stiefel", "dgram", "hetero", "hetero-inv" (arXiv 2606.13276),
            "sphere", "spectral-ball", "spectral-sphere", "auto", "qk-ball". On "sphere" and "auto" `lr` is the relative length of a step.
        direction: "msign", or "adam" under "sphere" or "auto": AdamW's update, with `betas` and `eps` (AdamH, arXiv 2606.16899).
        manifold_decay: weight decay of matrices on a manifold, where it means something; none in the paper.
        momentum: of the matrices.
        scale: how the rate of a matrix depends on its shape: "none", "spectral", "rms", "muon".
        solver_steps: refinements of the direction of descent.
        dgram_cap: bound on DGram's column norms, which are its singular values.
        spectral_radius: of "spectral-ball" and "spectral-sphere".
        paper: the paper's fixed-step solver and sorted DGram retraction, for reproduction.
        logit_clip: every ten steps, where an attention logit exceeds this, scale query and key down (QK-clip).
    """

    name: str = "adamw"
    lr: Positive = 1e-3
    adamw_lr: NonNegative = 6e-4
    embedding_lr: NonNegative | None = None
    head_lr: NonNegative | None = None
    vector_lr: NonNegative | None = None
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.1
    adamw_weight_decay: NonNegative | None = None
    clip: Positive | None = 1.0
    assignment: str = "hetero"
    direction: str = "msign"
    manifold_decay: NonNegative = 0.0
    momentum: Decay = 0.95
    scale: str = "none"
    solver_steps: Natural = 0
    dgram_cap: Positive | None = None
    spectral_radius: Positive = 1.0
    paper: bool = False
    logit_clip: Positive | None = None

    def unread(self) -> dict[str, str]:
        """Settings that this optimizer does not read, and what they would need."""
        manifolds = _MANIFOLDS.get(self.assignment, ()) if self.name == "manifold-muon" else ()

        def on(*kinds: str) -> tuple[str, bool]:
            those = [name for name, held in _MANIFOLDS.items() if set(kinds) & set(held)]
            return f"name manifold-muon with assignment {' or '.join(those)}", bool(set(kinds) & set(manifolds))

        matrices = ("name muon or manifold-muon", self.name != "adamw")
        ours = ("name manifold-muon", self.name == "manifold-muon")
        msign = ("name muon, or manifold-muon with direction msign", self.name != "adamw" and self.direction == "msign")
        reads = {
            "adamw_lr": matrices, "adamw_weight_decay": matrices, "momentum": msign, "assignment": ours, "direction": on("sphere"),
            "scale": on("none", "stiefel", "dgram", "spectral-ball", "spectral-sphere"), "solver_steps": on("stiefel", "dgram"),
            "paper": on("stiefel", "dgram"), "manifold_decay": on("dgram", "spectral-ball"), "dgram_cap": on("dgram"),
            "spectral_radius": on("spectral-ball", "spectral-sphere"),
        }  # fmt: skip
        return {name: needs for name, (needs, read) in reads.items() if not read}


_MANIFOLDS = {
    "none": ("none",), "stiefel": ("stiefel",), "dgram": ("dgram",), "hetero": ("stiefel", "dgram"),
    "hetero-inv": ("dgram", "stiefel"), "sphere": ("sphere",), "spectral-ball": ("spectral-ball",),
    "spectral-sphere": ("spectral-sphere",), "auto": ("sphere",), "qk-ball": ("none",),
}  # fmt: skip


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
    warmup: Natural = 20
    floor: Fraction = 0.1
    decay: Fraction = 0.2


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
    """What to measure and keep, in steps; 0 means never. The model is evaluated and probed before the first step too; the last
    is always evaluated, probed and saved.

    Args:
        log_every: training metrics.
        eval_every: validation loss.
        eval_tokens: size of the fixed validation slice.
        probe_every: what `gnomon.Monitor` sees: hidden states and attention of a fixed batch, weights, gradients, rounding.
        probe_tokens: size of that batch.
        track_every: continuity across depth of gradients, their sum and the weights (keeps two copies of the matrices).
        save_every: checkpoints.
        keep: checkpoints kept; older ones are removed after a newer one is whole.
    """

    log_every: Natural = 1
    eval_every: Natural = 100
    eval_tokens: Natural = 32768
    probe_every: Natural = 50
    probe_tokens: Natural = 1024
    track_every: Natural = 0
    save_every: Natural = 100
    keep: Natural = 2


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
        branch: a run folder or one of its checkpoints from which this run goes on, at its step, with its weights and its
            optimizer's state; other settings than the shape of the model may be new.
    """

    name: str
    steps: Count
    model: TransformerConfig
    seed: Annotated[int, "[0, 18446744073709551616)"] = 0
    init: str | None = None
    branch: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self) -> None:
        check_name("optim.name", self.optim.name, ("adamw", "muon", "manifold-muon"))
        check_name("optim.assignment", self.optim.assignment, _MANIFOLDS)
        check_name("optim.direction", self.optim.direction, ("msign", "adam"))
        check_name("data.boundaries", self.data.boundaries, ("ignore", "respect"))
        check_name("schedule.name", self.schedule.name, ("cosine", "wsd", "constant"))
        check_name("compute.precision", self.compute.precision, ("fp32", "bf16"))
        check_name("parallel.strategy", self.parallel.strategy, ("auto", "none", "ddp", "fsdp"))
        check_ranges(self)
        if self.init is not None and self.branch is not None:
            raise UserError("init and branch are two places to start from; give one of them")
        if self.data.batch % self.data.accumulate:
            raise UserError(
                f"data.batch {self.data.batch} is not a multiple of data.accumulate {self.data.accumulate}; "
                "batch counts the sequences of a whole step"
            )
        for name, needs in self.optim.unread().items():
            if (value := getattr(self.optim, name)) != getattr(OptimConfig(), name):
                raise UserError(f"optim.{name} is {value!r}, but nothing reads it: it needs optim.{needs}")

    def at(self, lr: float, seed: int) -> Recipe:
        """The same recipe at another learning rate and seed, the two things that are swept most."""
        return dataclasses.replace(self, seed=seed, optim=dataclasses.replace(self.optim, lr=lr))

    def shortened(self, share: float) -> Recipe:
        """A run of its own that takes this share of the steps: warm-up, and what is measured on the way, shrink with it."""
        watch = {key: max(round(getattr(self.watch, key) * share), 1) for key in ("eval_every", "track_every") if getattr(self.watch, key)}
        return dataclasses.replace(
            self,
            steps=max(round(self.steps * share), 1),
            schedule=dataclasses.replace(self.schedule, warmup=round(self.schedule.warmup * share)),
            watch=dataclasses.replace(self.watch, **watch),
        )

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch * self.model.context


def unread(recipe: Recipe) -> dict[str, str]:
    """Settings that nothing reads in this recipe, by path: what they would need."""
    model, schedule = recipe.model, recipe.schedule
    normless = model.residual in WITHOUT_NORM
    others = {
        "schedule.decay": ("schedule.name wsd", schedule.name == "wsd"),
        "schedule.floor": ("schedule.name cosine or wsd", schedule.name != "constant"),
        "data.val_fraction": ("data.val null", recipe.data.val is None),
        "model.rope_base": ("model.positions rope", model.positions == "rope"),
        "model.norm": ("a residual that has norms", not normless),
        "model.norm_eps": (
            "a residual that has norms, or model.qk_norm", not normless and model.residual != "pre-dyt" or model.qk_norm
        ),
    }
    found = {path: needs for path, (needs, read) in others.items() if not read}
    return found | {f"optim.{name}": f"optim.{needs}" for name, needs in recipe.optim.unread().items()}


def to_dict(recipe: Any) -> dict[str, Any]:
    """Nested plain values of a recipe or a part of one, as in recipe.json. Infinity, which JSON lacks, reads "inf".

    A recipe holds no setting that its optimizer ignores.
    """
    values = spelled(dataclasses.asdict(recipe))
    if isinstance(recipe, Recipe):
        _drop(values["optim"], recipe.optim.unread())
    return values


def _drop(values: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        values.pop(name, None)


def from_dict(values: Mapping[str, Any], kind: type = Recipe) -> Any:
    """The inverse of `to_dict`. Strict: an unknown key or a value of the wrong type is a `UserError` with its path."""
    optim = values.get("optim") if kind is Recipe and isinstance(values, Mapping) else None
    # Older versions wrote every setting of the optimizer, those it does not read included.
    if isinstance(optim, Mapping) and {"adamw_lr", "momentum", "assignment"} <= optim.keys():
        optim = dict(optim)
        _drop(optim, _build(OptimConfig, optim, "optim.").unread())
        values = {**values, "optim": optim}
    return _build(kind, values, "")


def replace(recipe: Recipe, changes: Mapping[str, Any], *, shared: bool = False) -> Recipe:
    """A recipe with some values changed by dotted path, e.g. {"model.width": 256, "model.residual_options.p": 2}.

    String values are read as JSON where they are JSON (`3`, `true`, `null`, `[0.9, 0.99]`) and as themselves otherwise.

    Args:
        shared: the changes are for many recipes: those that nothing in this one reads are passed over.

    Raises:
        UserError: an unknown setting, a value that cannot be, or (unless `shared`) a setting that nothing would read.
    """
    values = spelled(dataclasses.asdict(recipe))
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
    # What the old optimizer read and the new one does not.
    given = {path.removeprefix("optim.") for path in changes} if not shared else set()
    _drop(values["optim"], _build(OptimConfig, values["optim"], "optim.").unread().keys() - given)
    made = _build(Recipe, values, "")
    for path, needs in () if shared else unread(made).items():
        if path in changes:
            raise UserError(f"nothing would read {path} here: it needs {needs}. Leave it out, or change that as well.")
    return made


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
    except ValueError:
        return value


def _build(kind: type, values: Any, path: str) -> Any:
    if not isinstance(values, Mapping):
        raise UserError(f"{path or 'recipe'} must be a table of settings, got {values!r}")
    hints = _plain_hints(kind)
    for key in values:
        if key not in hints:
            raise UserError(f"unknown setting {path + key!r}. {suggest(key, hints)}")
    missing = [f.name for f in dataclasses.fields(kind) if _required(f) and f.name not in values]
    if missing:
        raise UserError(f"missing setting {', '.join(path + name for name in missing)}")
    return kind(**{key: _convert(hints[key], value, path + key) for key, value in values.items()})


@functools.cache
def _plain_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _required(f: dataclasses.Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Tables become the dataclass they are for; all else is a matter of its type."""
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, path + ".")
    return convert(hint, value, path)
