"""The page: one file, no network, no way in for markup, whole or absent."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon import UserError, files
from gnomon.report import Axis, Bar, Page, curves, heatmap

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

EVIL = "</script></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'{{ 7*7 }}"
ROWS = [{"step": i, "loss": 3 - i / 10, "run": run} for i in range(10) for run in ("one", EVIL)]


class Reader(HTMLParser):
    """Every element with its attributes, and the text of each."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "link"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts.append((self._open[-1] if self._open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag: str) -> str:
        return "".join(data for name, data in self.texts if name == tag)


def full_page() -> Page:
    page = Page(f"Title {EVIL}", f"Subtitle {EVIL}").text(f"{EVIL} **{EVIL}** `{EVIL}` *{EVIL}*\n\n- {EVIL}")
    page.flags([EVIL, {EVIL: EVIL}], title=EVIL, level="error").facts({EVIL: {EVIL: EVIL}}, title=EVIL)
    page.table([{EVIL: EVIL, "bar": 0.5}], formats={"bar": Bar(null=0.1)}, title=EVIL)
    page.table([{"a": 1}], title=EVIL, folded=True)
    for i in range(5):
        page.section(f"Section {i} {EVIL}")
    chart = curves(ROWS, "step", Axis("loss", EVIL, reference={EVIL: 2.5}), "run", EVIL)
    return page.chart(chart, EVIL, "loss").chart(heatmap(ROWS, "run", "step", "loss"), width=0.5)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return full_page().write(tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def read(written) -> Reader:
    return Reader(written.read_text("utf-8"))


def test_fetches_nothing(read, written):
    for tag in ("script", "link", "img", "iframe", "object", "embed", "source", "base"):
        for attributes in read.all(tag):
            assert not {"src", "href", "data", "srcset"} & set(attributes), tag
    style = read.text("style")
    assert "url(" not in style and "@import" not in style
    for attributes in read.all("a"):
        assert attributes["href"].startswith("#")


def test_only_its_own_two_scripts_may_run(read):
    policy = next(a["content"] for a in read.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "unsafe" not in rules["script-src"]
    scripts = [data for tag, data in read.texts if tag == "script"]
    runnable = [data for data in scripts if not data.startswith("{")]
    digests = [base64.b64encode(hashlib.sha256(data.encode()).digest()).decode() for data in runnable]
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests) and len(digests) == 2
    assert "alert(1)" not in "".join(runnable)


def test_nothing_passed_in_becomes_markup(read):
    kinds = [attributes.get("type") for attributes in read.all("script")]
    assert kinds.count("application/json") == 3 and len(kinds) == 5
    assert not read.all("img")
    assert not [name for _, attributes in read.elements for name in attributes if name.startswith("on")]
    for tag in ("h1", "h2", "strong", "code", "em", "li", "dt", "dd", "th", "td", "figcaption", "summary"):
        assert "<img src=x onerror=alert(2)>" in read.text(tag), tag
    assert "{{ 7*7 }}" in read.text("h1")


def test_specs_are_json_and_hold_the_data(read):
    specs = [json.loads(data) for tag, data in read.texts if tag == "script" and data.startswith("{")]
    rows = specs[0]["data"]
    assert rows["columns"] == ["step", "run", "loss"] and [9, EVIL, 2.1] in rows["rows"]
    assert specs[0]["width"] == "container" and "config" not in specs[0]
    assert set(specs[2]) == {"light", "dark"}


def test_libraries_are_there_once_however_many_charts(tmp_path):
    sizes = []
    for count in (1, 6):
        page = Page("Size")
        for i in range(count):
            page.chart(curves(ROWS, "step", "loss", "run"), name=f"chart {i}")
        html = page.html()
        assert html.count("window.vegaEmbed=") == 1
        sizes.append(len(html))
    assert 500_000 < sizes[0] < 1_200_000 and sizes[1] - sizes[0] < 45_000


def test_figures_lie_beside_it(written):
    folder = written.parent / "figures"
    assert sorted(file.name for file in folder.iterdir()) == [
        "figure.csv", "figure.png", "figure.svg", "loss.csv", "loss.png", "loss.svg"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ElementTree.parse(folder / "loss.svg").getroot().tag.endswith("svg")
    lines = (folder / "loss.csv").read_text("utf-8").splitlines()
    assert lines[0] == "step,run,loss" and len(lines) == 1 + len(ROWS)


def test_figures_can_be_left_out(tmp_path):
    page = Page("No figures").chart(curves(ROWS, "step", "loss", "run"), name="loss")
    html = page.write(tmp_path / "report.html", figures=False).read_text("utf-8")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert "figures/" not in html


def test_works_without_charts_and_then_needs_no_scripts():
    read = Reader(Page("Words only").text("Some words.").table([{"a": 1}]).html())
    assert not read.all("script") and "Some words." in read.text("p")
    policy = next(a["content"] for a in read.all("meta") if a.get("http-equiv"))
    assert "script-src 'none'" in policy


@pytest.mark.parametrize("sections, contents", [(4, False), (5, True)])
def test_contents_come_with_the_fifth_section(sections, contents):
    page = Page("Sections")
    for _ in range(sections):
        page.section("Same name").text("Words.")
    read = Reader(page.html())
    assert bool(read.all("nav")) == contents
    targets = [a["id"] for a in read.all("section") if a["id"] != "top"]
    assert len(set(targets)) == sections
    if contents:
        assert [a["href"] for a in read.all("a")] == [f"#{target}" for target in targets]


def test_markdown_of_text():
    read = Reader(Page("T").text("## Loss\nIt *fell* by **half** in `train.py`\nat once.\n\n- a\n- b").html())
    assert read.text("h2") == "Loss" and read.text("li") == "ab"
    assert (read.text("em"), read.text("strong"), read.text("code")) == ("fell", "half", "train.py")
    assert read.text("p").startswith("It  by  in  at once.")


@settings(max_examples=15)
@given(st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn"), exclude_characters="*`#-"), min_size=1))
def test_any_text_arrives_as_it_was(text):
    read = Reader(Page(text).text(f"x {text}").flags([text]).html())
    words = text.split()
    assert read.text("h1").split() == words and read.text("li").split() == words
    # An empty line would part the paragraph; the paragraphs together hold the text.
    paragraphs = " ".join(data for tag, data in read.texts if tag == "p").split()
    assert paragraphs[: len(words) + 1] == ["x", *words]


def test_bars_have_their_length(read):
    assert {"style": "width:50.0%"} in read.all("i") and {"style": "left:10.0%"} in read.all("b")


def test_numbers_that_are_not_finite_do_not_break_the_page():
    alt = pytest.importorskip("altair")
    chart = alt.Chart(alt.Data(values=[{"a": math.nan, "b": 1}])).mark_point().encode(x="a:Q", y="b:Q")
    read = Reader(Page("Elsewhere").chart(chart).html())
    assert all("NaN" not in data for tag, data in read.texts if tag == "script" and data.startswith("{"))


@pytest.mark.parametrize("module", ["altair", "jinja2", "vl_convert"])
def test_without_the_extra_says_what_to_install(module, tmp_path, monkeypatch):
    page = Page("Page").chart(curves(ROWS, "step", "loss", "run"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r'pip install "gnomon\[report\]"'):
        page.write(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_page(tmp_path, monkeypatch):
    path = Page("Old").write(tmp_path / "report.html")
    old = path.read_text("utf-8")

    def full(_):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError):
        Page("New").write(path)
    assert path.read_text("utf-8") == old and [file.name for file in tmp_path.iterdir()] == ["report.html"]
