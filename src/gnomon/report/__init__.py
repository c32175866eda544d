"""Tables for the terminal, charts, and one self-contained HTML page. No torch here."""

from __future__ import annotations

from gnomon.lazy import lazy

_EXPORTS = {
    "table": "tables", "show": "tables", "markdown": "tables", "csv": "tables", "Bar": "tables",
    "curves": "line_charts", "profile": "line_charts",
    "heatmap": "charts", "intervals": "charts", "scatter": "charts",
    "Axis": "chart_options", "Series": "chart_options", "Line": "chart_options",
    "Page": "page",
    "run_report": "training_report", "run_page": "training_report",
    "summary": "runs", "SUMMARY": "runs", "read_runs": "runs",
}

__all__ = list(_EXPORTS)
__getattr__, __dir__ = lazy(__name__, _EXPORTS)
