"""What a trained model can do: perplexity, text, tasks of lm_eval."""

from __future__ import annotations

import importlib
from typing import Any

# Public name -> the module that defines it; torch is imported when the first of them is used.
_EXPORTS = {
    "load": "evaluate",
    "locate": "evaluate",
    "generate": "evaluate",
    "perplexity": "evaluate",
    "wikitext": "evaluate",
    "report_of": "evaluate",
    "evaluate_tasks": "zeroshot",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'gnomon.evaluation' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gnomon.evaluation.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
