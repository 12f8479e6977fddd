"""A real browser for tests: the system's Chromium, without network; tests are skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

__all__ = ["cut_off", "needs_browser", "opened_browser"]

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip
_CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(
    _CHROMIUM is None or find_spec("playwright") is None,
    reason="no browser: apt-get install chromium, and pip install playwright",
)


@contextmanager
def opened_browser() -> Iterator[Any]:
    """Chromium, driven by playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=list(_FLAGS))
        yield browser
        browser.close()


def cut_off(page: Any) -> list[str]:
    """Words of charts that reach out of their section."""
    found: list[str] = page.evaluate(
        "[...document.querySelectorAll('.chart svg text')].filter(text => {"
        " const own = text.getBoundingClientRect(), around = text.closest('section').getBoundingClientRect();"
        " return own.width > 0 && (own.left < around.left || own.right > around.right);"
        "}).map(text => text.textContent)"
    )
    return found
