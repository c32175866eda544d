"""A LoRA fine-tune: by peft, and where its update went; the adapter is inspected on top of its base.

    python examples/lora_finetune.py

The last table says how far each role was turned (`v1 turned`, `u1 turned`, in degrees): the adapter turned the leading directions of
query, value and down almost to a right angle from where the untrained base had them, and left the others.
Needs `pip install "gnomon[hf]" peft`.
"""

from __future__ import annotations

import peft
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import gnomon


def main(steps: int = 40, out: str = "runs/lora"):
    """Fine-tune a small Llama from scratch in `out`; returns the report of base + adapter against the base."""
    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
    base = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=257, max_position_embeddings=128, **shape))
    base.save_pretrained(f"{out}/base")  # yours comes from a hub or a folder
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))

    tokens = gnomon.data.open_tokens("jargon", tokenizer="byte")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        x_BT, _ = map(torch.from_numpy, gnomon.data.batch(tokens, seed=0, step=step, batch=8, context=127))
        loss = model(input_ids=x_BT, labels=x_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f} after {steps} steps")
    model.save_pretrained(f"{out}/adapter")

    report = gnomon.inspect(f"{out}/adapter", base=f"{out}/base", compare=f"{out}/base")
    report.show()
    return report


if __name__ == "__main__":
    main()
