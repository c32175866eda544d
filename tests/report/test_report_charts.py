"""The contract of every chart: valid Vega-Lite, drawable without a browser, honest about what is left out."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest

from gnomon import UserError, report
from gnomon.report import Axis, Line, Series, curves, heatmap, intervals, profile, scatter
from gnomon.report.theme import PAPER, SERIES, theme

alt = pytest.importorskip("altair")
vl_convert = pytest.importorskip("vl_convert")

LINES = [{"step": i, "loss": 3 - i / 50, "low": 2.9 - i / 50, "high": 3.1 - i / 50, "run": run, "part": part}
         for i in range(40) for run in ("one", "two") for part in ("a", "b")]
CELLS = [{"from": i, "to": j, "overlap": 1 / (1 + abs(i - j))} for i in range(5) for j in range(5)]
BARS = [{"name": name, "mean": 2.0 + i, "low": 1.5 + i, "high": 2.5 + i, "scale": scale}
        for i, name in enumerate(("pre-norm", "post-norm", "sphere", "keel")) for scale in ("tiny", "small")]

CHARTS = {
    "curves": lambda rows=LINES: curves(rows, "step", "loss", "run", "Title"),
    "curves, one series": lambda rows=LINES: curves(rows, "step", "loss", title="Title"),
    "curves, all options": lambda rows=LINES: curves(
        rows, Axis("step", "x"), Axis("loss", "y", log=True, reference={"null": 2.5}),
        Series("run", ["zero", "one", "two"], dash="part"), "Title",
        line=Line(dots=True, band=("low", "high"), smooth=0.1, focus=0.1, limit=20), others=[Axis("low", "z")]),
    "profile": lambda rows=LINES: profile(rows, "step", "loss", Series("run", dash="part"), "Title"),
    "heatmap": lambda rows=CELLS: heatmap(rows, "from", "to", "overlap", "Title"),
    "heatmap, small cells": lambda rows=CELLS: heatmap(rows, "from", "to", "overlap", "Title", (-1, 1), width=40),
    "intervals": lambda rows=BARS: intervals(rows, "name", Axis("mean", reference={"null": 2.0}), "low", "high", title="Title"),
    "intervals, series": lambda rows=BARS: intervals(rows, "name", "mean", "low", "high", "scale", "Title"),
    "scatter": lambda rows=LINES: scatter(rows, "step", "loss", title="Title"),
    "scatter, all options": lambda rows=LINES: scatter(
        rows, Axis("step", "x"), Axis("loss", "y", log=True, reference={"null": 2.5}), "run", "Title", told=["part"]),
}
VALUE = {"curves": "loss", "profile": "loss", "heatmap": "overlap", "intervals": "mean", "scatter": "loss"}


def value_key(name: str) -> str:
    return VALUE[name.split(",")[0]]


def default_rows(name: str) -> list[dict]:
    return CHARTS[name].__defaults__[0]


def drawn(spec: dict) -> list[dict]:
    return json.loads(spec["data"]["values"])


@pytest.mark.parametrize("name", CHARTS)
def test_is_valid_and_can_be_drawn(name):
    spec = CHARTS[name]().to_dict(validate=True)
    svg = vl_convert.vegalite_to_svg(spec)
    assert "Title" in svg and "NaN" not in svg and "undefined" not in svg
    assert svg.count("<path") > 3


@pytest.mark.parametrize("name", CHARTS)
def test_shows_values_on_hover(name):
    spec = json.dumps(CHARTS[name]().to_dict())
    assert ('"tooltip"' in spec) != ("isValid(at)" in spec)


@pytest.mark.parametrize("name", CHARTS)
def test_names_no_colour_outside_the_theme(name):
    spec = CHARTS[name]().to_dict()
    assert spec.pop("config")["background"] == theme()["background"]
    assert spec["usermeta"]["theme"] == "gnomon"
    # The ink inside heat-map cells follows the cell, not the paper.
    text = json.dumps(spec).replace("#000000", "").replace("#ffffff", "")
    assert "#" not in text.replace('"$schema"', "")


@pytest.mark.parametrize("name", CHARTS)
def test_says_what_is_left_out(name):
    rows = [dict(row) for row in default_rows(name)]
    rows[3][value_key(name)] = math.nan
    rows[5][value_key(name)] = None
    spec = CHARTS[name](rows).to_dict()
    assert spec["title"]["subtitle"].startswith("left out: 2 ")
    assert "NaN" not in spec["data"]["values"] and len(drawn(spec)) <= len(rows) - 2


@pytest.mark.parametrize("name", CHARTS)
def test_nothing_to_draw_is_a_message_with_the_keys(name):
    rows = [{**row, value_key(name): math.nan} for row in default_rows(name)]
    for nothing in ([], rows):
        with pytest.raises(UserError, match="nothing to draw"):
            CHARTS[name](nothing)


@pytest.mark.parametrize("name", CHARTS)
def test_does_not_touch_the_rows(name):
    rows = [dict(row) for row in default_rows(name)]
    CHARTS[name](rows)
    assert rows == default_rows(name)


@pytest.mark.parametrize("name", CHARTS)
def test_without_the_extra_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(UserError, match=r'pip install "gnomon\[report\]"'):
        CHARTS[name]()


def test_a_long_line_is_thinned_and_keeps_its_end_and_its_spike():
    rows = [{"x": i, "y": 100.0 if i == 777 else 1.0} for i in range(9000)]
    points = drawn(curves(rows, "x", "y").to_dict())
    assert len(points) <= 1000
    assert (777, 100.0) in [(point["x"], point["y"]) for point in points] and points[-1]["x"] == 8999 and points[0]["x"] == 0


def path_of(chart, stroke: str) -> list[tuple[float, float]]:
    """Corners of the thick line of a colour, in pixels."""
    svg = vl_convert.vegalite_to_svg(chart.to_dict())
    paths = re.findall(r'<path[^>]* d="(M[^"]+)"[^>]*stroke="([^"]+)" stroke-width="2"', svg)
    (path,) = [path for path, colour in paths if colour == stroke]
    return [tuple(map(float, point.split(","))) for point in re.findall(r"-?[\d.e-]+,-?[\d.e-]+", path)]


def test_smoothing_draws_the_mean_of_neighbours_and_keeps_the_raw_line():
    rows = [{"x": i, "y": float(i % 2)} for i in range(100)]
    smoothed = [y for _, y in path_of(curves(rows, "x", "y", line=Line(smooth=0.1)), SERIES["light"][0])]
    # A mean over 21 points of 0 1 0 1 … is within 1/42 of a half; the axis, from 0 to 1, is 260 pixels high.
    assert len(smoothed) == 100 and all(abs(y - 130) < 260 / 20 for y in smoothed)
    raw = [y for _, y in path_of(curves(rows, "x", "y"), SERIES["light"][0])]
    assert {round(y) for y in raw} == {0, 260}


def test_smoothing_of_a_thinned_line_is_that_of_all_points():
    """Extremes are what thinning keeps; a mean of them is not one of the line."""
    rows = [{"x": i, "y": 1.0 if i % 10 == 0 else 0.0} for i in range(20_000)]
    chart = curves(rows, "x", "y", line=Line(smooth=0.1, limit=500))
    means = [row["y (mean)"] for row in drawn(chart.to_dict())]
    assert sum(means) / len(means) == pytest.approx(0.1, abs=0.005)
    heights = [y for _, y in path_of(chart, SERIES["light"][0])]
    assert sum(heights) / len(heights) == pytest.approx(260 * 0.9, abs=2)


def test_the_cursor_reads_the_nearest_point_of_every_line():
    spec = curves(LINES, "step", "loss", Series("run", dash="part")).to_dict()
    (cursor,) = [param for param in spec["params"] if param["name"] == "at"]
    assert "told" not in vl_convert.vegalite_to_svg(spec) and cursor["value"] is None
    cursor["value"] = 20.3
    svg = vl_convert.vegalite_to_svg(spec)
    assert ">20<" in svg and svg.count(">2.6  ") == 8  # two runs, two parts; each with a halo


def test_a_reader_may_choose_what_lies_along_x_and_a_logarithmic_y():
    rows = [{"step": i, "tokens": 10 * i, "y": 1.0 + i, "z": i - 3.0} for i in range(9)]
    choices = curves(rows, "step", "y", others=[Axis("tokens"), Axis("seconds")]).to_dict()["usermeta"]
    assert [axis["field"] for axis in choices["x"]] == ["step", "tokens"] and set(choices["y"]) == {"linear", "log"}
    assert set(curves(rows, "step", "z").to_dict()["usermeta"]["y"]) == {"linear"}


def test_a_constant_is_named_and_gets_an_axis_that_tells_it():
    spec = curves([{"x": i, "y": 160**0.5} for i in range(5)], "x", "y").to_dict()
    assert spec["title"]["subtitle"] == "constant: 12.65"
    labels = [float(text) for text in re.findall(r">([\d.]+)</text>", vl_convert.vegalite_to_svg(spec))]
    assert any(12.5 <= label <= 13 and label != 13 for label in labels)


def test_the_legend_hides_series_and_stands_in_the_first_layer():
    spec = CHARTS["curves"]().to_dict()
    legend = next(p for p in spec["params"] if p.get("bind") == "legend")
    assert legend["value"] == [{"run": "one"}, {"run": "two"}]
    assert legend["views"] == [spec["layer"][0]["name"]]
    assert all({"filter": {"param": legend["name"]}} in layer["transform"] for layer in spec["layer"])


def test_a_colour_means_the_same_series_in_every_chart():
    only_two = curves([row for row in LINES if row["run"] == "two"], "step", "loss", Series("run", ["one", "two"]))
    svg = vl_convert.vegalite_to_svg(only_two.to_dict())
    assert SERIES["light"][1] in svg and SERIES["light"][0] not in svg


def test_nine_series_are_told_apart_by_dashes_too():
    rows = [{"x": i, "y": k + i, "s": f"s{k}"} for k in range(9) for i in range(3)]
    spec = curves(rows, "x", "y", "s").to_dict()
    dashes = spec["layer"][0]["encoding"]["strokeDash"]["scale"]["range"]
    assert len(dashes) == 9 and dashes[8] != dashes[0] == dashes[7]


@pytest.mark.parametrize("name", ["a.b", "a[0]", "it's", 'a"b', "a\\b", "step:Q"])
def test_column_names_may_hold_anything(name):
    rows = [{name: i, "y": float(i), "s": "é<b>"} for i in range(5)]
    spec = curves(rows, name, "y", "s").to_dict()
    svg = vl_convert.vegalite_to_svg(spec)
    assert "NaN" not in svg and "undefined" not in svg
    assert len(drawn(spec)) == 5 and len(drawn(spec)[0]) == 3


def luminance(colour: str) -> float:
    """WCAG 2 relative luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_series_stand_out_from_the_paper(mode):
    paper = luminance(PAPER[mode])
    for colour in SERIES[mode]:
        light, dark = max(luminance(colour), paper), min(luminance(colour), paper)
        assert (light + 0.05) / (dark + 0.05) >= 3, colour


