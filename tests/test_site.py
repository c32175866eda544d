"""The site of `make docs`: built strictly, and every page opened in a browser at the width of a desktop and of a phone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, browser, complaints, faint, too_wide

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)  # raises where anything is broken, undocumented or not rendered
    return folder


def test_fetches_nothing(site):
    """Scripts, styles, fonts and pictures lie in the folder; links to elsewhere are for the reader to follow."""
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|source|iframe)\b[^>]*\bsrc=[\"']?([^\"' >]+)", text)
        loaded += [tag for tag in re.findall(r"<link\b[^>]*>", text) if "stylesheet" in tag or "preload" in tag]
        assert not [one for one in loaded if re.search(r"(https?:)?//", one)], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text("utf-8")), style


@pytest.mark.parametrize("width, scheme", [(DESKTOP, "light"), (PHONE, "dark")])
def test_every_page_in_a_browser(site, width, scheme):
    """Nothing on the console, no scrolling sideways, text that stands out, pictures that are there."""
    pages = sorted(path.relative_to(site) for path in site.rglob("*.html") if path.name != "404.html")
    assert len(pages) > 40
    wrong = []
    with browser() as running:
        page = running.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said = complaints(page)
        for path in pages:
            page.goto((site / path).as_uri(), wait_until="load", timeout=120_000)
            if (pale := faint(page)) or said or too_wide(page) > 0:
                wrong.append((str(path), too_wide(page), [*said], pale))
            said.clear()
            broken = page.evaluate("[...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)")
            assert not broken, path
    assert not wrong


def test_search_and_equations_work_where_a_page_was_opened_from_a_folder(site):
    with browser() as running:
        page = running.new_page(viewport={"width": DESKTOP, "height": 900})
        said = complaints(page)
        page.goto((site / "guides" / "residuals.html").as_uri())
        assert page.locator("math[display=block]").first.bounding_box()["height"] > 15
        page.goto((site / "index.html").as_uri())
        page.locator("input[name=query]").click()
        page.keyboard.type("Stiefel")
        page.locator(".md-search-result__item").first.wait_for(timeout=120_000)
        assert not said
