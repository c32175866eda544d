"""`gnomon study manifolds`: which manifold for which module (arXiv 2606.13276), with our solver and with the paper's.

The paper trains GPT-2 small on OpenWebText for 50,000 steps and finds hetero < stiefel < none in validation loss (3.3544,
3.3679, 3.3855), while all-DGram and hetero-inv become unstable. Two causes are suspected: singular values of W_Q and W_K
that nothing bounds, and a retraction and a solver that are off (`DGram(paper=True)`, `paper_direction`). Running both
solvers side by side, with and without a cap on the norms or on the logits, tells them apart.
"""

from __future__ import annotations

import math
from typing import Any

from gnomon.series import over_depth
from gnomon.studies.claims import beats, diverges, ranking
from gnomon.studies.results import Results, curve
from gnomon.studies.scales import contestant, rates_for, sized
from gnomon.studies.study import Claim, Finding, Study, Variant
from gnomon.train import replace

OURS = ("adamw", "muon", "none", "stiefel", "dgram", "hetero", "hetero-inv")
SMOKE = ("muon", "hetero", "narrow dgram")

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


def study(scale: str, changes: dict[str, Any]) -> Study:
    """The seven optimizers, DGram with a cap and with QK-clip; and on a narrow model, because one step of it costs seconds,
    the paper's solver and retraction beside ours."""

    def variant(name: str, assignment: str, settings: dict[str, Any], baseline: str = "muon", group: str = "optimizer") -> Variant:
        recipe = sized(scale, "gpt2-small", ("pre-norm", assignment), TINY, SMALL)
        recipe = replace(replace(recipe, settings), changes, shared=True)
        return contestant(name, recipe, rates_for(scale, assignment), baseline, group)

    variants = [variant(name, name, {}) for name in OURS]
    variants += [
        variant("dgram, cap 2", "dgram", {"optim.dgram_cap": 2.0}),
        variant("dgram, QK-clip 30", "dgram", {"optim.logit_clip": 30.0}),
    ]
    narrow = NARROW if scale != "paper" else {}
    for name in ("hetero", "dgram", "hetero-inv"):
        paper = paper_s(name)
        variants += [
            variant(paper, name, {"optim.paper": True, **narrow}, paper, "solver"),
            variant(f"narrow {name}", name, narrow, paper, "solver"),
        ]
    return Study(
        name="manifolds",
        title="Different layers, different manifolds: seven optimizers and two solvers",
        scale=scale,
        variants=tuple(variants),
        tuning=0.5,
        claims=CLAIMS,
    )


def paper_s(assignment: str) -> str:
    """The variant with the paper's solver."""
    return f"narrow {assignment}, paper's solver"


def largest_logit(results: Results, name: str) -> float:
    """Over steps, blocks and seeds; NaN where no run was probed."""
    records = [record.get("attention_logit_max") for out in results.compared(name).values() for record in curve(out)]
    return max((max(logits) for at in records if (logits := over_depth("attention_logit_max", at))), default=math.nan)


def _logits(results: Results) -> Finding:
    dgram, hetero = (largest_logit(results, name) for name in ("dgram", "hetero"))
    said = f"largest attention logit {dgram:.0f} (dgram) against {hetero:.0f} (hetero), each at its tuned rate"
    return Finding(said, dgram > 2 * hetero, [dgram, hetero])


SOLVERS = tuple((f"narrow {name}", paper_s(name)) for name in ("dgram", "hetero-inv"))


def _solver(results: Results) -> Finding:
    said, figures, worse = [], [], False
    for ours, paper in SOLVERS:
        found = results.against(ours, paper)
        lost, lost_too = results.fates(ours, "diverged"), results.fates(paper, "diverged")
        said.append(f"{ours}: ours minus the paper's {found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}], "
                    f"{lost} and {lost_too} diverged")  # fmt: skip
        worse |= lost_too > lost or found.word == "better"
        figures += [] if lost_too > lost else [found.low]
    return Finding("; ".join(said), worse, figures)


CLAIMS = (
    beats("hetero beats plain Muon", "3.3544 < 3.3855", "hetero", "none"),
    beats("hetero beats all-Stiefel", "3.3544 < 3.3679", "hetero", "stiefel"),
    beats("all-Stiefel beats plain Muon", "3.3679 < 3.3855", "stiefel", "none"),
    diverges("all-DGram is unstable", "fails at step 16k", "dgram"),
    diverges("hetero-inv is unstable", "fails at step 20k, ends 0.6 worse", "hetero-inv"),
    Claim("DGram attention blows up the logits", "mechanism, no number", _logits, ("dgram", "hetero")),
    Claim("the paper's retraction and solver hurt DGram attention (our question)", "-", _solver,
          tuple(name for pair in SOLVERS for name in pair), SOLVERS),
    ranking("order of the stable four", "hetero, stiefel, none", ("hetero", "stiefel", "none", "adamw")),
)
