"""Warnings before the crash: a loop of one's own, in which a small GPT trains at a rate that is too high.

    python examples/monitor_plain_loop.py
    gnomon compare runs/plain --out runs/plain.html

Three lines are gnomon's: the recorder, and the two calls around the optimizer's step. They would be the same in torchtitan's loop or
nanoGPT's. The second command draws what was recorded.
"""

from __future__ import annotations

import torch

import gnomon
from gnomon.diagnosis import RunWarning
from gnomon.models import Transformer, tiny


def main(steps: int = 120, lr: float = 0.1, out: str = "runs/plain", **settings) -> list[RunWarning]:
    """Train, and return the warnings in the order in which they began."""
    torch.manual_seed(0)
    model = Transformer(tiny(**dict(layers=4, width=32, context=64) | settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    ids = torch.from_numpy(gnomon.data.tokenizer("byte").encode(gnomon.data.jargon()).astype("int64"))
    windows = ids[: len(ids) // 65 * 65].view(-1, 65)
    told: list[RunWarning] = []

    with gnomon.integrations.Recorder(model, out, every=5, settings={"lr": lr}, tell=print) as recorder:
        for step in range(1, steps + 1):
            batch = windows[torch.randint(len(windows), (8,))]
            loss = model.loss(batch[:, :-1], batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            recorder.before_step(step)
            optimizer.step()
            told += recorder.after_step(step, loss=loss, lr=lr)
    return told


if __name__ == "__main__":
    main()
