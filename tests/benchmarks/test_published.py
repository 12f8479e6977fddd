"""Presets against published runs: how far prices may be off, and that the table says where its figures come from."""

from __future__ import annotations

import json
import statistics

import pytest

from published import HERE, Priced, compared, published, read_runs, read_sources


@pytest.fixture(scope="module")
def rows() -> list[Priced]:
    return [compared(run) for run in read_runs()]


def test_prices_are_close_to_what_was_measured(rows: list[Priced]) -> None:
    counted = [row for row in rows if row.run.role != "beyond"]
    for device in ("a100-80gb", "h100"):
        own = [abs(row.error) for row in counted if row.run.device.removesuffix("-500w") == device]
        assert len(own) >= 30
        assert statistics.median(own) < 0.06
        assert max(own) < 0.20
    held = [abs(row.error) for row in counted if row.run.role == "held out"]
    assert len(held) == 12
    assert statistics.median(held) < 0.10
    assert max(abs(row.error) for row in counted) < 0.25


def test_the_table_is_what_the_code_says_today(rows: list[Priced]) -> None:
    saved = json.loads((HERE / "results" / "published.json").read_text(encoding="utf-8"))
    assert [row["predicted"] for row in saved] == pytest.approx([row.predicted for row in rows], rel=1e-6)
    page = (HERE.parent / "docs" / "published.md").read_text(encoding="utf-8")
    assert all(f"| {row.predicted:,.0f} | {row.error:+.1%} |" in page for row in rows)


def test_every_run_has_a_source() -> None:
    sources = read_sources()
    assert {run.source for run in read_runs()} == set(sources)
    assert all(facts["url"] and facts["place"] and facts["assumed"] for facts in sources.values())


def test_published_shares_of_peak_follow_from_the_runs() -> None:
    """Megatron's own figures: 51.4% for 175B in 13.75 s, 56.3% for 1T in 71.49 s, of 312 TFLOP/s with its count of
    operations (72·B·s·l·h²·(1 + s/6h + V/12lh))."""
    for name, layers, hidden, share in (("gpt-175b", 96, 12288, 0.514), ("gpt-1t", 128, 25600, 0.563)):
        run = next(run for run in read_runs() if run.model == name and run.recompute == "selective")
        each = 72 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (12 * layers * hidden))
        assert published(run) * each / 312e12 == pytest.approx(share, rel=0.003)
