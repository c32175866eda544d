"""Tune the learning rate of the `tiny` preset for one or more residuals, on a seed the comparisons never use.

    python -m benchmarks.tune_tiny pre-norm proj-spheret --lrs 1e-3 2e-3 4e-3 8e-3 1.6e-2

Prints one row a run: residual, learning rate, final validation loss. Runs are ordinary run folders under runs/tune,
so an interrupted search continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gnomon.train import preset, replace, train

TUNING_SEED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("residuals", nargs="+")
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2])
    parser.add_argument("--seeds", nargs="+", type=int, default=[TUNING_SEED])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("runs/tune"))
    options = parser.parse_args()
    changes = dict(pair.split("=", 1) for pair in options.set)
    for residual in options.residuals:
        for lr in options.lrs:
            for seed in options.seeds:
                recipe = replace(preset("tiny", residual), changes | {"optim.lr": lr, "seed": seed})
                record = train(recipe, options.out / "-".join([residual, f"{lr:g}", str(seed), *options.set]))
                print(
                    f"{residual:20} lr {lr:<8g} seed {seed:<5} {' '.join(options.set)} val {record['val_loss']:.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
