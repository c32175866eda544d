"""Run the `tiny` preset over residuals, optimizers, learning rates and seeds; print one row a run.

    python -m benchmarks.sweep_tiny --residuals pre-norm proj-spheret --lrs 2e-3 4e-3 8e-3              # tune
    python -m benchmarks.sweep_tiny --assignments none hetero dgram --lrs 0.02 --seeds 0 1 2            # compare

Tuning uses seed 1000, which comparisons never use. Runs are ordinary run folders, so an interrupted sweep continues and a
run that is there is not repeated; two sweeps may share the folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gnomon.errors import UserError
from gnomon.train import preset, replace, train

TUNING_SEED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--residuals", nargs="+", default=["pre-norm"])
    parser.add_argument("--assignments", nargs="+", default=["adamw"])
    parser.add_argument("--lrs", nargs="+", type=float, default=[None])
    parser.add_argument("--seeds", nargs="+", type=int, default=[TUNING_SEED])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    options = parser.parse_args()
    for residual in options.residuals:
        for assignment in options.assignments:
            for lr in options.lrs:
                for seed in options.seeds:
                    print(run(residual, assignment, lr, seed, options), flush=True)


def run(residual: str, assignment: str, lr: float | None, seed: int, options: argparse.Namespace) -> str:
    recipe = preset("tiny", residual, assignment)
    changes = dict(pair.split("=", 1) for pair in options.set) | {"seed": seed}
    recipe = replace(recipe, changes | ({} if lr is None else {"optim.lr": lr}))
    name = "-".join([residual, assignment, f"{recipe.optim.lr:g}", str(seed), *options.set])
    try:
        record = train(recipe, options.out / name)
        result = f"val {record['val_loss']:.4f}  max logit {max(record['attention_logit_max']):.1f}"
    except UserError as error:
        result = f"stopped: {error}"
    return f"{residual:14} {assignment:11} lr {recipe.optim.lr:<7g} seed {seed:<5} {' '.join(options.set)}  {result}"


if __name__ == "__main__":
    main()
