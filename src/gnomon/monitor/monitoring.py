"""`Monitor`: hidden states, attention, weights, gradients and numbers of any model while it is trained."""

from __future__ import annotations

import contextlib
import math
import warnings as python_warnings
from typing import Any

import torch
from torch import Tensor, nn

from gnomon import anatomy
from gnomon.continuity import Tracker
from gnomon.diagnosis import Diagnosis, RunWarning
from gnomon.errors import UserError
from gnomon.monitor import attention_rows, over_ranks, passes, places, states
from gnomon.monitor.matrix_series import Found, Matrices
from gnomon.monitor.places import Places
from gnomon.monitor.watching import Watch
from gnomon.sharding import whole

Record = dict[str, dict[str, Any]]


class Monitor:
    """Measures on a schedule, in anyone's loop.

    >>> monitor = gnomon.Monitor(model, every=50)
    >>> for step, batch in enumerate(batches):
    ...     loss(model(batch)).backward()
    ...     record = monitor.before_step(step)        # after backward, before clipping and the optimizer
    ...     optimizer.step(); optimizer.zero_grad()
    ...     record |= monitor.after_step(step)        # both are {} but on measured steps

    What the series are called, and what each means, is the table of `gnomon.series`. A record is plain JSON; what is not finite or
    not defined is left out.

    The first micro-batch of a measured step is looked at while it is trained on; a compiled model is run once more on it, uncompiled.
    Hooks exist on measured steps alone, and no result of the run changes. Under DDP and FSDP2 every process makes the same calls and
    gets the same record, that of the whole batch. A model on several devices, or cut by tensor or pipeline parallelism, is not
    supported.

    Args:
        model: an `nn.Module` as it is called in training: bare, compiled, in DDP, sharded by FSDP2, with peft.
        every: steps between two measurements; step 0 is measured. 0: never by itself.
        last: a step that is measured whatever `every` says.
        optimizer: a `ManifoldMuon`, for `feasibility`.
        batch: look at these inputs instead (a tensor, a tuple, or a dict of arguments of `model`), in a pass of their own after the
            step, so that records compare; the model is then in eval mode. The same inputs in every process.
        track_every: steps between two measurements of continuity across depth, see `Tracker`; 0 for none. Dearer than all else.
        accumulate: keep the sum of gradients for `track_every`; costs an addition each step.
        since_start: keep a copy of the weights on the CPU, for `change`.
        sample: tokens of a batch whose states are put side by side.
        rows: rows of attention looked at in each block, with all their heads and keys; None for all.
        at: the places, for a model whose blocks are not found; see `gnomon.monitor.Places`.
        config: what a Hugging Face config would say, for models whose fused weights need it.

    Raises:
        UserError: an argument is out of range, or nothing in the model can be measured.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        *,
        last: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        batch: Any = None,
        track_every: int = 0,
        accumulate: bool = False,
        since_start: bool = True,
        sample: int = states.SAMPLE,
        rows: int | None = attention_rows.ROWS,
        at: Places | None = None,
        config: Any = None,
    ):
        if every < 0 or track_every < 0 or sample < 1 or rows is not None and rows < 1:
            raise UserError(
                f"every and track_every must not be negative, sample and rows at least 1; got {every}, {track_every}, {sample}, {rows}"
            )
        self.every: int = every
        self.last: int | None = last
        self.optimizer: torch.optim.Optimizer | None = optimizer
        self._model = passes.inner(model)
        found = anatomy.read(self._model, config)
        self._places = places.find(self._model, found) if at is None else at
        self._world = over_ranks.world_of(model)
        self._sample = sample
        self._watch = Watch(self._places, sample, rows)
        self._matrices = Matrices(self._model, found.layer_matrices(), since_start)
        if not (self._matrices.parts or self._places.joins or self._places.blocks):
            raise UserError(
                "nothing in this model can be measured: no stack of layers is recognised in its parameters' names and shapes "
                f"({found.evidence[0] if found.evidence else 'it has no repeated layers'}), and it has no residual of gnomon. "
                "Name its blocks with at=gnomon.monitor.Places(…)"
            )
        self._tracker: Tracker | None = None
        if track_every and found.layer_pairs():
            start = self._matrices.start
            self._tracker = Tracker(self._model, track_every, accumulate=accumulate, config=config, start=start)
        self._batch = None if batch is None else passes.call_with(batch)
        self._listener = passes.Listener(model) if passes.compiled(model) else None
        self._before: int | None = None
        self._told = False
        self._diagnosis, self._pending = Diagnosis(), Record()
        if every or last is not None:
            self._arm()

    def due(self, step: int) -> bool:
        """Whether this step is measured."""
        return step == self.last or self.every > 0 and step % self.every == 0

    def before_step(self, step: int) -> Record:
        """Hidden states, attention and gradients of this step; call between backward and the optimizer (after unscaling)."""
        if self._tracker is not None:
            self._tracker.before_step(step)
        measured: Record = {}
        if self.due(step):
            with self._aside():
                measured = _numbers(self._matrices.before())
            measured = self._of_this_batch(step) | measured
        self.close()
        self._pending = measured
        return measured

    def after_step(self, step: int) -> Record:
        """Weights of this step and what it changed, and with `batch` the hidden states after it; call after the optimizer."""
        record: Record = {}
        if self.due(step):
            if self._batch is not None:
                record = self.look(self._batch)
            with self._aside():
                record |= _numbers(self._matrices.after() | self._matrices.feasibility(self.optimizer))
        if self._tracker is not None:
            with self._aside():
                record |= self._tracker.after_step(step)
        stride = 1 if self._before is None else max(step - self._before, 1)
        self._before = step
        if self.due(step + stride):
            self._arm()
        if seen := self._pending | record:
            self._diagnosis.take({"step": step, **seen})
            self._pending = {}
        return record

    @property
    def warnings(self) -> list[RunWarning]:
        """What the rules of `gnomon.diagnosis` say now, from what is measured here; those that need the loss are silent."""
        return self._diagnosis.holding

    def look(self, batch: Any) -> Record:
        """Hidden states and attention of a forward pass over a batch, without gradients, in eval mode: now, whatever the schedule."""
        self.close()
        call = batch if isinstance(batch, passes.Call) else passes.call_with(batch)
        return self._pass(call, world=1, evaluate=True)

    def close(self) -> None:
        """Take away the hooks that wait for a measured step."""
        self._watch.detach()
        if self._listener is not None:
            self._listener.stop()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What a resumed run needs to go on with the same series: kind -> name -> tensor."""
        tracked = {} if self._tracker is None else self._tracker.state_dict()
        return tracked | {kind: state for kind, state in self._matrices.state_dict().items() if state}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        self._matrices.load_state_dict(state)
        if self._tracker is not None:
            self._tracker.load_state_dict(state)

    def _arm(self) -> None:
        """Be ready for the forward pass of a measured step."""
        if self._batch is not None:
            return
        if self._listener is not None:
            self._listener.listen()
        else:
            self._watch.attach(self._model, self._world)

    def _of_this_batch(self, step: int) -> Record:
        """What was seen in the pass of this step."""
        if self._batch is not None:
            return {}
        if self._listener is not None and self._listener.heard is not None:
            return self._pass(self._listener.heard, self._world, evaluate=False)
        record = self._seen(self._world)
        if not record and (self._places.joins or self._places.blocks) and not self._told:
            self._told = True
            python_warnings.warn(
                f"no forward pass of the model was seen at step {step}, so hidden states and attention are missing: is the loss a "
                "compiled function, or did the steps not go on by one? Give the monitor a batch to look at: Monitor(…, batch=inputs)",
                stacklevel=3,
            )
        return record

    def _pass(self, call: passes.Call, world: int, *, evaluate: bool) -> Record:
        self._watch.attach(self._model, world, training=False)
        try:
            passes.run(self._model, call, evaluate=evaluate)
        finally:
            self._watch.detach()
        return self._seen(world)

    def _seen(self, world: int) -> Record:
        """The record of what the hooks saw, in so many processes together."""
        with self._aside():
            state_sums, attention_sums = self._watch.found()
            if world > 1:
                state_sums = over_ranks.states_over_ranks(state_sums, max(self._sample // world, 1))
                attention_sums = over_ranks.attention_over_ranks(attention_sums)
            found: Found = {}
            for place, sums in state_sums.items():
                for key, value in states.conclude(sums).items():
                    found.setdefault(key, {})[place] = value
            for place, sums in attention_sums.items():
                for key, value in attention_rows.conclude(sums).items():
                    found.setdefault(key, {})[place] = value
            steps = {place: join for place, join in self._places.joins if hasattr(join, "step_size") and place in state_sums}
            if steps:
                found["step_size"] = {place: whole(join.step_size()).mean() for place, join in steps.items()}
            record = _numbers(found)
        if "angle" in record:
            record["input_kept"] = _kept(record["angle"])
        return record

    @contextlib.contextmanager
    def _aside(self):
        with passes.uncast(next((p.device for p in self._model.parameters()), torch.device("cpu"))):
            yield


def _kept(angles: dict[str, float]) -> dict[str, float]:
    """The product of the cosines of the turns so far, by stack."""
    kept: dict[str, float] = {}
    for place, angle in angles.items():
        stack = place.rsplit(".", 2)[0]
        kept[stack] = kept.get(stack, 1.0) * math.cos(angle)
        angles_so_far = kept[stack]
        kept[place] = float(f"{angles_so_far:.6g}")
    return {place: kept[place] for place in angles}


def _numbers(found: Found) -> Record:
    """As plain numbers, six digits each, with one wait for the device; places that are not finite are left out."""
    flat = [(key, place, value) for key, series in found.items() for place, value in series.items()]
    if not flat:
        return {}
    device = flat[0][2].device
    sizes = [value.numel() for _, _, value in flat]
    values = torch.cat([value.reshape(-1).to(device, torch.float32) for _, _, value in flat]).cpu().split(sizes)
    record: Record = {}
    for (key, place, value), numbers in zip(flat, values):
        rounded = [float(f"{number:.6g}") for number in numbers.tolist()]
        if all(map(math.isfinite, rounded)):
            record.setdefault(key, {})[place] = rounded if value.ndim else rounded[0]
    return record
