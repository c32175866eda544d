"""A study of one's own: two variants, tuned rates, paired seeds, a verdict. The same call goes on where it stopped.

    python examples/own_study.py

Needs `pip install "gnomon[report]"`. Two seeds prove nothing; give it more, and more steps.
"""

from __future__ import annotations

from gnomon import report, studies
from gnomon.studies import Study, Variant, study_page
from gnomon.train import preset, replace


def main(out: str = "runs/norms", steps: int = 30):
    """Run it in `out`; returns the results."""
    small = {"steps": steps, "model.width": 32, "model.layers": 2, "model.heads": 2, "model.context": 64, "data.batch": 4}
    base = replace(preset("tiny", "pre-norm", "muon"), small)
    variants = (
        Variant("layer", replace(base, {"model.norm": "layer"}), rates=(0.04,)),
        Variant("rms", replace(base, {"model.norm": "rms"}), rates=(0.04,), baseline="layer"),
    )
    results, page = studies.run(Study("norms", "LayerNorm against RMSNorm", "tiny", variants, seeds=(0, 1)), out)
    report.show(study_page.table(results), **study_page.SHOWN)
    print(f"wrote {page}")
    return results


if __name__ == "__main__":
    main()
