"""Tables for the terminal, charts, and one self-contained HTML page. No torch here."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "table": "tables", "show": "tables", "markdown": "tables", "csv": "tables", "Bar": "tables",
    "curves": "charts", "profile": "charts", "heatmap": "charts",
    "intervals": "charts", "ridgeline": "charts", "scatter": "charts",
    "Page": "page",
    "run_report": "training_report", "run_page": "training_report",
    "summary": "runs", "SUMMARY": "runs", "read_runs": "runs",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'gnomon.report' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gnomon.report.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
