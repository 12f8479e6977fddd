"""A strategy that cannot run a layer is refused with what is really wrong with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron.core.spec import Strategy
from galvatron.measure.models import load_any_model
from galvatron.planner.plan.reasons import why_not
from galvatron.planner.plan.setup import Setup, request_for
from galvatron.planner.space import EXTENDED, Space

_MODEL = request_for("llama3-8b", "h100-8", Setup(batch=8, sequence_length=4096), load_any_model).model


@pytest.mark.parametrize(
    ("kind", "strategy", "said"),
    [
        ("embedding", "tp8+sp", "it has no +sp"),
        ("decoder", "dp8+fl", "+fl is for a head"),
        ("decoder", "tp16", "16 does not divide its 8 heads"),
        ("head", "dp8+rs", "nobody knows what it keeps then"),
        ("decoder", "ulysses16", "32 heads, 8 of keys and values, do not divide"),
        ("decoder", "dp8/ep8", "it has no experts"),
        ("decoder", "tp8+sp", None),
        ("head", "dp8+fl", None),
    ],
)
def test_what_is_wrong_is_said(kind: str, strategy: str, said: str | None) -> None:
    (own,) = (each for each in _MODEL.kinds if each.name == kind)
    asked = Strategy.parse(strategy)
    found = why_not(_MODEL, own, asked)
    assert (found is None) == _MODEL.allows(own, asked)
    assert found is None if said is None else found is not None and said in found, found


def test_a_layer_that_tp_does_not_split_is_refused_for_its_sequences() -> None:
    """TP ranks may compute it whole, so TP is not what is wrong."""
    whole = replace(_MODEL.kinds[0], name="whole", tensor_parallel=None)
    model = replace(_MODEL, layers=(whole, *_MODEL.layers))
    assert why_not(model, whole, Strategy.parse("tp8")) is None
    assert why_not(model, whole, Strategy.parse("tp8+sp")) == "it has no +sp"


@pytest.mark.parametrize("preset", ["llama3-8b", "t5-large-32", "swin-huge-32", "vit-huge-32"])
def test_there_is_a_reason_wherever_a_strategy_is_refused(preset: str) -> None:
    model = request_for(preset, "h100-8", Setup(batch=8), load_any_model).model
    switches = replace(EXTENDED, context_parallel=True, zero3=True)
    for strategy in Space(name="full", title="", switches=switches).strategies(8):
        for kind in model.kinds:
            assert (why_not(model, kind, strategy) is None) == model.allows(kind, strategy), (kind.name, str(strategy))
