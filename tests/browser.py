"""Pages in a real browser: Debian's chromium, driven by playwright. Tests that need it are slow, and are skipped without it."""

from __future__ import annotations

import contextlib
import shutil

import pytest

DESKTOP, PHONE = 1280, 390


@contextlib.contextmanager
def browser():
    """A headless chromium; skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    where = shutil.which("chromium") or shutil.which("google-chrome")
    if where is None:
        pytest.skip("needs chromium")
    with sync_api.sync_playwright() as playwright:
        # Root, as in a container, may not use the sandbox.
        running = playwright.chromium.launch(executable_path=where, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield running
        finally:
            running.close()


def complaints(page) -> list[str]:
    """A list that fills with what the console of a page says, and with its errors."""
    said: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}") if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    # What the next page breaks off is not missing.
    page.on("requestfailed", lambda request: said.append(f"{request.failure}: {request.url}") if "ABORTED" not in request.failure else None)
    return said


def too_wide(page) -> int:
    """By how many pixels the page can be scrolled sideways."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def faint(page) -> list[str]:
    """Text that is seen and stands out from what is behind it by less than WCAG 2.2 asks for (AA: 4.5, large text 3); one of each kind."""
    return page.evaluate(_FAINT)


_FAINT = """() => {
  const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const read = new Map();
  const rgba = (colour) => {
    if (!read.has(colour)) {
      pixel.clearRect(0, 0, 1, 1);
      pixel.fillStyle = colour;
      pixel.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
      read.set(colour, [r, g, b, a / 255]);
    }
    return read.get(colour);
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => a * value + (1 - a) * below[i]);
  const light = (colour) => {
    const [r, g, b] = colour.map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  // The cell of a heatmap, the bar: the last one drawn below the middle of a text.
  const below = (text, { left, right, top, bottom }) => [...text.ownerSVGElement.querySelectorAll(".mark-rect path, .mark-bar path")]
    .findLast((path) => {
      const box = path.getBoundingClientRect(), x = (left + right) / 2, y = (top + bottom) / 2;
      return box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
    });
  const lineage = (element) => element ? [...lineage(element.parentElement), element] : [];
  const found = new Map();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, text = texts.currentNode.data.trim();
    if (!text || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (element.closest("script, style, noscript, template, :disabled, [aria-disabled=true]")) continue;
    const box = element.getBoundingClientRect(), style = getComputedStyle(element), drawn = element instanceof SVGElement;
    if (box.width < 2 || box.height < 2 || (drawn && style.stroke !== "none")) continue;
    let behind = [255, 255, 255], opacity = 1, unknown = false;
    for (const one of lineage(element)) {
      const { backgroundColor, backgroundImage, opacity: own } = getComputedStyle(one);
      unknown = backgroundImage !== "none" || (unknown && rgba(backgroundColor)[3] < 1);
      behind = over(rgba(backgroundColor), behind);
      opacity *= own;
    }
    if (unknown) continue;
    const cell = drawn && below(element, box);
    if (cell) {
      const { fill, fillOpacity, opacity: own } = getComputedStyle(cell), [r, g, b, a] = rgba(fill);
      behind = over([r, g, b, a * fillOpacity * own], behind);
    }
    const [r, g, b, a] = rgba(drawn ? style.fill : style.color);
    const seen = over([r, g, b, a * opacity * (drawn ? style.fillOpacity : 1)], behind);
    const [high, low] = [light(seen), light(behind)].sort((x, y) => y - x), ratio = (high + 0.05) / (low + 0.05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) {
      const kind = `${seen.map(Math.round)} on ${behind.map(Math.round)}`;
      const where = `"${text.slice(0, 30)}" in ${element.tagName}.${element.getAttribute("class")}`;
      if (!found.has(kind)) found.set(kind, `${ratio.toFixed(2)}: ${kind}, ${size}px: ${where}`);
    }
  }
  return [...found.values()];
}"""
