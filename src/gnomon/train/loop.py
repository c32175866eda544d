"""One run, from a recipe to a folder. Killed at any moment, the same call continues it bit for bit (on CPU).

`train` opens what a run needs and closes it; `set_up` makes the parts, `resume_or_start` puts them where the run stands, and
`run_steps` is the loop: `take_step`, `observe`, write, save.

Legend: B batch, m micro-batches, T context.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnomon import anatomy, data
from gnomon.continuity import Tracker
from gnomon.errors import UserError
from gnomon.models.transformer import Transformer
from gnomon.optim import Assignment, clip_logits
from gnomon.progress import Progress
from gnomon.run_folder import checkpoint_folders
from gnomon.train import init_from, optimizer, postmortem, saving, schedule
from gnomon.train.asking import optimizer_name
from gnomon.train.device import Autocast, autocast, choose_device, flushed_denormals, to_device
from gnomon.train.distributed import (
    ALONE,
    LossFn,
    Ranks,
    clip_gradients,
    grad_norm,
    large_grad_norm,
    no_gradient_sync,
    parallelise,
    process_group,
)
from gnomon.train.probes import probe, probe_weights
from gnomon.train.recipe import Recipe
from gnomon.train.run_data import fit_to_data, keep_tokenizer, open_data
from gnomon.train.run_lock import only_one
from gnomon.train.run_writer import Metrics, check_run, open_run, write_environment
from gnomon.train.signals import stop_on_signal
from gnomon.train.sinks import Sinks, check_sinks


def train(
    recipe: Recipe,
    folder: str | Path,
    sinks: Sequence[str] = (),
    *,
    extend: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Run the recipe in `folder`, or continue the run that is there.

    Args:
        sinks: where metrics go besides `metrics.jsonl`; names of `gnomon.train.sinks.SINKS`.
        extend: a finished run may be given more steps, see `gnomon.train.run_writer.open_run`.
        tell: gets a line on what is done where, once nothing stands in the way of it, and on where it goes on.

    Returns:
        The last metric record, with `stopped` true when a signal ended the run early (after saving).

    Raises:
        UserError: the folder holds another recipe or is in use, the data do not fit the model, a sink is unknown or not
            installed, or a loss is not finite.
    """
    check_sinks(sinks)
    if recipe.data.tokenizer is None:
        recipe = fit_to_data(recipe)
    with (
        flushed_denormals(),
        process_group(recipe, choose_device(recipe.compute)) as (ranks, device),
        contextlib.ExitStack() as held,
    ):
        run = set_up(recipe, Path(folder), ranks, device)
        # All mistakes above are told before anything is written.
        extended = ranks.on_main(lambda: open_run(run.folder, recipe, extend=extend))
        ranks.on_main(lambda: held.enter_context(only_one(run.folder)))
        progress = resume_or_start(run)
        for line in (announcement(run), extended, standing(run, progress)) if ranks.main else ():
            if line:
                tell(line)
        outlets = Sinks(sinks, run.folder, recipe, progress["step"]) if ranks.main else None
        with contextlib.closing(Metrics(run.folder, progress["step"], outlets, writes=ranks.main)) as metrics:
            return run_steps(run, progress, metrics)


