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
