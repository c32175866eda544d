"""What a stranger gets: open a folder with transformers alone, and write down logits and token ids.

Run as a program in a process of its own: `python -P fresh_process.py FOLDER WORK THREADS`. WORK holds `tokens.safetensors` and,
where the tokenizer is asked too, `text.txt`; `logits.safetensors` and `told.json` are added. Nothing of gnomon is imported but what lies in
FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def main(folder: str, work: str, threads: str) -> None:
    # Sums are taken in another order by another number of threads.
    torch.set_num_threads(int(threads))
    place, trust = Path(work), "auto_map" in json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=trust, dtype=torch.float32).eval()
    tokens = load_file(place / "tokens.safetensors")["tokens"]
    save_file({"logits": model(tokens, use_cache=False).logits.contiguous()}, place / "logits.safetensors")
    told = {"class": type(model).__name__}
    if (text := place / "text.txt").exists():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer.encode(text.read_text(encoding="utf-8"))
        told |= {"ids": ids, "text": tokenizer.decode(ids)}
    (place / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
