"""The studio in a real browser: the plan follows the form, light, dark and narrow, without an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from browser import cut_off, needs_browser, opened_browser
from served import Studio, asked, served_studio

import galvatron

pytestmark = needs_browser


@pytest.fixture(scope="module")
def studio() -> Iterator[Studio]:
    with served_studio() as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as opened:
        yield opened


class Page:
    """A studio's page, and what went wrong on it."""

    def __init__(self, browser: Any, studio: Studio, **options: Any) -> None:
        self.page = browser.new_context(**options).new_page()
        self.problems: list[str] = []
        self.page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith((studio.address, "data:", "blob:"))
                else self.problems.append(request.url)
            ),
        )
        self.page.goto(f"{studio.address}/#{quote(json.dumps(asked('bert-base', 'titan-rtx-8', batch=64)))}")
        self.page.wait_for_selector("#timeline svg rect")

    def change(self, act: Any) -> None:
        """Do something to the form, and wait for the answer to it."""
        self.page.wait_for_selector("body.settled")
        self.page.evaluate("document.body.classList.remove('settled')")
        act()
        self.page.wait_for_selector("body.settled")

    def fill(self, selector: str, value: str) -> None:
        self.change(lambda: self.page.fill(selector, value))

    def throughput(self) -> str:
        text: str = self.page.text_content("#cards .card b")
        return text


@pytest.fixture(scope="module")
def page(browser: Any, studio: Studio) -> Page:
    """One page that the tests change in turn."""
    return Page(browser, studio, viewport={"width": 1280, "height": 900}, accept_downloads=True)


def _plan(**setup: Any) -> galvatron.Plan:
    return galvatron.plan("bert-base", "titan-rtx-8", **setup)


def test_the_plan_follows_memory_batch_length_and_switches(page: Page) -> None:
    """From what the address asks on; a reload asks the same again."""
    assert page.throughput() == f"{_plan(batch=64).throughput:.2f}"
    page.change(lambda: page.page.locator("#set-memory").fill("4"))
    plan = _plan(batch=64, memory="4GiB")
    assert page.throughput() == f"{plan.throughput:.2f}"
    drawn = page.page.eval_on_selector_all(
        "#memory svg rect[aria-label]", "bars => bars.map(bar => bar.getBoundingClientRect().width)"
    )
    rule = page.page.evaluate(
        "(() => { const box = name => document.querySelector(name).getBoundingClientRect();"
        " return box('#memory line[aria-label=budget]').x"
        " - box('#memory svg rect[aria-label]').x })()"
    )
    whole = plan.memory_bytes if plan.pipeline_degree == 1 else sum(stage.memory_bytes for stage in plan.stages)
    assert sum(drawn) / rule == pytest.approx(whole / plan.memory_budget_bytes, rel=0.03)
    page.change(lambda: page.page.locator("#batch-slider").fill("6"))
    assert page.page.input_value("#set-batch") == "32"
    page.fill("#set-sequence_length", "256")
    page.page.click("summary:has-text('Switches')")
    page.change(lambda: page.page.select_option("#set-recompute", "off"))
    page.page.reload()
    page.page.wait_for_selector("body.settled")
    plan = _plan(batch=32, memory="4GiB", sequence_length=256, recompute=False)
    assert page.throughput() == f"{plan.throughput:.2f}"
    assert page.problems == []


def test_what_does_not_fit_says_what_would_and_tries_it(page: Page) -> None:
    page.fill("#set-sequence_length", "512")
    page.change(lambda: page.page.locator("#set-memory").fill("1.5"))
    assert page.page.text_content("#problem h2") == "It does not fit"
    assert "the smallest budget that fits is" in page.page.text_content("#problem p")
    assert not page.page.is_visible("#cards .card"), "no plan of another question"
    line = page.page.wait_for_selector("#problem li:has-text('(--recompute)') button")
    assert page.page.query_selector("#problem li:has-text('more devices') button") is None, "this machine has 8"
    page.change(line.click)
    assert page.page.input_value("#set-recompute") == "on"
    assert page.throughput() == f"{_plan(batch=32, memory='1.5GiB', recompute=True).throughput:.2f}"
    assert page.problems == []


def test_what_ifs_stand_side_by_side(page: Page) -> None:
    page.change(lambda: page.page.locator("#set-memory").fill("24"))
    page.page.wait_for_selector("#what-ifs tr.what-if:has-text('4 devices instead of 8')", timeout=30_000)
    page.page.click("#what-ifs tr.ours button")
    page.change(lambda: page.page.click("#what-ifs tr.what-if:has-text('batch 64') button"))
    assert page.page.input_value("#set-batch") == "64"
    page.page.wait_for_selector("#what-ifs tr.kept")
    before, now = _plan(batch=32, recompute=True), _plan(batch=64, recompute=True)
    assert page.throughput() == f"{now.throughput:.2f}"
    kept = page.page.text_content("#what-ifs tr.kept")
    assert f"{before.throughput:.4g}" in kept
    assert f"{round(100 * before.throughput / now.throughput)}%" in kept
    assert page.problems == []


def test_files_are_uploaded_edited_and_downloaded(page: Page, tmp_path: Path) -> None:
    config = {"model_type": "bert", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
              "intermediate_size": 2048, "note": "<img src=x onerror=alert(1)>".replace("/", "")}  # fmt: skip
    (tmp_path / "<b>mine.json").write_text(json.dumps(config))
    page.fill("#set-batch", "32")
    page.change(lambda: page.page.set_input_files("#model-upload", tmp_path / "<b>mine.json"))
    assert page.page.text_content("#title") == "<b>mine on titan-rtx-8"
    page.page.click("#cluster-edit")
    text = page.page.input_value("#cluster-text")
    page.fill("#cluster-text", text.replace('memory = "24GiB"', 'memory = "10GiB"').replace("titan-rtx-8", "mine"))
    assert "10.0 GiB each" in page.page.text_content("#subtitle")
    with page.page.expect_download() as waiting:
        page.page.click("text=Download plan.json")
    waiting.value.save_as(tmp_path / "plan.json")
    plan = galvatron.Plan.load(tmp_path / "plan.json")
    assert plan.cluster.facts.name == "mine"
    assert plan.cluster.facts.device.memory_bytes == 10 * 2**30
    assert plan.model.config is not None
    assert plan.model.config["num_hidden_layers"] == 6
    assert page.throughput() == f"{plan.throughput:.2f}"
    page.fill("#cluster-text", "name = 3")
    assert page.page.text_content("#problem h2") == "That cannot be planned"
    problems = [problem for problem in page.problems if "400 (Bad Request)" not in problem]  # Chromium's own line
    assert problems == []


@pytest.mark.parametrize(("scheme", "width"), [("dark", 390)])
def test_the_studio_is_readable(browser: Any, studio: Studio, scheme: str, width: int) -> None:
    narrow = Page(browser, studio, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert narrow.page.evaluate("document.documentElement.scrollWidth") <= width
    assert cut_off(narrow.page) == []
    for chart in ("layers", "timeline", "memory", "times"):
        box = narrow.page.query_selector(f"#{chart} svg:has(g)").bounding_box()
        assert 0 < box["width"] <= width
    colours = narrow.page.evaluate(
        "[getComputedStyle(document.querySelector('#set-batch')).color,"
        " getComputedStyle(document.querySelector('#set-batch')).backgroundColor]"
        ".map(text => text.match(/[0-9.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part) / 3, 0))"
    )
    assert abs(colours[0] - colours[1]) > 120
    assert narrow.problems == []
