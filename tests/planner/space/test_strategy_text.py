"""Strategies as text: what a plan file says must come back as the same strategy, and nonsense must not."""

from __future__ import annotations

import pytest

from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Kind, Strategy
from galvatron.planner.space import EXTENDED, Space


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 4, 6, 8])
def test_round_trip(devices: int, experts: bool) -> None:
    strategies = Space(name="full", title="", switches=EXTENDED).strategies(devices, experts=experts)
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


def test_axes_of_the_experts_follow_a_slash() -> None:
    strategy = Strategy.parse("dp4-tp2/ep4-tp2+rc")
    assert [(axis.kind, axis.degree) for axis in strategy.experts] == [("ep", 4), ("tp", 2)]
    assert (str(strategy), strategy.devices, strategy.data_degree, strategy.recompute) == (
        "dp4-tp2/ep4-tp2+rc", 8, 4, True
    )  # fmt: skip
    assert strategy.token_slices == frozenset()
    assert Strategy.parse("dp4-tp2/ep8").token_slices == strategy.factors(Kind.TP)
    assert Strategy.parse("dp4-tp2").token_slices == frozenset(), "experts that follow take all tokens"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ep8", "write it after a slash"),
        ("dp2-ep4", "write it after a slash"),
        ("sdp8/dp8", "have no ep"),
        ("dp8/ep4", "are for 4 devices, those of the layer for 8"),
        ("single/ep2", "are for 2 devices, those of the layer for 1"),
        ("dp4-tp2/tp2-ep4", "lack each other's tokens"),
        ("dp8/ep4-tp2", "lack each other's tokens"),
        ("dp4/ep2-ep2", "each kind may appear once"),
        ("dp4/ep4-dp1", "at least 2"),
        ("dp2/ep2+sp", "needs a tp axis"),
        ("dp2/", "is not a strategy"),
        ("dp2/ep2/ep2", "is not a strategy"),
        ("dp2+rc/ep2", "is not a strategy"),
    ],
)
def test_axes_of_the_experts_must_go_with_those_of_the_layer(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Strategy.parse(text)


@pytest.mark.parametrize("text", ["dp" + "9" * 5000, "dp\u0662", "dp02", "dp2+rc+rc"])
def test_what_str_never_writes_is_refused(text: str) -> None:
    """Parse is the inverse of str: no endless numbers (a ValueError), other alphabets' factors, or a flag twice."""
    with pytest.raises(InvalidInput):
        Strategy.parse(text)
