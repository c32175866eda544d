"""One run, from a recipe to a folder. Killed at any moment, the same call continues it bit for bit (on CPU).

`train` opens what a run needs and closes it; `run_setup` makes the parts and puts them where the run stands; `run_steps` is the
loop: `take_step`, `observe`, write, save.

Legend: B batch, m micro-batches, T context.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnomon import data
from gnomon.optim import ManifoldMuon, clip_logits
from gnomon.progress import Progress
from gnomon.run_folder import checkpoint_folders
from gnomon.series import over_depth
from gnomon.train import optimizer, postmortem, saving, schedule
from gnomon.train.device import Autocast, choose_device, flushed_denormals, to_device
from gnomon.train.distributed import (
    ALONE,
    LossFn,
    Ranks,
    clip_gradients,
    grad_norm,
    large_grad_norm,
    no_gradient_sync,
    process_group,
)
from gnomon.train.recipe import Recipe, to_dict
from gnomon.train.run_data import fit_to_data
from gnomon.train.run_lock import only_one
from gnomon.train.run_setup import Run, announcement, resume_or_start, rows, set_up, standing
from gnomon.train.run_writer import Metrics, open_run
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
        # Without a checkpoint of its own to go on from, a run begins anew, its record with it.
        kept = progress["step"] if checkpoint_folders(run.folder) else -1
        for line in (announcement(run), extended, standing(run, progress)) if ranks.main else ():
            if line:
                tell(line)
        outlets = Sinks(sinks, run.folder, to_dict(recipe), kept) if ranks.main else None
        with contextlib.closing(Metrics(run.folder, kept, outlets, writes=ranks.main)) as metrics:
            return run_steps(run, progress, metrics, begins=kept < 0)


def run_steps(run: Run, progress: dict[str, Any], metrics: Metrics, *, begins: bool) -> dict[str, Any]:
    """Train from where the run stands to its last step, or until it is asked to stop; returns the last record.

    Args:
        begins: nothing of the run is on record: the model it starts with is measured first.
    """
    recipe, watch, clock = run.recipe, run.recipe.watch, _Clock(progress["seconds"])
    record, stopped = metrics.recent[-1] if metrics.recent else {}, False
    with (
        stop_on_signal() as asked_to_stop,
        saving.saver(run.ranks, recipe.parallel.async_save) as save,
        Progress("training", recipe.steps, "step", done=progress["step"]) as bar,
    ):

        def write(record: dict[str, Any]) -> None:
            for warning in metrics.write(record):
                # Remarks go to the folder alone.
                if run.ranks.main and warning.level == "warning":
                    bar.warn(str(warning))

        if begins and (found := observe(run, progress["step"], last=False)):
            write({**progress, **found, "seconds": clock.seconds()})
        for step in range(progress["step"] + 1, recipe.steps + 1):
            last = step == recipe.steps
            with clock.training(recipe.tokens_per_step):
                record, stopped = take_step(run, step, asked_to_stop(), metrics.recent)
            record |= observe(run, step, last)
            record["seconds"] = clock.seconds()
            if due(step, watch.log_every) or record.keys() & {"val_loss", "angle", "change"}:
                record["tokens_per_second"] = clock.tokens_per_second()
                write(record)
            if due(step, watch.save_every) or last or stopped:
                progress = {key: record[key] for key in ("step", "tokens", "seconds")}
                save(run.folder, run.model, run.optimizer, progress, watch.keep, run.monitor)
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
    seen = run.monitor.before_step(step)
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
            largest = over_depth("attention_logit_max", run.monitor.look(run.probe_tokens)["attention_logit_max"])
        clip_logits(model, run.anatomy, largest, recipe.optim.logit_clip, run.assignment)
    tokens = step * recipe.tokens_per_step
    told = {"step": step, "loss": loss, "lr": recipe.optim.lr * rate, "grad_norm": norm_now, "tokens": tokens}
    return told | seen, stop


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
    """What is measured after this step, where it is due; at step 0 all that ever is, of the model as it starts."""
    watch, found = run.recipe.watch, {}
    if due(step, watch.eval_every) or last:
        found["val_loss"] = evaluate(run.model, run.val, run.micro, run.autocast, run.ranks)
    with run.autocast():
        found |= run.monitor.after_step(step)
    if run.monitor.due(step) and isinstance(run.optimizer, ManifoldMuon):
        directions = run.optimizer.measure()
        found |= {key: directions[key] for key in ("tangency", "alignment") if key in directions}
    return found | ({"unigram": run.unigram} if "angle" in found else {})


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
    valued = "-" if val is None else f"{val:.3f}"
    return f"loss {record['loss']:.3f}  val {valued}  rate {record['lr']:.3g}  {speed:,.0f} tokens/s"


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
