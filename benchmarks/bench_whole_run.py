"""A whole run: `gnomon train tiny` as recommended, against the usual block in plain PyTorch with torch.optim.Muon.

Both have the same batches, schedule, validation windows and sizes; the plain one is Pre-LN with RMSNorm and RoPE, starts from the
weights gnomon's own Pre-LN starts from (and is checked to be the same function), and has the rate that `gnomon study manifolds` tuned
for Pre-LN and Muon. Told are the seconds until the validation loss is at most `LOSS`, found by a line between two looks at it; both
count these looks, gnomon its probes, checkpoints and records besides. The floor is the time that the FLOPs of those steps would take at
the rate of a large fp32 product on this machine.
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench_train import gemm_rate
from gnomon import data
from gnomon.models import Transformer
from gnomon.models.config import TransformerConfig
from gnomon.run_folder import read_metrics
from gnomon.train import Recipe, preset, replace, schedule, train
from gnomon.train.run_data import open_data

LOSS = 1.9  # nats a token, validation
EVERY = 10  # steps between two looks at it
TARGET = 1.0


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int, eps: float):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, D = x.shape
        normed = self.norm_attention(x)
        q, k, v = (f(normed).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """The function of gnomon's Pre-LN transformer with RMSNorm, RoPE, a tied head with a bias and no other biases."""

    def __init__(self, c: TransformerConfig):
        super().__init__()
        self.embed, self.head_bias = nn.Embedding(c.vocab_size, c.width), nn.Parameter(torch.zeros(c.vocab_size))
        self.blocks = nn.ModuleList(PlainBlock(c.width, c.heads, c.norm_eps) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.width, c.norm_eps)
        self.d_head, self.base = c.width // c.heads, c.rope_base

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[:, None] * self.base ** (-torch.arange(0, self.d_head, 2) / self.d_head)
        angles, h = torch.cat((places, places), -1), self.embed(x)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            h = block(h, cos, sin)
        logits = F.linear(self.norm(h), self.embed.weight, self.head_bias)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def take(self, model: Transformer) -> None:
        """The weights of a gnomon model."""
        theirs = dict(model.named_parameters())
        names = {"norm_attention": "join_attention.before", "norm_mlp": "join_mlp.before", "up": "mlp.up", "down": "mlp.down"}
        names |= {role: f"attention.{role}" for role in ("query", "key", "value", "output")}
        with torch.no_grad():
            for name, p in self.named_parameters():
                if name.startswith("blocks."):
                    _, index, role, _ = name.split(".")
                    name = f"blocks.{index}.{names[role]}.weight"
                p.copy_(theirs[{"norm.weight": "exit.weight"}.get(name, name)])


def plain_run(recipe: Recipe) -> list[tuple[float, int, float]]:
    """(seconds, step, validation loss), as a script without gnomon would train it."""
    tokens, val_tokens = open_data(recipe)
    T, c, o = recipe.model.context, recipe.model, recipe.optim
    val = [torch.from_numpy(part) for part in data.slices(val_tokens, context=T, count=recipe.watch.eval_tokens // T)]
    torch.manual_seed(recipe.seed)
    ours = Transformer(c)
    ours.start_at_frequencies(torch.from_numpy(data.frequencies(tokens, c.vocab_size)))
    model = PlainGPT(c)
    model.take(ours)
    with torch.no_grad():
        x, y = (part[:4] for part in val)
        torch.testing.assert_close(model.loss(x, y), ours.loss(x, y), rtol=1e-4, atol=1e-5)
    hidden = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(hidden, lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay)
    groups = [{"params": [model.embed.weight]}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=o.adamw_lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True)
    groups = [(group, group["lr"]) for optimizer in (muon, adamw) for group in optimizer.param_groups]
    start, seen = time.perf_counter(), []
    for step in range(1, recipe.steps + 1):
        batch = data.batch(tokens, seed=recipe.seed, step=step - 1, batch=recipe.data.batch, context=T)
        for group, peak in groups:
            group["lr"] = peak * schedule.ratio(recipe.schedule, step - 1, recipe.steps)
        model.zero_grad(set_to_none=True)
        model.loss(*(torch.from_numpy(part) for part in batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        muon.step()
        adamw.step()
        if step % EVERY == 0 or step == recipe.steps:
            with torch.no_grad():
                parts = [model.loss(x, y).item() * len(x) for x, y in zip(*(part.split(recipe.data.batch) for part in val))]
            loss = sum(parts) / len(val[0])
            seen.append((time.perf_counter() - start, step, loss))
    return seen


def our_run(recipe: Recipe) -> list[tuple[float, int, float]]:
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder) / "run")
        return [(m["seconds"], m["step"], m["val_loss"]) for m in read_metrics(Path(folder) / "run") if "val_loss" in m]


def reached(seen: list[tuple[float, int, float]], loss: float) -> tuple[float, float]:
    """Seconds and steps at which the loss is first at most `loss`; NaN where it never is."""
    before = None
    for now in seen:
        if now[2] <= loss:
            if before is None:
                return now[0], now[1]
            share = (before[2] - loss) / (before[2] - now[2])
            return before[0] + share * (now[0] - before[0]), before[1] + share * (now[1] - before[1])
        before = now
    return math.nan, math.nan


def rows(changes: dict | None = None, loss: float = LOSS) -> list[dict]:
    torch.set_flush_denormal(True)
    looks = {"watch.eval_every": EVERY, "compute.device": "cpu", **(changes or {})}
    plain, ours = replace(preset("tiny", "pre-norm", "muon"), looks), replace(preset("tiny"), looks)
    runs = {
        "plain PyTorch, Pre-LN + torch.optim.Muon": plain_run(plain),
        f"gnomon, {ours.model.residual} + {ours.optim.name}": our_run(ours),
    }
    rate, found = gemm_rate(), []
    base = reached(next(iter(runs.values())), loss)[0]
    for name, seen in runs.items():
        seconds, steps = reached(seen, loss)
        step_seconds = Transformer(ours.model).config.flops_per_token * ours.tokens_per_step / rate
        found.append({
            "what": name, f"seconds to {loss:g} nats": seconds, f"steps to {loss:g} nats": steps,
            "of the floor": seconds / (steps * step_seconds), "ms a step": 1e3 * seen[-1][0] / seen[-1][1],
            "final loss": seen[-1][2], "seconds, ratio": seconds / base,
            "target": TARGET if name.startswith("gnomon") else None,
        })  # fmt: skip
    return found


if __name__ == "__main__":
    from gnomon import report

    report.show(rows())
