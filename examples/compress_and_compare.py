"""Compress and compare: one small model made smaller in four ways, each read on a text that it was not fitted to.

    python examples/compress_and_compare.py

`share` is that of the block weights that stay. The model was trained for a minute, so it has little to lose: a real one, on a text of
yours, is `gnomon compress`, and `gnomon study compression` for all methods with intervals. Needs `pip install "gnomon[hf,report]"`.
"""

from __future__ import annotations

from pathlib import Path

import gnomon
from gnomon import report, running
from gnomon.compress import compress, shorten
from gnomon.train import preset, replace, train


def main(out: str = "runs/compress", steps: int = 300) -> list[dict]:
    """Make the models in `out`; returns a row for each."""
    small = {"model.layers": 4, "model.width": 64, "model.heads": 4, "model.context": 128, "data.batch": 8, "steps": steps}
    model = f"{out}/model"  # yours is a folder, a file or a run
    train(replace(preset("tiny", "pre-norm", "muon"), small), model)

    text, tokens = gnomon.data.jargon(), {}
    for name, piece in (("fitted", text[:60_000]), ("other", text[-20_000:])):  # the run held the end out
        Path(out, f"{name}.txt").write_text(piece)
        (tokens[name],) = gnomon.data.prepare(f"{out}/{name}.txt", f"{out}/{name}", tokenizer="byte", val_fraction=0)
    settings = dict(text=tokens["fitted"], keep=0.75, tokens=8192, length=128)
    made = {"whole": (model, 1.0)}
    for method in ("private", "pivoted", "modules"):
        smaller = compress(model, f"{out}/{method}", method=method, **settings)
        made[method] = (str(smaller.folder), smaller.parameters / smaller.parameters_before)
    shorter = shorten(model, f"{out}/depth", by="change", **settings)
    made["depth"] = (str(shorter.folder), shorter.parameters / shorter.parameters_before)

    rows = []
    for method, (folder, share) in made.items():
        seen = running.prepare(folder, tokens["other"]).run()
        rows.append({"method": method, "share": share, "loss (nats)": seen.loss})
        rows[-1]["against whole"] = seen.loss - rows[0]["loss (nats)"]
    report.show(rows)
    return rows


if __name__ == "__main__":
    main()
