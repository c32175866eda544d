"""What a reader does on a report, in a real browser."""

from __future__ import annotations

import math
import re

import pytest
from browser import DESKTOP, PHONE, browser, complaints, faint, too_wide

from gnomon.report import Axis, Bar, Line, Page, curves, heatmap, intervals, profile, scatter

pytest.importorskip("altair")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = [{"step": i, "tokens": 100 * i, "loss": 3 / math.sqrt(i + 1) + (run == "two"), "run": run}
        for i in range(301) for run in ("one", "two")]
SETTLED = {"timeout": 120_000, "state": "attached"}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    page = Page("A report")
    page.table([{f"measure {i}": 0.5 for i in range(12)}], formats={f"measure {i}": Bar(null=0.1) for i in range(12)})
    page.section("Loss")
    for name in ("loss", "other"):
        page.chart(curves(ROWS, "step", "loss", "run", name, others=[Axis("tokens")], line=Line(smooth=0.05)), name=name, width=0.5)
    cells = [{"a": i, "b": j, "c": i * j / 81} for i in range(10) for j in range(10)]
    page.chart(heatmap(cells, "a", "b", "c", "Heat"), width=1 / 3).chart(scatter(ROWS[:40], "step", "loss", "run", "Dots"), width=0.5)
    page.chart(profile(ROWS[:40], "step", "loss", "run", "Depth"), width=1 / 3)
    spans = [{"name": "a", "mean": 1, "low": 0, "high": 2}]
    page.chart(intervals(spans, "name", "mean", "low", "high", title="Spans"))
    return page.write(tmp_path_factory.mktemp("report") / "report.html", figures=False).as_uri()


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_draws_all_charts_without_a_complaint_or_a_sideways_scroll(chromium, report, width, scheme):
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said = complaints(page)
    page.goto(report)
    page.wait_for_selector("html[data-drawn]", **SETTLED)
    assert page.locator("figure svg.marks").count() == 6 and not said
    assert too_wide(page) == 0 and not faint(page)
    for figure in page.locator("figure").all():
        assert figure.locator("svg.marks").bounding_box()["width"] <= figure.bounding_box()["width"] + 1


@pytest.fixture
def page(chromium, report):
    context = chromium.new_context(viewport={"width": DESKTOP, "height": 900}, accept_downloads=True)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.said = complaints(page)
    page.goto(report)
    page.wait_for_selector("html[data-drawn]", **SETTLED)
    yield page
    assert not page.said
    context.close()


def figure(page, name):
    return page.locator(f"#figure-{name}")


def told(page, name, run):
    """The value of a run that the cursor shows in a chart, on top of its halo."""
    return figure(page, name).locator(".mark-text text").filter(has_text=re.compile(rf"^[\d.]+\s+{run}$")).last


def test_the_cursor_of_one_chart_stands_in_the_others(page):
    box = figure(page, "loss").locator("svg.marks").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    for run in ("one", "two"):
        for name in ("loss", "other"):
            told(page, name, run).wait_for(**SETTLED)
        assert told(page, "loss", run).text_content() == told(page, "other", run).text_content()


def test_arrow_keys_read_values_and_escape_ends_it(page):
    figure(page, "loss").locator(".chart").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    told(page, "loss", "two").wait_for(**SETTLED)
    page.keyboard.press("Escape")
    told(page, "loss", "two").wait_for(timeout=120_000, state="detached")


def test_numbers_go_to_the_clipboard_and_into_files(page):
    figure(page, "loss").get_by_role("button", name="copy numbers").click()
    figure(page, "loss").get_by_role("button", name="copied").wait_for()
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert lines[0].split("\t") == ["step", "tokens", "run", "loss"] and len(lines) == 1 + len(ROWS)
    assert [float(x) for x in lines[2].split("\t")[:2]] == [1, 100]
    for kind, start in (("csv", b"step,tokens,run,loss"), ("svg", b"<svg"), ("png", b"\x89PNG")):
        with page.expect_download() as coming:
            figure(page, "loss").get_by_role("button", name=kind, exact=True).click()
        with open(coming.value.path(), "rb") as file:
            assert file.read(len(start)) == start and coming.value.suggested_filename == f"loss.{kind}"


def test_what_is_chosen_is_drawn_and_kept_when_the_page_is_loaded_again(page):
    def title():
        return figure(page, "loss").locator(".role-axis-title").first.text_content()

    assert title() == "step"
    page.get_by_label("along x").select_option("tokens")
    page.wait_for_timeout(50)
    page.wait_for_selector("html[data-drawn]", **SETTLED)
    assert title() == "tokens"
    lines = figure(page, "loss").locator(".mark-line path")
    before = lines.count()
    page.get_by_label("two", exact=True).uncheck()
    page.wait_for_timeout(50)
    page.wait_for_selector("html[data-drawn]", **SETTLED)
    assert lines.count() < before
    page.reload()
    page.wait_for_selector("html[data-drawn]", **SETTLED)
    assert title() == "tokens" and not page.get_by_label("two", exact=True).is_checked()


def test_x_can_be_logarithmic_though_runs_begin_at_zero(page):
    def dots():
        return figure(page, "loss").locator(".role-axis-label").first.locator("text").all_text_contents()

    drawn = dots()
    page.get_by_label("logarithmic x").check()
    page.wait_for_timeout(50)
    page.wait_for_selector("html[data-drawn]", **SETTLED)
    assert dots() != drawn and {"0", "10", "100"} <= set(dots())
    box = figure(page, "loss").locator("svg.marks").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    told(page, "other", "two").wait_for(**SETTLED)
    page.reload()
    page.wait_for_selector("html[data-drawn]", **SETTLED)
    assert page.get_by_label("logarithmic x").is_checked() and "10" in dots()


def test_a_logarithmic_axis_is_a_click_away_and_smoothing_can_be_switched_off(page):
    def shape():
        return figure(page, "loss").locator(".mark-line path").last.get_attribute("d")

    drawn = shape()
    button = figure(page, "loss").get_by_role("button", name="log y")
    button.click()
    page.wait_for_timeout(500)
    assert button.get_attribute("aria-pressed") == "true" and shape() != drawn
    button.click()
    page.wait_for_timeout(500)
    page.get_by_label("smoothing").select_option("none")
    page.wait_for_timeout(50)
    page.wait_for_selector("html[data-drawn]", **SETTLED)
    assert shape() != drawn