@dataclass(frozen=True)
class Run:
    """The parts of a run on this process.

    Args:
        loss: the model's, as a function of tokens and targets, spread over the processes and compiled where asked.
        tokens: to train on.
        val: inputs and targets (N, T) of the fixed validation slice.
        probe_tokens: (n, T), the first of these inputs.
        bytes_per_token: of the validation text; None where that is not known.
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
    tracker: Tracker | None
    tokens: Any
    val: tuple[Tensor, Tensor]
    probe_tokens: Tensor
    bytes_per_token: float | None
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
    adopted = None
    if recipe.init is not None:
        # A checkpoint of the run itself will replace what would be loaded here.
        adopted = None if checkpoint_folders(folder) else ranks.together(lambda: init_from.load_init(model, recipe.init))
    elif recipe.model.head_bias:
        model.start_at_frequencies(torch.from_numpy(data.frequencies(tokens, recipe.model.vocab_size)).to(device))
    loss = parallelise(model, recipe, ranks)
    assigned = optimizer.assignment(model, recipe.optim)
    return Run(
        recipe, folder, ranks, device, model, anatomy.read(model), loss, assigned,
        optimizer=optimizer.build(model, recipe.optim, assigned),
        tracker=Tracker(model, watch.track_every) if watch.track_every else None,
        tokens=tokens, val=val, probe_tokens=val[0][: max(watch.probe_tokens // T, 1)],
        bytes_per_token=val_tokens.bytes_per_token,
        autocast=autocast(recipe.compute, device), adopted=adopted,
    )  # fmt: skip


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
    progress = saving.resume(run.folder, run.model, run.optimizer, run.tracker, ranks, run.recipe.branch)
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


def run_steps(run: Run, progress: dict[str, Any], metrics: Metrics) -> dict[str, Any]:
    """Train from where the run stands to its last step, or until it is asked to stop; returns the last record."""
    recipe, watch, clock = run.recipe, run.recipe.watch, _Clock(progress["seconds"])
    record, stopped = metrics.recent[-1] if metrics.recent else {}, False
    with (
        stop_on_signal() as asked_to_stop,
        saving.saver(run.ranks, recipe.parallel.async_save) as save,
        Progress("training", recipe.steps, "step", done=progress["step"]) as bar,
    ):
        for step in range(progress["step"] + 1, recipe.steps + 1):
            last = step == recipe.steps
            with clock.training(recipe.tokens_per_step):
                record, stopped = take_step(run, step, asked_to_stop(), metrics.recent)
            record |= observe(run, step, last)
            record["seconds"] = clock.seconds()
            if due(step, watch.log_every) or record.keys() & {"val_loss", "angle", "change"}:
                record["tokens_per_second"] = clock.tokens_per_second()
                metrics.write(record)
            if due(step, watch.save_every) or last or stopped:
                progress = {key: record[key] for key in ("step", "tokens", "seconds")}
                save(run.folder, run.model, run.optimizer, progress, watch.keep, run.tracker)
            if run.ranks.main:
                bar.advance(1, note=describe(record, metrics.recent))
            if stopped:
                return {**record, "stopped": not last}
    return {**record, "stopped": False}


def take_step(run: Run, step: int, stop: bool, recent: list[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Update number `step`, from 1; returns its record, and whether any process was asked to stop.

    Raises:
        NonFinite: the loss or a gradient is not finite; no weight was changed.
    """
    recipe, model, ranks = run.recipe, run.model, run.ranks
    x_BT, y_BT = to_device(rows(recipe, run.tokens, step, ranks), run.device)
    rate = schedule.ratio(recipe.schedule, step - 1, recipe.steps)
    optimizer.set_rate(run.optimizer, rate)
    run.optimizer.zero_grad(set_to_none=True)
    share = backward(run.loss, model, x_BT.split(run.micro), y_BT.split(run.micro), run.autocast, ranks)
    if run.tracker is not None:
        run.tracker.before_step(step)
    norm: Tensor | float = grad_norm(model)
    # One wait for the device a step: the price of never applying a bad update.
    loss, norm_now, stop = ranks.reduce_step(share, norm, stop)
    if math.isfinite(loss) and not math.isfinite(norm_now):
        norm = norm_now = large_grad_norm(model)
    if not math.isfinite(loss + norm_now):
        recent = [*recent, {"step": step, "loss": loss, "grad_norm": norm_now}]
        batches = list(zip(x_BT.split(run.micro), y_BT.split(run.micro)))
        raise postmortem.write_postmortem(run.folder, step, model, batches, recent, run.autocast, ranks)
    if recipe.optim.clip is not None:
        clip_gradients(model, recipe.optim.clip, norm)
    run.optimizer.step()
    if recipe.optim.logit_clip is not None and due(step, 10):
        with run.autocast():
            largest = probe(model, run.probe_tokens)["attention_logit_max"]
        clip_logits(model, run.anatomy, largest, recipe.optim.logit_clip, run.assignment)
    tokens = step * recipe.tokens_per_step
    return {"step": step, "loss": loss, "lr": recipe.optim.lr * rate, "grad_norm": norm_now, "tokens": tokens}, stop


