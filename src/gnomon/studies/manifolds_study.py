"""`gnomon study manifolds`: which manifold for which module (arXiv 2606.13276), with our solver and with the paper's.

The paper trains GPT-2 small on OpenWebText for 50,000 steps and finds hetero < stiefel < none in validation loss (3.3544,
3.3679, 3.3855), while all-DGram and hetero-inv become unstable. Two causes are suspected: singular values of W_Q and W_K
that nothing bounds, and a retraction and a solver that are off (`DGram(paper=True)`, `paper_direction`). Running both
solvers side by side, with and without a cap on the norms or on the logits, tells them apart.
"""

from __future__ import annotations

from typing import Any

from gnomon.studies.judging import NOT, REPRODUCED, beats, ranking, steady
from gnomon.studies.study import Claim, Results, Study, Variant
from gnomon.train import Recipe, preset, replace

OURS = ("adamw", "muon", "none", "stiefel", "dgram", "hetero", "hetero-inv")
PAPER = {"UNCONSTRAINED": 3.3855, "ALL-STIEFEL": 3.3679, "HETERO": 3.3544}


def study(scale: str, changes: dict[str, Any]) -> Study:
    """The seven optimizers, DGram with a cap and with QK-clip; and on a narrow model, because one step of it costs seconds,
    the paper's solver and retraction beside ours."""
    adamw = {"tiny": (2e-3, 4e-3, 8e-3), "small": (1e-3, 2e-3, 4e-3), "paper": (6e-4,)}[scale]
    muon = {"tiny": (0.02, 0.04, 0.08), "small": (0.01, 0.02, 0.04), "paper": (0.02,)}[scale]

    def variant(name: str, assignment: str, baseline: str, narrow: bool = False, **settings: Any) -> Variant:
        settings = {f"optim.{key}": value for key, value in settings.items()} | (NARROW if narrow and scale != "paper" else {})
        recipe = replace(replace(_base(scale, assignment), settings), changes, shared=True)
        rates = adamw if assignment == "adamw" else muon
        group = "solver" if narrow else "optimizer"
        return Variant(name, recipe, rates, None if name == baseline else baseline, group)

    variants = [variant(name, name, "muon") for name in OURS]
    variants += [
        variant("dgram, cap 2", "dgram", "muon", dgram_cap=2.0),
        variant("dgram, QK-clip 30", "dgram", "muon", logit_clip=30.0),
    ]
    for name in ("hetero", "dgram", "hetero-inv"):
        variants += [
            variant(f"narrow {name}, paper's solver", name, f"narrow {name}, paper's solver", narrow=True, paper=True),
            variant(f"narrow {name}", name, f"narrow {name}, paper's solver", narrow=True),
        ]
    return Study(
        name="manifolds",
        title="Different layers, different manifolds: seven optimizers and two solvers",
        scale=scale,
        variants=tuple(variants),
        tuning=0.5,
        claims=CLAIMS,
    )


def _base(scale: str, assignment: str) -> Recipe:
    if scale == "tiny":
        return replace(preset("tiny", "pre-norm", assignment), TINY)
    if scale == "small":
        return replace(preset("gpt2-small", "pre-norm", assignment), SMALL)
    return preset("gpt2-small", "pre-norm", assignment)


# Half the preset's batch: a step of these six layers then takes a quarter of a second on one core.
TINY: dict[str, Any] = {
    "steps": 240, "data.batch": 8, "schedule.warmup": 24, "watch.save_every": 0, "watch.eval_every": 40,
}  # fmt: skip

NARROW: dict[str, Any] = {"model.width": 64, "model.layers": 4, "model.heads": 2, "model.context": 64}

SMALL: dict[str, Any] = {
    "steps": 3000, "model.layers": 6, "model.width": 384, "model.heads": 6, "model.context": 256, "data.batch": 16,
    "schedule.warmup": 150, "compute.compile": False, "watch.eval_every": 250, "watch.eval_tokens": 131072,
    "watch.probe_every": 250, "watch.save_every": 500,
}  # fmt: skip


def _largest_logit(results: Results, name: str) -> float:
    from gnomon.studies.one_run import curve

    return max(
        max(r["attention_logit_max"]) for o in results.compared(name).values() for r in curve(o) if "attention_logit_max" in r
    )


def _logits(results: Results) -> tuple[str, str]:
    dgram, hetero = (_largest_logit(results, name) for name in ("dgram", "hetero"))
    said = f"largest attention logit {dgram:.0f} (dgram) against {hetero:.0f} (hetero), each at its tuned rate"
    return said, REPRODUCED if dgram > 2 * hetero else NOT


def _solver(results: Results) -> tuple[str, str]:
    said, worse = [], False
    for name in ("narrow dgram", "narrow hetero-inv"):
        paper = f"{name}, paper's solver"
        found = results.against(name, paper)
        lost = results.fates(name, "diverged"), results.fates(paper, "diverged")
        said.append(f"{name}: ours minus the paper's {found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}], "
                    f"{lost[0]} and {lost[1]} diverged")  # fmt: skip
        worse |= lost[1] > lost[0] or found.word == "better"
    return "; ".join(said), REPRODUCED if worse else NOT


SOLVERS = tuple(f"narrow {name}{solver}" for name in ("dgram", "hetero-inv") for solver in ("", ", paper's solver"))

CLAIMS = (
    Claim("hetero beats plain Muon", "3.3544 < 3.3855", lambda r: beats(r, "hetero", "none"), ("hetero", "none")),
    Claim("hetero beats all-Stiefel", "3.3544 < 3.3679", lambda r: beats(r, "hetero", "stiefel"), ("hetero", "stiefel")),
    Claim("all-Stiefel beats plain Muon", "3.3679 < 3.3855", lambda r: beats(r, "stiefel", "none"), ("stiefel", "none")),
    Claim("all-DGram is unstable", "fails at step 16k", lambda r: steady(r, "dgram"), ("dgram",)),
    Claim("hetero-inv is unstable", "fails at step 20k, ends 0.6 worse", lambda r: steady(r, "hetero-inv"), ("hetero-inv",)),
    Claim("DGram attention blows up the logits", "mechanism, no number", _logits, ("dgram", "hetero")),
    Claim("the paper's retraction and solver hurt DGram attention (our question)", "-", _solver, SOLVERS),
    Claim("order of the stable four", "hetero, stiefel, none", lambda r: ranking(r, ("hetero", "stiefel", "none", "adamw")),
          ("hetero", "stiefel", "none")),
)
