"""Devices that are no power of two, and micro-batches too small to divide by the factors of two layouts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from longer import longer
from oracle import Case
from parity import check
from small_models import config

from galvatron.core.spec import Strategy, factor_by_factor

_SIX = config("bert", hidden_size=24, num_attention_heads=6, intermediate_size=48)


def _by_digits(stage: list[str], rows: int) -> list[bool]:
    layouts = [Strategy.parse(text).batch_factors for text in stage]
    return [factor_by_factor(source, target, rows) for source, target in pairwise(layouts)]


@pytest.mark.parametrize(
    ("stage", "lines_up"),
    [
        longer(["tp6", "sdp6", "dp3-tp2+rc", "tp3-dp2+zero2"], [True, True, True]),
        longer(["dp6", "dp2-tp3", "dp3-tp2", "tp3-sdp2"], [False, False, True]),
        longer(["sdp2-dp3", "tp2-sdp3+rc", "sdp6", "tp3-dp2"], [True, False, True]),
        (["tp2-dp3", "tp3-sdp2", "dp2-tp3", "sdp6"], [False, False, False]),
    ],
)
def test_six_devices(stage: list[str], lines_up: list[bool]) -> None:
    """3·2 and 2·3 write ranks in two ways; between neighbours that differ so rows are gathered whole."""
    assert _by_digits(stage, 6) == lines_up
    check(Case(config=_SIX, stages=[stage], batch=12, micro_batches=2, clip=0.5, padding=True, steps=2))


@pytest.mark.parametrize(
    "stages",
    [
        [["dp3", "sdp3"], ["tp3+rc", "dp3+zero2"]],
        longer([["tp2", "sdp2"], ["dp2"], ["tp2"]]),
    ],
)
def test_pipelines_of_six_devices(stages: list[list[str]]) -> None:
    check(Case(config=_SIX, stages=stages, batch=18, micro_batches=3, clip=0.5, padding=True, steps=2))


@pytest.mark.parametrize(
    ("stages", "batch"),
    [
        longer([["dp2-tp2", "tp2-dp2", "tp4+sp", "sdp2-tp2"]], 4),
        longer([["dp4-tp2", "tp2-dp4", "sdp2-tp4", "tp4-sdp2"]], 8),
        ([["tp2-dp2", "dp2-tp2"], ["dp2-tp2", "tp2-sdp2"]], 4),
    ],
)
def test_fewer_rows_than_two_layouts_need(stages: list[list[str]], batch: int) -> None:
    """Two micro-batches of half as many rows as the stage has devices."""
    assert not all(all(_by_digits(stage, batch // 2)) for stage in stages)
    check(Case(config=config("bert"), stages=stages, batch=batch, micro_batches=2, clip=0.5, padding=True, steps=2))