def rows(recipe: Recipe, tokens: Any, step: int, ranks: Ranks = ALONE) -> tuple[Any, Any]:
    """Inputs and targets (B, T) of this process at a step, from 1; numpy arrays."""
    return data.batch(
        tokens, seed=recipe.seed, step=step - 1, batch=recipe.data.batch, context=recipe.model.context,
        boundaries=recipe.data.boundaries, rank=ranks.rank, world=ranks.world,
    )  # fmt: skip


def backward(
    loss_fn: LossFn,
    model: nn.Module,
    x_mBT: Sequence[Tensor],
    y_mBT: Sequence[Tensor],
    cast: Autocast,
    ranks: Ranks,
) -> Tensor:
    """Add up the gradients of the micro-batches; returns this process's share of the mean loss.

    The mean is over the targets of the whole step, since rows that end early have fewer.
    """
    loss = torch.zeros((), device=x_mBT[0].device)
    targets = ranks.total(torch.stack([(y != data.NO_TARGET).sum() for y in y_mBT]).sum())
    for index, (x, y) in enumerate(zip(x_mBT, y_mBT)):
        with no_gradient_sync(loss_fn, model) if index + 1 < len(x_mBT) else contextlib.nullcontext():
            with cast():
                part = loss_fn(x, y) * ((y != data.NO_TARGET).sum() / targets)
            # Gradients are averaged over processes where they should be added.
            (part * ranks.world).backward()
        loss += part.detach()
    return loss


def observe(run: Run, step: int, last: bool) -> dict[str, Any]:
    """What is measured after this step, where it is due."""
    watch, found = run.recipe.watch, {}
    if due(step, watch.eval_every) or last:
        found["val_loss"] = evaluate(run.model, run.val, run.micro, run.autocast, run.ranks)
    if due(step, watch.probe_every) or last:
        with run.autocast():
            found |= probe(run.model, run.probe_tokens)
        found |= probe_weights(run.model, run.anatomy, run.optimizer)
    if run.tracker is not None:
        found |= run.tracker.after_step(step)
    return found


@torch.no_grad()
def evaluate(
    model: nn.Module, val: tuple[Tensor, Tensor], micro: int, cast: Autocast, ranks: Ranks = ALONE
) -> float:
    """Mean loss over the fixed validation windows, in nats a token; each process takes its share of them."""
    total, size = 0.0, micro * ranks.world
    for x, y in zip(val[0].split(size), val[1].split(size)):
        mine = slice(*(len(x) * r // ranks.world for r in (ranks.rank, ranks.rank + 1)))
        # Sharded models run in step, so a process without a row of the last batch runs one that does not count.
        some = mine if mine.start < mine.stop else slice(0, 1)
        with cast():
            total += model.loss(x[some], y[some]).item() * (mine.stop - mine.start)
    return ranks.sum(total) / len(val[0])


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def describe(record: dict[str, Any], recent: list[dict[str, Any]]) -> str:
    """A line for the progress bar."""
    val = next((r["val_loss"] for r in reversed(recent) if "val_loss" in r), None)
    speed = next((r["tokens_per_second"] for r in reversed(recent) if "tokens_per_second" in r), 0)
    return f"loss {record['loss']:.3f}  val {'-' if val is None else format(val, '.3f')}  {speed:,.0f} tok/s"


class _Clock:
    """Seconds of the run, and the speed of training alone since it was last asked for."""

    def __init__(self, before: float):
        self._started, self._trained, self._tokens = time.monotonic() - before, 0.0, 0

    @contextlib.contextmanager
    def training(self, tokens: int) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._trained, self._tokens = self._trained + time.monotonic() - start, self._tokens + tokens

    def seconds(self) -> float:
        return round(time.monotonic() - self._started, 3)

    def tokens_per_second(self) -> float:
        speed = round(self._tokens / self._trained, 1)
        self._trained, self._tokens = 0.0, 0
        return speed
