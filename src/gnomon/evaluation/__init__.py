"""What a trained model can do: perplexity, text, tasks of lm_eval. Torch is imported when the first name is used."""

from __future__ import annotations

from gnomon.lazy import lazy

_EXPORTS = {
    "load": "loading", "is_hf_folder": "loading",
    "generate": "generation",
    "perplexity": "text_perplexity", "wikitext": "text_perplexity", "UNITS": "text_perplexity",
    "loglikelihoods": "scoring", "complete": "scoring",
    "evaluate_tasks": "zeroshot", "harness_model": "zeroshot",
    "report_of": "run_report", "watch": "run_report",
}  # fmt: skip

__all__ = list(_EXPORTS)
__getattr__, __dir__ = lazy(__name__, _EXPORTS)
