"""The house look of charts: colours for light paper and for dark, told apart by every common eye."""

from __future__ import annotations

from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

PAPER = {"light": "#ffffff", "dark": "#15171c"}
INK = {"light": "#1d2026", "dark": "#e7e9ee"}
QUIET = {"light": "#5d636e", "dark": "#a3a9b5"}
LINE = {"light": "#e4e6ea", "dark": "#2e323b"}

# Chosen by search: a contrast of 3 : 1 with the paper, and for a normal, a protanopic and a deuteranopic eye
# (Machado, Oliveira, Fernandes 2009) any two are at least 19 apart in CIE L*a*b*. A test holds both.
SERIES = {
    "light": ["#0069a8", "#d1500b", "#27a865", "#8a2f6b", "#4a3a10", "#2c9fc9", "#83868f", "#10202c"],
    "dark": ["#5aaef0", "#ff8f4f", "#aaf8c4", "#ae4787", "#ebdb15", "#d6e8f5", "#7d836d", "#d11a29"],
}
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]


def theme(dark: bool = False) -> dict[str, Any]:
    """The Vega-Lite `config` of every chart. Charts name no colour themselves, so this alone decides."""
    mode = "dark" if dark else "light"
    ink, quiet, line = INK[mode], QUIET[mode], LINE[mode]
    return {
        "background": PAPER[mode],
        "font": FONT,
        "padding": 4,
        "view": {"stroke": None},
        "title": {"anchor": "start", "frame": "group", "fontSize": 14, "fontWeight": 600, "color": ink,
                  "subtitleColor": quiet, "subtitleFontSize": 11.5, "subtitlePadding": 4, "offset": 10},
        "axis": {"labelColor": quiet, "titleColor": quiet, "gridColor": line, "domainColor": line,
                 "tickColor": line, "labelFontSize": 11, "titleFontSize": 11.5, "titleFontWeight": "normal",
                 "titlePadding": 8, "labelPadding": 4, "tickSize": 4, "domain": False, "ticks": False},
        "axisX": {"grid": False, "domain": True, "ticks": True, "tickCount": 8},
        "axisY": {"tickCount": 6},
        "legend": {"orient": "top", "direction": "horizontal", "title": None, "labelColor": ink,
                   "titleColor": quiet, "titleFontWeight": "normal", "titleFontSize": 11.5,
                   "labelFontSize": 12, "labelLimit": 300, "symbolSize": 160, "symbolStrokeWidth": 3,
                   "symbolType": "stroke", "symbolOpacity": 1, "columnPadding": 18,
                   "offset": 8,
                   "gradientLength": 180, "gradientThickness": 10},
        "header": {"labelColor": ink, "labelFontSize": 12, "labelFontWeight": 600, "labelAnchor": "start",
                   "labelPadding": 4, "title": None},
        "range": {"category": SERIES[mode], "heatmap": {"scheme": "viridis"},
                  "ramp": {"scheme": "viridis", "extent": [0.3, 1] if dark else [0, 0.85]},
                  "diverging": {"scheme": "blueorange"}},
        "mark": {"color": SERIES[mode][0]},
        "line": {"strokeWidth": 2, "strokeJoin": "round"},
        "rule": {"color": quiet},
        "text": {"color": quiet, "fontSize": 11},
        "style": {"halo": {"stroke": PAPER[mode], "strokeWidth": 4, "strokeJoin": "round"}},
        "point": {"filled": True, "size": 45},
    }
