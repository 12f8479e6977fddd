"""Strategies as text: what a plan file says must come back as the same strategy, and nonsense must not."""

from __future__ import annotations

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Strategy
from galvatron.planner.space import EXTENDED, Space


@pytest.mark.parametrize("devices", [1, 2, 4, 6, 8, 12, 16])
def test_round_trip(devices: int) -> None:
    strategies = Space(name="full", title="", switches=EXTENDED).strategies(devices)
    texts = [str(strategy) for strategy in strategies]
    assert len(set(texts)) == len(texts)
    assert tuple(Strategy.parse(text) for text in texts) == strategies


def test_spelling() -> None:
    strategy = Strategy.parse("tp2-sdp4+sp+rc")
    assert [(axis.kind, axis.degree) for axis in strategy.axes] == [("tp", 2), ("sdp", 4)]
    assert (strategy.sequence_parallel, strategy.recompute, strategy.zero2) == (True, True, False)
    assert str(Strategy()) == "single"


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "dp", "2", "dp-2", "dp2-", "-dp2", "dp2--tp2", "dp2 tp2", "dp2_tp2", " dp2", "dp2 ", "dp2\n", "DP2"),
        *("pp2", "dpp2", "xdp2", "dp2+", "dp2+xx", "+rc", "dp2+RC", "dp2rc", "single2", "singlesingle", "single-dp2"),
        *("dp1", "dp0", "dp-1", "dp2.0", "dp1-tp2", "dp2-dp4", "tp2-sdp2-tp2", "sdp2-sdp2"),
        *("single+sp", "dp2+sp", "sdp8+sp", "single+zero2", "tp4+zero2", "sdp2+zero2", "dp2-sdp2+zero2"),
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    """A kind twice, a degree below two, a flag without its axis, or no strategy at all."""
    with pytest.raises(InvalidInput, match="strategy"):
        Strategy.parse(text)


@pytest.mark.parametrize("text", ["dp" + "9" * 5000, "dp\u0662", "dp02", "dp2+rc+rc"])
def test_what_str_never_writes_is_refused(text: str) -> None:
    """Parse is the inverse of str: no endless numbers (a ValueError), other alphabets' factors, or a flag twice."""
    with pytest.raises(InvalidInput):
        Strategy.parse(text)
