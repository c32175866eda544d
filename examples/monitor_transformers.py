"""Trainer with a look inside: hidden states, attention, weights, and warnings; transformers' own loop is unchanged.

    python examples/monitor_transformers.py
    gnomon compare runs/monitor-transformers/gnomon --out runs/monitor.html

One line is gnomon's: the callback. The second command draws what it recorded; give it several folders and they stand side by side.
Needs `pip install "gnomon[hf]" accelerate`.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gnomon


def main(steps: int = 60, lr: float = 1e-3, out: str = "runs/monitor-transformers", **arguments) -> Trainer:
    """Train a small GPT-2 on the text that gnomon ships, and return the trainer."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=64, n_embd=64, n_layer=3, n_head=4, bos_token_id=256, eos_token_id=256))
    ids = torch.tensor(gnomon.data.tokenizer("byte").encode(gnomon.data.jargon())[: 64 * 2000], dtype=torch.long).view(-1, 64)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**dict(
            output_dir=out, max_steps=steps, learning_rate=lr, per_device_train_batch_size=8, logging_steps=5, save_strategy="no",
            report_to="none",
        ) | arguments),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[gnomon.integrations.TransformersMonitor(every=10)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=arguments.get("resume_from_checkpoint"))
    return trainer


if __name__ == "__main__":
    main()
