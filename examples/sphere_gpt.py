"""A GPT of one's own: its stream stays on a sphere; sixty lines, three of them gnomon's.

    python examples/sphere_gpt.py
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

import gnomon


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False), heads

    def forward(self, h_BTD):
        q, k, v = self.qkv(h_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, words: int = 257, dim: int = 96, layers: int = 4, heads: int = 4, context: int = 128):
        super().__init__()
        self.embedding, self.position = nn.Embedding(words, dim), nn.Embedding(context, dim)
        mlp = lambda: nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))  # noqa: E731
        self.branches = nn.ModuleList(make() for _ in range(layers) for make in (lambda: Attention(dim, heads), mlp))
        # No norms: each branch reads the state as it is, of norm sqrt(dim), and turns it by 45 degrees at most.
        self.stack = gnomon.residual.stack("sphere", dim, blocks=layers, clamp=math.pi / 4)
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, x_BT):
        h_BTD = self.embedding(x_BT) + self.position.weight[: x_BT.shape[1]]
        return self.head(self.stack(h_BTD, self.branches))


def main(steps: int = 150, seed: int = 0) -> list[float]:
    """Train on the text that gnomon ships; returns the losses."""
    torch.manual_seed(seed)
    tokens = gnomon.data.open_tokens("jargon", tokenizer="byte")
    model, losses = GPT(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        x_BT, y_BT = map(torch.from_numpy, gnomon.data.batch(tokens, seed=seed, step=step, batch=16, context=128))
        loss = F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:4}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
