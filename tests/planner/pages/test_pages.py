"""The pages in a real browser: offline, without an error, with the numbers of the plan, light, dark and narrow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import cut_off, needs_browser, opened_browser
from longer import longer

import galvatron
from galvatron.planner.pages.comparison_page import comparison_page
from galvatron.planner.pages.plan_page import plan_page
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.compare import compare
from galvatron.planner.plan.setup import Setup, request_for

_MOST_BYTES = 1_000_000


@pytest.fixture(scope="module")
def plan() -> galvatron.Plan:
    """Two stages of mixed strategies, from a model whose name tries to leave its place."""
    request = request_for("bert-tiny", "titan-rtx-8", Setup(batch=32))
    request = replace(request, model=replace(request.model, name="</script><b id=evil>x"))
    return priced(request, [["dp4", "tp2-dp2"], ["sdp4", "dp4"]], micro_batches=4)


@pytest.fixture(scope="module")
def page_file(plan: galvatron.Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    plan_page(plan, seconds=0.5).save(path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as opened:
        yield opened


def _facts(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', text, re.S)
    assert found is not None
    facts: dict[str, Any] = json.loads(found[1])
    return facts


def test_a_page_is_one_small_file_that_names_no_address(page_file: Path, plan: galvatron.Plan) -> None:
    text = page_file.read_text(encoding="utf-8")
    assert page_file.stat().st_size < _MOST_BYTES
    assert not re.findall(r"<(?:link|img|iframe|script)[^>]*\b(?:src|href)=", text)
    facts = _facts(text)
    assert [part["value"] for part in facts["memory"]["parts"]] == [
        value
        for stage in plan.stages
        for value in (stage.memory.states, stage.memory.activations, stage.memory.transient, stage.memory.reserved)
    ]
    for space in facts["spaces"]:
        if space["throughput"] is not None:
            fresh = galvatron.plan("bert-tiny", "titan-rtx-8", batch=32, space=space["space"])
            assert space["throughput"] == fresh.throughput
    for point in facts["batches"]:
        if not point["ours"]:
            assert point["throughput"] == galvatron.plan("bert-tiny", "titan-rtx-8", batch=point["at"]).throughput


def test_many_micro_batches_stay_small() -> None:
    request = request_for("bert-tiny", "titan-rtx-8", Setup(batch=4096))
    many = priced(request, [["dp4", "tp2-dp2"], ["sdp4", "dp4"]], micro_batches=1024)
    assert len(plan_page(many, seconds=0.0).html().encode()) < _MOST_BYTES


def _opened(browser: Any, path: Path, **options: Any) -> tuple[Any, list[str]]:
    context = browser.new_context(offline=True, **options)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith("file:") else problems.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("#timeline svg rect")
    return page, problems


def _bars(page: Any, chart: str) -> dict[str, float]:
    """The width of each bar in pixels, by its label."""
    found: list[tuple[str, float]] = page.evaluate(
        "name => [...document.querySelectorAll(`#${name} svg rect[aria-label]`)]"
        ".map(bar => [bar.getAttribute('aria-label'), bar.getBoundingClientRect().width])",
        chart,
    )
    return {str(label): float(width) for label, width in found}


@needs_browser
def test_bars_have_the_lengths_of_the_plan(browser: Any, page_file: Path, plan: galvatron.Plan) -> None:
    page, problems = _opened(browser, page_file, viewport={"width": 1100, "height": 900})
    assert page.query_selector("#evil") is None
    memory = _bars(page, "memory")
    scale = sum(memory.values()) / sum(stage.memory_bytes for stage in plan.stages)
    for number, stage in enumerate(plan.stages):
        own = [width for label, width in memory.items() if label.startswith(f"stage {number},")]
        assert sum(own) == pytest.approx(scale * stage.memory_bytes, rel=0.02, abs=1)
    passes = _bars(page, "timeline")
    for number in range(2):
        for kind in ("forward", "backward"):
            drawn = {label for label in passes if label.startswith(f"stage {number}, {kind} of micro-batch")}
            assert len({label.split("(")[0].split(", ")[1] for label in drawn}) == plan.micro_batches
    assert len(_bars(page, "layers")) == 4
    assert problems == []


@needs_browser
def test_the_timeline_zooms_and_says_what_is_under_the_pointer(browser: Any, page_file: Path) -> None:
    page, problems = _opened(browser, page_file, viewport={"width": 1100, "height": 900})
    first = "stage 0, forward of micro-batch 0"

    def width() -> float:
        return max(each for label, each in _bars(page, "timeline").items() if label.startswith(first))

    before = width()
    page.click("#go-left")
    page.click("#zoom-in")
    for _ in range(4):
        page.click("#go-left")
    assert width() > 1.5 * before
    page.click("#zoom-all")
    assert width() == pytest.approx(before, rel=0.02)
    bar = page.query_selector(f"#timeline svg rect[aria-label^='{first}']")
    bar.hover()
    page.wait_for_selector("#timeline [aria-label='tip'] text")
    assert "forward of micro-batch 0" in page.text_content("#timeline [aria-label='tip']")
    assert problems == []


@needs_browser
@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "dark"), (1100, "light"), longer(390, "light"), longer(1100, "dark")]
)
def test_it_is_readable(browser: Any, page_file: Path, width: int, scheme: str) -> None:
    """Nothing is wider than the screen, charts are drawn, and text stands out from what is behind it."""
    page, problems = _opened(browser, page_file, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert cut_off(page) == []
    for chart in ("layers", "timeline", "memory", "times", "spaces", "batches", "budgets"):
        box = page.query_selector(f"#{chart} svg:has(g)").bounding_box()  # not the legend's
        assert 0 < box["width"] <= width
        assert box["height"] > 40
    ink, paper = page.evaluate(
        "[getComputedStyle(document.querySelector('#memory svg text')).fill,"
        " getComputedStyle(document.querySelector('section')).backgroundColor]"
    )
    assert abs(_lightness(page, ink) - _lightness(page, paper)) > 120
    assert problems == []


def _lightness(page: Any, colour: str) -> float:
    if not colour.startswith("rgb"):
        colour = page.evaluate("getComputedStyle(document.querySelector('#memory svg')).color")
    return sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) / 3


@needs_browser
def test_a_comparison_is_drawn(browser: Any, tmp_path: Path) -> None:
    request = request_for("bert-tiny", "titan-rtx-8", Setup(batch=32, memory="2GiB"))
    comparison = compare(request, [2**30, 2 * 2**30])
    comparison_page(comparison).save(tmp_path / "compare.html")
    page = browser.new_context(offline=True).new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((tmp_path / "compare.html").as_uri())
    dots = page.query_selector_all("#comparison svg circle")
    assert len(dots) == sum(cell.plan is not None for row in comparison.rows for cell in row)
    assert problems == []


def test_a_notebook_shows_a_plan(plan: galvatron.Plan) -> None:
    shown = plan._repr_html_()
    assert "evil>" not in shown
    assert f"{plan.throughput:.2f} samples/s" in shown
    assert shown.count("<meter") == 2
