"""What a run is made of, and where it stands; everything before its first step.

Legend: B batch, T context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gnomon import anatomy, data
from gnomon.errors import UserError
from gnomon.models.transformer import Transformer
from gnomon.monitor import Monitor
from gnomon.optim import Assignment
from gnomon.run_folder import checkpoint_folders
from gnomon.train import init_from, optimizer, saving
from gnomon.train.asking import optimizer_name
from gnomon.train.device import Autocast, autocast, choose_device, to_device
from gnomon.train.distributed import ALONE, LossFn, Ranks, parallelise
from gnomon.train.recipe import Recipe
from gnomon.train.run_data import keep_tokenizer, open_data
from gnomon.train.run_writer import check_run, write_environment
from gnomon.train.sinks import check_sinks


@dataclass(frozen=True)
class Run:
    """The parts of a run on this process.

    Args:
        loss: the model's, as a function of tokens and targets, spread over the processes and compiled where asked.
        tokens: to train on.
        val: inputs and targets (N, T) of the fixed validation slice.
        probe_tokens: (n, T), the first of these inputs.
        bytes_per_token: of the validation text; None where that is not known.
        unigram: entropy of single tokens of the training data, nats.
        adopted: what was loaded from `recipe.init`; None where nothing was.
    """

    recipe: Recipe
    folder: Path
    ranks: Ranks
    device: torch.device
    model: Transformer
    anatomy: anatomy.Anatomy
    loss: LossFn
    assignment: Assignment | None
    optimizer: torch.optim.Optimizer
    monitor: Monitor
    tokens: Any
    val: tuple[Tensor, Tensor]
    probe_tokens: Tensor
    bytes_per_token: float | None
    unigram: float
    autocast: Autocast
    adopted: dict[str, Any] | None

    @property
    def micro(self) -> int:
        """Rows of one micro-batch on this process."""
        return self.recipe.data.batch // self.recipe.data.accumulate // self.ranks.world


def set_up(recipe: Recipe, folder: Path, ranks: Ranks, device: torch.device) -> Run:
    """Make the parts of a run, from its seed or `recipe.init`; writes nothing."""
    tokens, val_tokens = ranks.together(lambda: _checked_data(recipe, folder, ranks))
    T, watch = recipe.model.context, recipe.watch
    val = to_device(data.slices(val_tokens, context=T, count=max(watch.eval_tokens // T, 1)), device)
    torch.manual_seed(recipe.seed)
    model = Transformer(recipe.model).to(device)
    counts_V = data.frequencies(tokens, recipe.model.vocab_size)
    adopted = None
    if (init := recipe.init) is not None:
        # A checkpoint of the run itself will replace what would be loaded here.
        adopted = None if checkpoint_folders(folder) else ranks.together(lambda: init_from.load_init(model, init))
    elif recipe.model.head_bias:
        model.start_at_frequencies(torch.from_numpy(counts_V).to(device))
    loss = parallelise(model, recipe, ranks)
    assigned = optimizer.assignment(model, recipe.optim)
    moved_by = optimizer.build(model, recipe.optim, assigned)
    if recipe.model.zero_init and recipe.init is None:
        _still_zero(getattr(moved_by, "placed", []))
    probe_tokens = val[0][: max(watch.probe_tokens // T, 1)]
    return Run(
        recipe, folder, ranks, device, model, anatomy.read(model), loss, assigned,
        optimizer=moved_by,
        # All rows: QK-clip acts on the largest logit there is.
        monitor=Monitor(
            model, watch.probe_every, last=recipe.steps, optimizer=moved_by, batch=probe_tokens, rows=None,
            track_every=watch.track_every, accumulate=True, since_start=watch.track_every > 0,
        ),
        tokens=tokens, val=val, probe_tokens=probe_tokens,
        bytes_per_token=val_tokens.bytes_per_token, unigram=data.entropy(counts_V),
        autocast=autocast(recipe.compute, device), adopted=adopted,
    )  # fmt: skip


def _still_zero(placed: Sequence[Mapping[str, Any]]) -> None:
    """Raise where a matrix that should start at zero was put on a manifold without a zero."""
    for row in placed:
        if row["change"] == math.inf:
            raise UserError(
                f"model.zero_init starts {row['name']} at zero, which {row['manifold']} does not hold: it would start at random. "
                "Leave zero_init out, or take an assignment that leaves these matrices free, e.g. optim.assignment=none."
            ).of("main")


def _checked_data(recipe: Recipe, folder: Path, ranks: Ranks = ALONE) -> tuple[Any, Any]:
    """Training and validation tokens, of which there are enough."""
    tokens, val_tokens = open_data(recipe, folder)
    rows(recipe, tokens, 1, ranks)
    data.slices(val_tokens, context=recipe.model.context, count=1)
    return tokens, val_tokens


def check(recipe: Recipe, folder: Path, sinks: Sequence[str] = ()) -> None:
    """Raise what `train` would raise before its first step, but for what only the model's weights could tell; writes nothing."""
    check_sinks(sinks)
    choose_device(recipe.compute)
    check_run(folder, recipe, extend=True)
    _checked_data(recipe, folder)


def resume_or_start(run: Run) -> dict[str, Any]:
    """Load the newest checkpoint of the run, or where there is none that of `recipe.branch`; returns the step, tokens and
    seconds so far."""
    ranks = run.ranks
    ranks.on_main(lambda: keep_tokenizer(run.recipe, run.folder))
    if run.adopted is not None and ranks.main:
        init_from.report_init(run.folder, run.adopted, getattr(run.optimizer, "placed", []))
    progress = saving.resume(run.folder, run.model, run.optimizer, run.monitor, ranks, run.recipe.branch)
    if progress is not None and progress["step"] > run.recipe.steps:
        beyond = f"the checkpoint is of step {progress['step']}, after the last of these {run.recipe.steps}; set more steps"
        raise UserError(beyond).of("main")
    if ranks.main:
        size = sum(p.numel() for p in run.model.parameters())
        write_environment(
            run.folder, device=str(run.device), parameters=size, processes=ranks.world, strategy=ranks.strategy,
            bytes_per_token=run.bytes_per_token,
        )  # fmt: skip
    return progress or {"step": 0, "tokens": 0, "seconds": 0.0}


def announcement(run: Run) -> str:
    """What is trained, and where."""
    recipe = run.recipe
    return (
        f"{recipe.name}: {recipe.model.residual}, {optimizer_name(recipe)}, lr {recipe.optim.lr:g}, {recipe.steps} steps, "
        f"data {recipe.data.train} ({recipe.data.tokenizer}) -> {run.folder}"
    )


def standing(run: Run, progress: dict[str, Any]) -> str:
    """Where the run goes on; "" at its beginning."""
    step, recipe = progress["step"], run.recipe
    if step == recipe.steps:
        return f"at its last step, {step}, already; more --steps would extend it"
    own = not recipe.branch or checkpoint_folders(run.folder)
    return f"goes on after step {step}" + ("" if own else f" of {recipe.branch}") if step else ""


def rows(recipe: Recipe, tokens: Any, step: int, ranks: Ranks = ALONE) -> tuple[Any, Any]:
    """Inputs and targets (B, T) of this process at a step, from 1; numpy arrays."""
    return data.batch(
        tokens, seed=recipe.seed, step=step - 1, batch=recipe.data.batch, context=recipe.model.context,
        boundaries=recipe.data.boundaries, rank=ranks.rank, world=ranks.world,
    )  # fmt: skip
