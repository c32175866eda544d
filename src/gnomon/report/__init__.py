"""Tables for the terminal, charts, and one self-contained HTML page. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gnomon.lazy import lazy

if TYPE_CHECKING:  # for editors and type checkers, which do not follow `lazy`
    from gnomon.report.chart_options import Axis as Axis
    from gnomon.report.chart_options import Line as Line
    from gnomon.report.chart_options import Series as Series
    from gnomon.report.charts import heatmap as heatmap
    from gnomon.report.charts import intervals as intervals
    from gnomon.report.charts import scatter as scatter
    from gnomon.report.line_charts import curves as curves
    from gnomon.report.line_charts import profile as profile
    from gnomon.report.page import Page as Page
    from gnomon.report.runs import read_runs as read_runs
    from gnomon.report.runs import summary as summary
    from gnomon.report.runs import summary_table as summary_table
    from gnomon.report.tables import Bar as Bar
    from gnomon.report.tables import csv as csv
    from gnomon.report.tables import markdown as markdown
    from gnomon.report.tables import show as show
    from gnomon.report.tables import table as table
    from gnomon.report.training_report import run_page as run_page
    from gnomon.report.training_report import run_report as run_report

_EXPORTS = {
    "table": "tables", "show": "tables", "markdown": "tables", "csv": "tables", "Bar": "tables",
    "curves": "line_charts", "profile": "line_charts",
    "heatmap": "charts", "intervals": "charts", "scatter": "charts",
    "Axis": "chart_options", "Series": "chart_options", "Line": "chart_options",
    "Page": "page",
    "run_report": "training_report", "run_page": "training_report",
    "summary": "runs", "summary_table": "runs", "read_runs": "runs",
}

if not TYPE_CHECKING:
    __all__ = list(_EXPORTS)
    __getattr__, __dir__ = lazy(__name__, _EXPORTS)
