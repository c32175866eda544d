"""One run, from a recipe to a folder. Killed at any moment, the same call continues it bit for bit (on CPU).

Legend: B batch, T context.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnomon import anatomy, data
from gnomon.continuity import Tracker
from gnomon.errors import UserError
from gnomon.models.transformer import Transformer
from gnomon.optim import clip_logits
from gnomon.progress import Progress
from gnomon.train import init_from, optimizer, postmortem, saving, schedule
from gnomon.train.distributed import ALONE, LossFn, Ranks, grad_norm, held, launched, spread
from gnomon.train.probes import probe, probe_weights
from gnomon.train.recipe import ComputeConfig, Recipe
from gnomon.train.run_writer import Metrics, open_run, write_environment
from gnomon.train.sinks import Sinks, check_sinks


def train(recipe: Recipe, folder: str | Path, sinks: Sequence[str] = ()) -> dict[str, Any]:
    """Run the recipe in `folder`, or continue the run that is there.

    Args:
        sinks: where metrics go besides `metrics.jsonl`; names of `gnomon.train.sinks.SINKS`.

    Returns:
        The last metric record, with `stopped` true when a signal ended the run early (after saving).

    Raises:
        UserError: the folder holds another recipe, the data do not fit the model, a sink is unknown or not installed,
            or a loss is not finite.
    """
    with flushed_denormals(), launched(recipe, choose_device(recipe.compute)) as (ranks, device):
        return _train(recipe, Path(folder), sinks, ranks, device)


def _train(recipe: Recipe, folder: Path, sinks: Sequence[str], ranks: Ranks, device: torch.device) -> dict[str, Any]:
    check_sinks(sinks)
    train_tokens, val_tokens = open_data(recipe)
    torch.manual_seed(recipe.seed)
    model = Transformer(recipe.model).to(device)
    adopted = init_from.begin(model, recipe.init) if recipe.init and not saving.list_checkpoints(folder) else None
    if recipe.model.head_bias and recipe.init is None:
        counts = data.frequencies(train_tokens, recipe.model.vocab_size)
        model.start_at_frequencies(torch.from_numpy(counts).to(device))
    loss_fn = spread(model, recipe, ranks)
    optim = optimizer.build(model, recipe.optim)

    # All mistakes above are told before anything is written.
    ranks.first(lambda: open_run(folder, recipe))
    if adopted is not None and ranks.main:
        init_from.tell(folder, adopted, getattr(optim, "placed", []))
    tracker = Tracker(model, recipe.watch.track_every) if recipe.watch.track_every else None
    progress = saving.resume(folder, model, optim, tracker, ranks) or {"step": 0, "tokens": 0, "seconds": 0.0}
    if ranks.main:
        size = sum(p.numel() for p in model.parameters())
        write_environment(folder, device=str(device), parameters=size, processes=ranks.world, strategy=ranks.strategy)
    outlets = Sinks(sinks, folder, recipe, progress["step"]) if ranks.main else None
    metrics = Metrics(folder, progress["step"], outlets, writes=ranks.main)
    cast = autocast(recipe.compute, device)

    parts = anatomy.read(model)
    watch, T = recipe.watch, recipe.model.context
    micro = recipe.data.batch // recipe.data.accumulate // ranks.world
    val = to_device(data.slices(val_tokens, context=T, count=max(watch.eval_tokens // T, 1)), device)
    probe_tokens = val[0][: max(watch.probe_tokens // T, 1)]
    record: dict[str, Any] = metrics.recent[-1] if metrics.recent else {}
    started = time.monotonic() - progress["seconds"]
    training, counted = 0.0, 0

    with (
        stop_signal() as stopped,
        saving.saver(ranks, recipe.parallel.async_save) as save,
        Progress("training", recipe.steps, "step", done=progress["step"]) as bar,
        contextlib.closing(metrics),
    ):
        for step in range(progress["step"] + 1, recipe.steps + 1):
            tick = time.monotonic()
            x_BT, y_BT = to_device(
                data.batch(
                    train_tokens,
                    seed=recipe.seed,
                    step=step - 1,
                    batch=recipe.data.batch,
                    context=T,
                    boundaries=recipe.data.boundaries,
                    rank=ranks.rank,
                    world=ranks.world,
                ),
                device,
            )
            rate = schedule.ratio(recipe.schedule, step - 1, recipe.steps)
            optimizer.set_rate(optim, rate)
            optim.zero_grad(set_to_none=True)
            loss = backward(loss_fn, model, x_BT.split(micro), y_BT.split(micro), cast, ranks)
            if tracker is not None:
                tracker.before_step(step)
            norm = grad_norm(model)
            # One wait for the device a step: the price of never applying a bad update.
            loss_now, norm_now, stopping = ranks.agree(loss, norm, stopped())
            if not math.isfinite(loss_now + norm_now):
                recent = [*metrics.recent, {"step": step, "loss": loss_now, "grad_norm": norm_now}]
                raise postmortem.stop(folder, step, model, (x_BT[:micro], y_BT[:micro]), recent, ranks)
            if recipe.optim.clip is not None:
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), recipe.optim.clip, norm)
            optim.step()
            if recipe.optim.logit_clip is not None and due(step, 10):
                clip_logits(model, parts, probe(model, probe_tokens)["attention_logit_max"], recipe.optim.logit_clip)
            counted += recipe.tokens_per_step
            training += time.monotonic() - tick

            last = step == recipe.steps
            record = {
                "step": step,
                "loss": loss_now,
                "lr": recipe.optim.lr * rate,
                "grad_norm": norm_now,
                "tokens": step * recipe.tokens_per_step,
            }
            if due(step, watch.eval_every) or last:
                record["val_loss"] = evaluate(model, val, micro, cast, ranks)
            if due(step, watch.probe_every) or last:
                with cast():
                    record |= probe(model, probe_tokens)
                record |= probe_weights(model, parts, optim)
            if tracker is not None:
                record |= tracker.after_step(step)
            record["seconds"] = round(time.monotonic() - started, 3)
            if due(step, watch.log_every) or record.keys() & {"val_loss", "angle", "change"}:
                record["tokens_per_second"] = round(counted / training, 1)
                metrics.write(record)
                training, counted = 0.0, 0
            if due(step, watch.save_every) or last or stopping:
                progress = {"step": step, "tokens": record["tokens"], "seconds": record["seconds"]}
                save(folder, model, optim, progress, watch.keep, tracker)
            if ranks.main:
                bar.advance(1, note=describe(record, metrics.recent))
            if stopping:
                return {**record, "stopped": not last}
    return {**record, "stopped": False}


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """Treat denormal numbers as zero on the CPU while open, then as before.

    Moments of dead inputs decay into them, and then steps are several times slower. Worker threads inherit the setting
    from the thread that starts them, so it comes before any work.
    """
    smallest = torch.tensor([5e-324], dtype=torch.float64)
    before = not bool((smallest * 1).item())
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def describe(record: dict[str, Any], recent: list[dict[str, Any]]) -> str:
    val = next((r["val_loss"] for r in reversed(recent) if "val_loss" in r), None)
    speed = next((r["tokens_per_second"] for r in reversed(recent) if "tokens_per_second" in r), 0)
    return f"loss {record['loss']:.3f}  val {'-' if val is None else format(val, '.3f')}  {speed:,.0f} tok/s"


def open_data(recipe: Recipe) -> tuple[Any, Any]:
    """Training and validation tokens of a recipe, checked against the model's vocabulary."""
    source = recipe.data
    if source.val is None:
        pair = data.open_train_val(source.train, fraction=source.val_fraction, tokenizer=source.tokenizer)
    else:
        train_tokens, val_tokens = (data.open_tokens(p, tokenizer=source.tokenizer) for p in (source.train, source.val))
        pair = train_tokens, val_tokens
    for part in pair:
        if part.vocab_size is not None and part.vocab_size > recipe.model.vocab_size:
            raise UserError(
                f"{part.name} has token ids up to {part.vocab_size - 1}, the model knows {recipe.model.vocab_size}; "
                f"set model.vocab_size={part.vocab_size} or larger"
            )
    return pair


