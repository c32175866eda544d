"""Several processes as one run: `torchrun --nproc-per-node N -m gnomon train …`.

All that is distributed in training is here, behind calls that do nothing in a single process. Every process draws its rows of
the same global batch, and all end each step with the same weights.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

from gnomon.errors import UserError
from gnomon.models.transformer import Transformer
from gnomon.sharding import whole
from gnomon.train.recipe import Recipe

LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run.

    Args:
        rank, world: its number, and how many there are.
        strategy: "none", "ddp" or "fsdp".
    """

    rank: int = 0
    world: int = 1
    strategy: str = "none"

    @property
    def main(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    def total(self, number: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            dist.all_reduce(number)
        return number

    def sum(self, value: float) -> float:
        """The sum over all processes, in double precision."""
        return float(self.total(torch.tensor(value, dtype=torch.float64))) if self.world > 1 else value

    def reduce_step(self, loss: Tensor, grad_norm: Tensor, stop: bool) -> tuple[float, float, bool]:
        """The sum of all shares of the loss, the gradient norm (which is the same everywhere), and whether any process was
        asked to stop: one exchange, one wait for the device."""
        if self.world == 1:
            mean, norm = torch.stack((loss, grad_norm)).tolist()
            return mean, norm, stop
        asked = torch.full_like(loss, float(stop))
        mean, norm, asked = self.total(torch.stack((loss, grad_norm / self.world, asked))).tolist()
        return mean, norm, asked > 0

    def all(self, value: Any) -> list[Any]:
        """What each process has, a plain value, in order of rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Let the main process do some work and give everyone its result; a mistake it finds is raised everywhere."""
        if self.world == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = work()
            except UserError as error:
                outcome[1] = str(error)
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise UserError(outcome[1]).of("main")
        return outcome[0]

    def together(self, work: Callable[[], Any]) -> Any:
        """Let every process do some work by itself; a mistake that one of them finds is raised everywhere."""
        if self.world == 1:
            return work()
        result, told = None, None
        try:
            result = work()
        except UserError as error:
            told = str(error)
        found = {message: rank for rank, message in reversed(list(enumerate(self.all(told)))) if message is not None}
        if found:
            # One that the first process met too is told as a single process would.
            message = min(found, key=found.__getitem__)
            raise UserError(message if found[message] == 0 else f"process {found[message]}: {message}").of("main")
        return result


ALONE = Ranks()


def strategy_of(recipe: Recipe, processes: int) -> str:
    """What `recipe.parallel.strategy` means for so many processes.

    Raises:
        UserError: the batch cannot be dealt to them, or the recipe forbids several.
    """
    if processes == 1:
        return "none"
    chosen = "ddp" if recipe.parallel.strategy == "auto" else recipe.parallel.strategy
    if chosen == "none":
        raise UserError(f"parallel.strategy is none, but {processes} processes were started; set it to auto, ddp or fsdp")
    share = processes * recipe.data.accumulate
    if recipe.data.batch % share:
        raise UserError(
            f"data.batch {recipe.data.batch} cannot be dealt to {processes} processes in {recipe.data.accumulate} "
            f"micro-batches; use a multiple of {share}"
        )
    return chosen


@contextlib.contextmanager
def process_group(recipe: Recipe, device: torch.device) -> Iterator[tuple[Ranks, torch.device]]:
    """Join the processes torchrun started (or those of a process group that is there), and leave them at the end.

    Yields this process's `Ranks` and its device: one accelerator for each process of a machine. A process group that is there
    needs a backend for processors as well ("cpu:gloo,cuda:nccl").
    """
    joined = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", 1))
    strategy = strategy_of(recipe, world)
    if world == 1:
        yield ALONE, device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if not joined:
        # Checkpoints travel between processors while accelerators train.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), world, strategy), device
    except UserError as error:
        if error.told_by == "main":
            raise
        raise UserError(f"process {dist.get_rank()}: {error}").of("all") from error
    finally:
        if not joined:
            dist.destroy_process_group()


def parallelise(model: Transformer, recipe: Recipe, ranks: Ranks) -> LossFn:
    """Prepare the model for the processes, in place, and return its loss as a function of tokens and targets.

    Compiled as a whole in one process, block by block in several.
    """
    if recipe.parallel.recompute:
        recompute_blocks(model)
    if ranks.strategy == "none":
        return torch.compile(model.loss) if recipe.compute.compile else model.loss
    if recipe.compute.compile:
        # Blocks differ in constants (depth decay), and each takes a place in the same cache.
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, 4 * len(model.blocks))
        for block in model.blocks:
            block.compile()
    if ranks.strategy == "fsdp":
        shard(model, recipe.compute.precision)
        return model.loss
    return DistributedDataParallel(_Loss(model), gradient_as_bucket_view=True)


def shard(model: Transformer, precision: str = "fp32") -> None:
    """Cut the weights over all processes (FSDP2), one unit a block; they are gathered when it runs.

    Under bf16, attention's and the MLP's weights are gathered in bf16, which is what autocast rounds them to; norms, step
    sizes and embeddings in fp32. Gradients are summed in fp32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # The logits are a view of a product; nothing here changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    for block in model.blocks:
        if precision == "bf16":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            fully_shard([block.attention, block.mlp], mp_policy=policy)  # type: ignore[arg-type]
        fully_shard(block)
    fully_shard(model)


def recompute_blocks(model: Transformer) -> None:
    """Keep each block's input only; the rest is computed again in the backward pass (arXiv 1604.06174)."""
    for block in model.blocks:
        block.forward = partial(recomputed, block.forward, use_reentrant=False, preserve_rng_state=False)


@contextlib.contextmanager
def no_gradient_sync(loss_fn: LossFn, model: nn.Module) -> Iterator[None]:
    """While open, gradients add up on each process and are not exchanged: for all micro-batches but the last."""
    if isinstance(loss_fn, DistributedDataParallel):
        with loss_fn.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        yield


def uncompiled(model: Transformer) -> contextlib.AbstractContextManager[Any]:
    """While open, compiled blocks run uncompiled, so that hooks set meanwhile are seen."""
    compiled = any(getattr(block, "_compiled_call_impl", None) is not None for block in model.blocks)
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def grad_norm(model: nn.Module) -> Tensor:
    """The norm of the whole gradient, on every process; infinite where a sum of squares overflows, see `large_grad_norm`."""
    return _total_norm(_gradients(model))


def large_grad_norm(model: nn.Module) -> float:
    """`grad_norm` of gradients whose squares overflow (numbers from 1e19 in fp32). Not finite only where one of them is not."""
    gradients = _gradients(model)
    largest = float(_total_norm(gradients, math.inf))
    if not math.isfinite(largest) or largest == 0:
        return largest
    return largest * float(_total_norm([g / largest for g in gradients]))


def clip_gradients(model: nn.Module, bound: float, norm: Tensor | float) -> None:
    """Scale gradients down to a total norm of `bound` where theirs is larger; `norm` is that of `grad_norm` or `large_grad_norm`."""
    if isinstance(norm, Tensor):
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), bound, norm)
        return
    # In two steps: the factor of a norm of 1e39 is no number of fp32.
    for factor in (norm**-0.5, bound / norm**0.5):
        torch._foreach_mul_(_gradients(model), factor)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _total_norm(tensors: list[Tensor], order: float = 2.0) -> Tensor:
    return whole(torch.nn.utils.get_total_norm(tensors, order))


class _Loss(nn.Module):
    """DDP watches a forward pass; ours is the loss."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return self.model.loss(tokens_BT, targets_BT)
