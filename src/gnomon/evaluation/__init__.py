"""What a trained model can do: perplexity, text, tasks of lm_eval. Torch is imported when the first name is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.lazy import lazy

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon.evaluation.generation import generate as generate
    from gnomon.evaluation.loading import is_hf_folder as is_hf_folder
    from gnomon.evaluation.loading import load as load
    from gnomon.evaluation.run_report import report_of as report_of
    from gnomon.evaluation.run_report import watch as watch
    from gnomon.evaluation.scoring import complete as complete
    from gnomon.evaluation.scoring import loglikelihoods as loglikelihoods
    from gnomon.evaluation.text_perplexity import UNITS as UNITS
    from gnomon.evaluation.text_perplexity import perplexity as perplexity
    from gnomon.evaluation.text_perplexity import wikitext as wikitext
    from gnomon.evaluation.zeroshot import evaluate_tasks as evaluate_tasks
    from gnomon.evaluation.zeroshot import harness_model as harness_model

_EXPORTS = {
    "load": "loading", "is_hf_folder": "loading",
    "generate": "generation",
    "perplexity": "text_perplexity", "wikitext": "text_perplexity", "UNITS": "text_perplexity",
    "loglikelihoods": "scoring", "complete": "scoring",
    "evaluate_tasks": "zeroshot", "harness_model": "zeroshot",
    "report_of": "run_report", "watch": "run_report",
}  # fmt: skip

if not TYPE_CHECKING:
    __all__ = list(_EXPORTS)
    __getattr__, __dir__ = lazy(__name__, _EXPORTS)
