"""Accelerate: accumulation, clipping and several devices are Hugging Face's, the optimizer is gnomon's.

    python examples/accelerate_loop.py
    accelerate launch examples/accelerate_loop.py

Needs `pip install accelerate`.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import gnomon
from gnomon.models import Transformer, tiny


def main(steps: int = 40, out: str = "runs/accelerate") -> list[float]:
    """Train, save everything that a resumed run needs in `out`; returns the losses."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = Transformer(tiny(residual="proj-spheret", layers=4, width=96, heads=4, context=128))
    ids = torch.from_numpy(gnomon.data.tokenizer("byte").encode(gnomon.data.jargon()).astype("int64"))
    windows = ids[: len(ids) // 129 * 129].view(-1, 129)
    loader = DataLoader(TensorDataset(windows), batch_size=8, shuffle=True)

    assignment = gnomon.assign(model, "hetero")  # Stiefel for attention, DGram for the MLP, AdamW for the rest
    optimizer = gnomon.ManifoldMuon(assignment, lr=0.02, adamw_lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    losses: list[float] = []
    for (rows,), _ in zip(loader, range(2 * steps)):
        with accelerator.accumulate(model):
            logits_BTW = model(rows[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits_BTW.flatten(0, 1).float(), rows[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    accelerator.save_state(out)
    return losses


if __name__ == "__main__":
    main()
