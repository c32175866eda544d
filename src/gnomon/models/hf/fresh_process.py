"""What a stranger gets: open a folder with transformers alone, and write down logits and token ids.

Run as a program in a process of its own: `python -P fresh_process.py FOLDER WORK THREADS`. WORK holds `tokens.safetensors` and
`text.txt`; `logits.safetensors` and `ids.json` are added. Nothing of gnomon is imported but what lies in FOLDER.
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
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=trust).eval()
    tokens = load_file(place / "tokens.safetensors")["tokens"]
    save_file({"logits": model(tokens, use_cache=False).logits.contiguous()}, place / "logits.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode((place / "text.txt").read_text(encoding="utf-8"))
    (place / "ids.json").write_text(
        json.dumps({"ids": ids, "text": tokenizer.decode(ids), "class": type(model).__name__})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
