"""Training the residual MLP of arXiv 2605.04971 on MNIST, watched by the continuity tracker.

Legend: B batch, P pixels.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnomon.errors import check_name
from gnomon.files import write_json
from gnomon.models.mlp import MLPConfig
from gnomon.run_folder import RECIPE
from gnomon.studies.verdict import fate

OPTIMIZERS = ("adam", "sign", "sgd")


@dataclass(frozen=True)
class MLPRecipe:
    """One run. Learning rate, batch and length of the paper's runs are not public; these are ours.

    Args:
        model: see `MLPConfig`.
        steps: optimizer steps of `batch` images.
        optimizer: "adam" (betas 0.9, 0.999); "sign", which is Adam with beta1 = beta2 = 0 (with beta2 = 0 alone the momentum is
            divided by the size of one gradient, and dead units make that diverge); or "sgd" (momentum 0.9).
        data: as `gnomon.data.mnist`.
        track_every: steps between two measurements.
    """

    model: MLPConfig
    steps: int = 1000
    optimizer: str = "adam"
    lr: float = 1e-3
    batch: int = 128
    seed: int = 0
    data: str = "embedded"
    track_every: int = 100
    name: str = field(default="mnist-mlp")

    def __post_init__(self) -> None:
        check_name("optimizer", self.optimizer, OPTIMIZERS)

    @property
    def tokens_per_step(self) -> int:
        return self.batch

    def at(self, lr: float, seed: int) -> MLPRecipe:
        """The same recipe at another learning rate and seed."""
        return dataclasses.replace(self, lr=lr, seed=seed)

    def shortened(self, share: float) -> MLPRecipe:
        """A run of its own that takes this share of the steps."""
        return dataclasses.replace(
            self, steps=max(round(self.steps * share), 1), track_every=max(round(self.track_every * share), 1)
        )

    def to_dict(self) -> dict[str, Any]:
        """As in recipe.json."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def expected(self) -> dict[str, float]:
        """Size, operations and time of a run, for `--dry-run`; the time assumes 20 and 4e13 operations a second and core."""
        m = self.model
        weights = m.layers * m.width**2 + (m.inputs + m.outputs) * m.width
        flops = 6.0 * weights * self.batch * self.steps
        return {
            "parameters": weights, "tokens": float(self.batch * self.steps), "flops": flops,
            "memory": 4.0 * (5 * weights + 3 * m.layers * m.width * self.batch), "here": flops / 2e10, "there": flops / 4e13,
        }  # fmt: skip

    def train(self, folder: Path) -> dict[str, Any]:
        """Run from the start in `folder`; returns the outcome."""
        return train(self, folder)


def train(recipe: MLPRecipe, folder: Path) -> dict[str, Any]:
    """Run the recipe in `folder` from the start (a run takes seconds) and return its outcome."""
    import torch

    from gnomon import data
    from gnomon.continuity import Tracker
    from gnomon.models.mlp import ResidualMLP
    from gnomon.train.device import flushed_denormals
    from gnomon.train.run_writer import Metrics, write_environment

    shutil.rmtree(folder, ignore_errors=True)
    (x_NP, y_N), test = data.mnist(recipe.data)
    x_NP, y_N, *test = (torch.from_numpy(array) for array in (x_NP, y_N, *test))
    with flushed_denormals():
        torch.manual_seed(recipe.seed)
        model = ResidualMLP(recipe.model)
        optimizer = _optimizer(model, recipe)
        tracker = Tracker(model, recipe.track_every, reference=recipe.track_every)
        write_json(folder / RECIPE, recipe.to_dict())
        write_environment(folder, parameters=sum(p.numel() for p in model.parameters()))
        metrics = Metrics(folder, 0)
        generator = torch.Generator().manual_seed(recipe.seed)
        order = torch.empty(0, dtype=torch.int64)
        started, value = time.monotonic(), math.nan
        for step in range(recipe.steps + 1):
            if len(order) < recipe.batch:
                order = torch.randperm(len(x_NP), generator=generator)
            rows, order = order[: recipe.batch], order[recipe.batch :]
            optimizer.zero_grad()
            loss = model.loss(x_NP[rows], y_N[rows])
            loss.backward()
            if not math.isfinite(loss.item()):
                break
            tracker.before_step(step)
            due = step % recipe.track_every == 0
            if step < recipe.steps:
                optimizer.step()
            record = tracker.after_step(step)
            if due or step == recipe.steps:
                model.eval()
                with torch.no_grad():
                    scores = model(test[0])
                    value = torch.nn.functional.cross_entropy(scores, test[1]).item()
                    accuracy = (scores.argmax(-1) == test[1]).float().mean().item()
                record |= {"step": step, "loss": loss.item(), "val_loss": value, "accuracy": accuracy}
                metrics.write({**record, "seconds": round(time.monotonic() - started, 3)})
        else:
            write_json(folder / "mechanism.json", spectra([block.linear.weight.detach() for block in model.blocks]))
        metrics.close()
    found = fate([value], math.log(recipe.model.outputs), finite=step == recipe.steps)
    return {"fate": found, "value": value, "seconds": time.monotonic() - started}


def spectra(weights: list[Any]) -> dict[str, float]:
    """`weighted_v1`: sum over k of (sigma_k^2 / sum sigma^2) |cos(v_k, v_k')|, mean over neighbouring layers, index by index
    (the likely reading of Eq. 2); `effective_rank`: exp of the entropy of sigma^2 (Eq. 3), mean over layers."""
    import torch

    from gnomon.continuity.pair_measures import effective_rank

    found = [torch.linalg.svd(W.double()) for W in weights]
    shares = [S.square() / S.square().sum() for _, S, _ in found]
    cosines = [(a[2] * b[2]).sum(-1).abs() for a, b in zip(found, found[1:])]
    weighted = [float(share @ cosine) for share, cosine in zip(shares, cosines)]
    ranks = [effective_rank(S) for _, S, _ in found]
    return {"weighted_v1": sum(weighted) / len(weighted), "effective_rank": sum(ranks) / len(ranks)}


def _optimizer(model: Any, recipe: MLPRecipe) -> Any:
    import torch

    if recipe.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9)
    betas = (0.9, 0.999) if recipe.optimizer == "adam" else (0.0, 0.0)
    return torch.optim.Adam(model.parameters(), lr=recipe.lr, betas=betas, fused=True)
