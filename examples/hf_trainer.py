"""A Hugging Face model under Trainer: transformers' own loop, unchanged, with weights on manifolds.

    python examples/hf_trainer.py              a small GPT-2 from scratch, on the text that gnomon ships
    python examples/hf_trainer.py FOLDER       any model that AutoModelForCausalLM opens, with its tokenizer

Two lines are gnomon's: which matrix lives where, and the optimizer. Accumulation, clipping, the schedule and checkpoints are
Trainer's; `main(resume_from_checkpoint=True)` goes on from the last.
Needs `pip install "gnomon[hf]" accelerate`.
"""

from __future__ import annotations

import sys

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

import gnomon


def main(folder: str | None = None, steps: int = 60, out: str = "runs/hf-trainer", **arguments) -> Trainer:
    """Train, save the model in `out`, and return the trainer."""
    text = gnomon.data.jargon()
    if folder is None:
        model = AutoModelForCausalLM.from_config(
            GPT2Config(
                vocab_size=257, n_positions=128, n_embd=64, n_layer=3, n_head=4, bos_token_id=256, eos_token_id=256
            )
        )
        ids = gnomon.data.tokenizer("byte").encode(text)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        ids = AutoTokenizer.from_pretrained(folder).encode(text, verbose=False)

    rows = torch.tensor(ids[: len(ids) // 128 * 128], dtype=torch.long).view(-1, 128)
    examples = [{"input_ids": row, "labels": row} for row in rows]

    assignment = gnomon.assign(model, "hetero")  # Stiefel for attention, DGram for the MLP, AdamW for the rest
    optimizer = gnomon.ManifoldMuon(assignment, lr=0.02, adamw_lr=3e-3)
    print(assignment.table())

    settings = dict(
        output_dir=out, max_steps=steps, logging_steps=10, report_to="none",
        per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=1.0,
        save_strategy="steps", save_steps=steps // 2,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**settings | arguments),
        train_dataset=examples,
        optimizers=(optimizer, get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)),
    )
    trainer.train(resume_from_checkpoint=arguments.get("resume_from_checkpoint"))
    trainer.save_model(out)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:2])
