"""Draws the pictures in the documentation: ``python docs/pictures.py`` (or ``make pictures``).

Those of pages are taken by the system's Chromium, so they need it and ``galvatron[dev]``.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console

import galvatron
from galvatron.planner.pages.plan_page import plan_page
from galvatron.planner.plan.render import plan_view

HERE = Path(__file__).parent
_PHONE = {"width": 390, "height": 844}


def main() -> None:
    """A plan as the terminal shows it, its page, and the studio."""
    _terminal()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("the pictures of pages are as they were: no chromium on this machine (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        _pages(browser)
        _studio(browser)
        browser.close()


def _terminal() -> None:
    console = Console(record=True, width=110, file=io.StringIO())
    console.print("$ galvatron plan llama3-8b --cluster h100-8 --batch 128")
    console.print(plan_view(galvatron.plan("llama3-8b", "h100-8", batch=128)))
    console.save_svg(str(HERE / "plan.svg"), title="galvatron")


def _pages(browser: Any) -> None:
    """A plan of several stages, wide and light, narrow and dark."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.html"
        plan_page(galvatron.plan("bert-huge-48", "titan-rtx-8", batch=32, memory="8GiB", pipeline=4)).save(file)
        for name, options in (
            ("page.png", {"viewport": {"width": 1000, "height": 1250}, "color_scheme": "light"}),
            ("page-phone.png", {"viewport": _PHONE, "color_scheme": "dark"}),
        ):
            page = browser.new_context(offline=True, **options).new_page()
            page.goto(file.as_uri())
            page.wait_for_selector("#timeline svg rect")
            _save(page, name)


def _studio(browser: Any) -> None:
    """A question with what-ifs, of the studio that the command line starts."""
    command = [sys.executable, "-m", "galvatron", "studio"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[0]
            page = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light").new_page()
            page.goto(address)
            for name, value in (("tokens", "15e9"), ("price", "2.5"), ("set-batch", "128")):
                page.fill(f"#{name}", value)
            page.wait_for_selector("body.settled")
            page.wait_for_selector("#what-ifs[data-done]", timeout=60_000)
            _save(page, "studio.png")
        finally:
            process.kill()


def _save(page: Any, name: str) -> None:
    """With 255 colours, which is a third of the size and looks the same."""
    whole = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    whole.quantize(255, dither=Image.Dither.NONE).save(HERE / name, optimize=True)


if __name__ == "__main__":
    main()
