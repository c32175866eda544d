"""What a trained model can do: perplexity, text, tasks of lm_eval. Torch is imported when the first name is used."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "load": "loading", "locate": "loading", "is_published": "loading",
    "generate": "generation",
    "perplexity": "text_perplexity", "wikitext": "text_perplexity",
    "loglikelihoods": "scoring", "complete": "scoring",
    "evaluate_tasks": "zeroshot", "harness_model": "zeroshot",
    "report_of": "run_report",
}  # fmt: skip

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'gnomon.evaluation' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gnomon.evaluation.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