def backward(
    loss_fn: LossFn,
    model: nn.Module,
    x_mBT: Sequence[Tensor],
    y_mBT: Sequence[Tensor],
    cast: Callable[[], Any],
    ranks: Ranks,
) -> Tensor:
    """Add up the gradients of the micro-batches; returns this process's share of the mean loss.

    The mean is over the targets of the whole step, since rows that end early have fewer.
    """
    loss = torch.zeros((), device=x_mBT[0].device)
    targets = ranks.total(torch.stack([(y != data.NO_TARGET).sum() for y in y_mBT]).sum())
    for index, (x, y) in enumerate(zip(x_mBT, y_mBT)):
        with held(loss_fn, model) if index + 1 < len(x_mBT) else contextlib.nullcontext():
            with cast():
                part = loss_fn(x, y) * ((y != data.NO_TARGET).sum() / targets)
            # Gradients are averaged over processes where they should be added.
            (part * ranks.world).backward()
        loss += part.detach()
    return loss


@torch.no_grad()
def evaluate(
    model: nn.Module, val: tuple[Tensor, Tensor], micro: int, cast: Callable[[], Any], ranks: Ranks = ALONE
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


def to_device(pair: tuple[Any, Any], device: torch.device) -> tuple[Tensor, Tensor]:
    """Two numpy arrays of token ids as tensors on the device."""
    x, y = (torch.from_numpy(array).to(device, non_blocking=True) for array in pair)
    return x, y


def choose_device(compute: ComputeConfig) -> torch.device:
    """The device of a recipe; "auto" takes cuda, then mps, then cpu.

    Raises:
        UserError: it was asked for and is not there.
    """
    if compute.device == "auto":
        for name, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
            if there:
                return torch.device(name)
        return torch.device("cpu")
    try:
        device = torch.device(compute.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device {compute.device!r} cannot be used here: {str(error).splitlines()[0]}. Try --device cpu."
        ) from error
    return device


def autocast(compute: ComputeConfig, device: torch.device) -> Callable[[], Any]:
    if compute.precision == "fp32":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[], bool]]:
    """While open, the first SIGINT or SIGTERM asks the loop to save and end; a second one interrupts at once."""
    seen: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        print("\nstopping after this step; press again to stop now", file=sys.stderr)

    old = {}
    # Only the main thread may install handlers; elsewhere the caller's stay in force.
    with contextlib.suppress(ValueError):
        old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)
