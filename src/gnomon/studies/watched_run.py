"""A short run in a plain loop with a monitor in it, whose records are all kept: what warnings are judged on.

It goes on where `gnomon train` would stop or look away: weights may be kept in bf16, and a loss that rises is followed to the end.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnomon.files import write_json
from gnomon.run_folder import RECIPE
from gnomon.studies.verdict import fate
from gnomon.train.recipe import OptimConfig, Recipe, to_dict


@dataclass(frozen=True)
class WatchedRecipe:
    """One run.

    Args:
        recipe: what runs; its `watch` counts for the size of the validation slice only.
        every: steps between two measurements, of the monitor and of the validation loss.
        weights: "fp32", or "bf16" for parameters that are kept in bf16, with no copy in fp32.
    """

    recipe: Recipe
    every: int = 10
    weights: str = "fp32"

    @property
    def steps(self) -> int:
        return self.recipe.steps

    @property
    def optim(self) -> OptimConfig:
        return self.recipe.optim

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.tokens_per_step

    def at(self, lr: float, seed: int) -> WatchedRecipe:
        """The same at another learning rate and seed."""
        return dataclasses.replace(self, recipe=self.recipe.at(lr, seed))

    def shortened(self, share: float) -> WatchedRecipe:
        """A run of its own that takes this share of the steps."""
        return dataclasses.replace(self, recipe=self.recipe.shortened(share), every=max(round(self.every * share), 1))

    def to_dict(self) -> dict[str, Any]:
        """As in recipe.json."""
        return {"recipe": to_dict(self.recipe), "every": self.every, "weights": self.weights}

    def expected(self) -> dict[str, float]:
        """For `--dry-run`: the recipe's own, and as much again for what is measured."""
        from gnomon.studies import study_estimate

        found = study_estimate.expected(self.recipe)
        return {key: value * 2 if key in ("here", "there") else value for key, value in found.items()}

    def train(self, folder: Path) -> dict[str, Any]:
        """Run from the start in `folder` (it takes seconds); returns the outcome."""
        return train(self, folder)


def train(watched: WatchedRecipe, folder: Path) -> dict[str, Any]:
    """Run it in `folder`, and return fate, value, seconds and the entropy of single tokens."""
    import torch

    from gnomon.monitor import Monitor
    from gnomon.train import optimizer, schedule
    from gnomon.train.device import flushed_denormals, to_device
    from gnomon.train.distributed import ALONE, clip_gradients, grad_norm
    from gnomon.train.loop import evaluate
    from gnomon.train.run_setup import rows, set_up
    from gnomon.train.run_writer import Metrics, write_environment

    shutil.rmtree(folder, ignore_errors=True)
    recipe, started, losses = watched.recipe, time.monotonic(), []
    with flushed_denormals():
        run = set_up(recipe, folder, ALONE, torch.device("cpu"))
        model, moves = run.model, run.optimizer
        if watched.weights == "bf16":
            model = model.bfloat16()
            moves = optimizer.build(model, recipe.optim)
        write_json(folder / RECIPE, watched.to_dict())
        write_environment(folder, parameters=sum(p.numel() for p in model.parameters()))
        metrics, monitor = Metrics(folder, 0), Monitor(model, every=watched.every, since_start=False)
        record: dict[str, Any] = {"unigram": run.unigram}
        for step in range(1, recipe.steps + 1):
            x_BT, y_BT = to_device(rows(recipe, run.tokens, step), run.device)
            optimizer.set_rate(moves, schedule.ratio(recipe.schedule, step - 1, recipe.steps))
            moves.zero_grad(set_to_none=True)
            loss = model.loss(x_BT, y_BT)
            loss.backward()
            norm = grad_norm(model)
            record |= {"step": step, "loss": loss.item(), "grad_norm": float(norm), "tokens": step * recipe.tokens_per_step}
            record |= monitor.before_step(step)
            if not math.isfinite(record["loss"] + record["grad_norm"]):
                losses.append(math.nan)
                metrics.write({**record, "val_loss": math.nan})
                break
            if recipe.optim.clip is not None:
                clip_gradients(model, recipe.optim.clip, norm)
            moves.step()
            record |= monitor.after_step(step)
            if step % watched.every == 0 or step == recipe.steps:
                losses.append(evaluate(model, run.val, len(run.val[0]), run.autocast))
                record["val_loss"] = losses[-1]
            metrics.write(record)
            record = {}
        metrics.close()
    found = fate(losses, run.unigram, finite=math.isfinite(losses[-1]))
    return {"fate": found, "value": losses[-1], "seconds": time.monotonic() - started, "unigram": run.unigram}