def test_every_text_of_a_page_has_the_contrast_of_wcag_aa():
    """4.5 : 1, on the paper and on the boxes that it stands in, light and dark."""
    style = (Path(report.__file__).parent / "page.css").read_text()
    schemes = [dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)]
    assert len(schemes) == 2
    grounds = {"paper": ("ink", "quiet", "accent", "red"), "shade": ("ink", "quiet", "accent"), "red-shade": ("ink", "red"),
               "amber-shade": ("ink", "amber")}  # fmt: skip
    for colours in schemes:
        for ground, inks in grounds.items():
            for ink in inks:
                light, dark = sorted((luminance(colours[ground]), luminance(colours[ink])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)


# Machado, Oliveira, Fernandes (2009), severity 1: what a dichromat sees, on linear RGB.
SEEN = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def lab(colour: str, matrix=None) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    rgb = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    if matrix:
        rgb = [min(max(sum(m * p for m, p in zip(row, rgb)), 0), 1) for row in matrix]
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = [sum(m * p for m, p in zip(row, rgb)) / white for row, white in zip(to_xyz, (0.9505, 1.0, 1.089))]
    f = [t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz]
    return [116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])]


@pytest.mark.parametrize("seen", [None, *SEEN])
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_series_differ_for_every_common_eye(mode, seen):
    colours = [lab(colour, SEEN.get(seen)) for colour in SERIES[mode]]
    for i, a in enumerate(colours):
        for b in colours[:i]:
            assert math.dist(a, b) > 19
