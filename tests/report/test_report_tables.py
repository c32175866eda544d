"""Tables: number formats, bars against a null level, Markdown, CSV, and text that must stay text."""

from __future__ import annotations

import csv as csv_format
import io
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gnomon import report
from gnomon.report.tables import Bar, cells, number

ROWS = [
    {"role": "query", "v1": 0.81, "null": 0.05, "count": 12},
    {"role": "[red]key[/red]", "v1": 0.02, "null": 0.05, "count": 1234567},
    {"role": "a|b", "v1": float("nan"), "null": 0.05, "count": None},
]


def printed(rows, **options) -> str:
    stream = io.StringIO()
    report.show(rows, console=Console(file=stream), **options)
    return stream.getvalue()


@pytest.mark.parametrize("value, text", [
    (0.123456, "0.1235"), (12.3, "12.30"), (1234.5, "1234"), (123456.7, "123,457"), (1.2345e-5, "1.234e-05"),
    (1e12, "1.000e+12"), (0.0, "0"), (7, "7"), (1234567, "1,234,567"), (math.inf, "inf"), (-2.0, "-2.000"),
    (np.float32(0.5), "0.5000"), (np.int64(1000), "1,000"),
])
def test_numbers_have_four_digits(value, text):
    assert number(value) == text


@given(st.floats(-1e300, 1e300))
def test_a_number_is_near_what_is_printed(value):
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=6e-4)


def test_columns_choose_order_and_header_and_a_missing_value_is_a_dash():
    text = printed(ROWS, columns={"count": "count (tokens)", "role": "role", "absent": "absent"}, title="Title")
    assert "Title" in text and "count (tokens)" in text
    assert text.index("count (tokens)") < text.index("role")
    assert "v1" not in text and "–" in text


def test_text_is_not_read_as_style():
    assert "[red]key[/red]" in printed(ROWS)


def test_numbers_stand_on_the_right_and_mixed_columns_on_the_left():
    drawn = report.table([{"n": 1.0, "mixed": 1}, {"n": None, "mixed": "x"}])
    assert [column.justify for column in drawn.columns] == ["right", "left"]


def test_a_pipe_gets_the_whole_table():
    rows = [{f"column number {i}": "a rather long text" for i in range(30)}]
    assert printed(rows).count("a rather long text") == 30


def test_bar_is_as_long_as_its_value_and_ticks_at_the_null():
    bar = Bar(null="null", width=10)
    text = printed(ROWS, columns=["v1"], formats={"v1": bar})
    first, second, third = [line for line in text.splitlines() if "0.810" in line or "0.020" in line or "nan" in line]
    assert first.count("█") == 7 and "│" in first  # 8.1 characters, one of which is the tick
    assert second.count("█") == 0 and "│" in second
    assert "│" not in third and "nan" in third


@pytest.mark.parametrize("value, share", [(-3.0, 0.0), (0.0, 0.0), (0.25, 0.25), (9.0, 1.0), (math.nan, None)])
def test_bar_clips(value, share):
    assert Bar().share(value) == share


def test_markdown_aligns_and_escapes():
    lines = report.markdown(ROWS, ["role", "count"]).splitlines()
    assert lines[:2] == ["| role | count |", "| --- | ---: |"]
    assert lines[4] == "| a\\|b | – |"


def test_csv_keeps_the_values_and_not_their_format(tmp_path):
    path = tmp_path / "rows.csv"
    report.csv(path, [{"a": 0.123456789, "b": "x,\"y\"\nz"}, {"a": None, "c": [1, 2]}])
    with open(path, newline="") as file:
        rows = list(csv_format.reader(file))
    assert rows == [["a", "b", "c"], ["0.123456789", "x,\"y\"\nz", ""], ["", "", "[1, 2]"]]


def test_a_failing_csv_leaves_the_old_one(tmp_path):
    path = tmp_path / "rows.csv"
    report.csv(path, [{"a": 1}])

    class Bad:
        def __str__(self):
            raise OSError("no space left on device")

    with pytest.raises(OSError):
        report.csv(path, [{"a": 2}, {"a": Bad()}])
    assert path.read_text() == "a\n1\n"
    assert [file.name for file in tmp_path.iterdir()] == ["rows.csv"]


def test_formats_are_specs_functions_or_bars():
    line = cells([{"a": 1.0, "b": 90, "c": "text"}], "abc", {"a": ".1f", "b": lambda s: f"{s} s", "c": ".1f"})[0]
    assert [cell.text for cell in line] == ["1.0", "90 s", "text"]


def test_importing_the_package_imports_nothing_heavy():
    heavy = {"torch", "altair", "rich", "jinja2", "numpy", "vl_convert"}
    code = f"import sys, gnomon.report; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", report.__all__)
def test_every_public_name_is_there(name):
    assert getattr(report, name) is not None and name in dir(report)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'tabel'"):
        getattr(report, "tabel")  # noqa: B009
