"""Training throughput of a 6-layer, width-384 GPT-2-dialect model against a plain PyTorch one of the same network.

Both step through forward, backward, clipping and fused AdamW on the same batches; tokens a second, higher is better.
Floor: the FLOPs of the model over the machine's own matrix-product rate, measured in the same run.
"""

from __future__ import annotations

import math
import time

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.timing import median_ms, ratio, side_by_side
from gnomon.models import Transformer, TransformerConfig
from gnomon.train import optimizer
from gnomon.train.recipe import OptimConfig

BATCH, CONTEXT, LAYERS, WIDTH, HEADS, VOCAB = 8, 256, 6, 384, 6, 257


class PlainBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, WIDTH))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(PlainBlock() for _ in range(LAYERS)))
        self.ln = nn.LayerNorm(WIDTH)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def loss(self, x, y):
        h = self.embed(x) + self.positions.weight[: x.shape[1]]
        logits = self.ln(self.blocks(h)) @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def ours(residual: str) -> Transformer:
    return Transformer(
        TransformerConfig(
            vocab_size=VOCAB, context=CONTEXT, layers=LAYERS, heads=HEADS, width=WIDTH, qkv="fused", residual=residual
        )
    )


def stepper(model: nn.Module, compiled: bool):
    if isinstance(model, PlainGPT):
        optim = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        optim = optimizer.build(model, OptimConfig(lr=1e-4))
    loss_fn = torch.compile(model.loss, dynamic=False) if compiled else model.loss
    x, y = torch.randint(VOCAB, (2, BATCH, CONTEXT))

    def step():
        optim.zero_grad(set_to_none=True)
        loss_fn(x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()

    return step


def gemm_rate() -> float:
    """Floating-point operations a second of a large fp32 product."""
    a, b = torch.randn(2048, 1536), torch.randn(1536, 384)
    seconds = side_by_side({"gemm": lambda: [a @ b for _ in range(20)]})["gemm"]
    return 20 * 2 * 2048 * 1536 * 384 / (median_ms(seconds) / 1e3)


def rows(compile_too: bool = True) -> list[dict]:
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    floor = gemm_rate() / ours("pre-norm").config.flops_per_token
    found = []
    for compiled in (False, True) if compile_too else (False,):
        torch._dynamo.reset()
        contestants = {"plain PyTorch, Pre-LN": stepper(PlainGPT(), compiled)}
        contestants |= {f"gnomon, {r}": stepper(ours(r), compiled) for r in ("pre-norm", "proj-spheret", "cay-spheret")}
        start = time.time()
        seconds = side_by_side(contestants, rounds=9)
        for name in contestants:
            base = "plain PyTorch, Pre-LN" if name.endswith("pre-norm") else "gnomon, pre-norm"
            found.append(
                {
                    "what": name,
                    "mode": "compiled" if compiled else "eager",
                    "tokens/s": BATCH * CONTEXT / (median_ms(seconds[name]) / 1e3),
                    "of the floor": BATCH * CONTEXT / (median_ms(seconds[name]) / 1e3) / floor,
                    "throughput against": base if name != "plain PyTorch, Pre-LN" else "",
                    "ratio": 1 / ratio(seconds, name, base) if name != "plain PyTorch, Pre-LN" else 1.0,
                    "target": {"gnomon, pre-norm": 1.0}.get(name, 0.95 if compiled and "gnomon" in name else math.nan),
                }
            )
        print(f"measured in {time.time() - start:.0f} s", flush=True)
    return found


if __name__ == "__main__":
    from gnomon import report

    report.show(rows())
