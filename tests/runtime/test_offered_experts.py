"""What the planner offers for experts is what the runtime takes: no plan that is written is refused."""

from __future__ import annotations

import pytest
import torch
from experts_oracle import MODELS, case, stock
from longer import longer

import galvatron
from galvatron.core.spec import Strategy
from galvatron.families.build import without_weights
from galvatron.families.registry import layered_model
from galvatron.planner.space import EXTENDED, space_named
from galvatron.runtime.experts.checks import check_experts


@pytest.mark.parametrize("family", ["mixtral", *map(longer, MODELS)])
def test_no_strategy_that_is_offered_is_refused(family: str) -> None:
    devices = 4
    given = case(family, [f"dp{devices}"] * 4, dtype=torch.float32)
    model = stock(given)
    batch = {name: torch.zeros(2, 8, dtype=torch.long) for name in ("input_ids", "labels")}
    spec = galvatron.describe(model, batch, given.training)
    layered = layered_model(without_weights(model))
    apart = 0
    for index, kind in enumerate(spec.layers):
        for strategy in space_named("full", EXTENDED).strategies(devices, experts=kind.experts is not None):
            if spec.allows(kind, strategy):
                Strategy.parse(str(strategy))
                check_experts(layered, index, f"layer {index}", strategy)
                apart += bool(strategy.experts)
    assert apart >= 5, "nothing that could be refused was offered"


def test_experts_that_tp_cannot_split_are_not_offered_with_tp() -> None:
    """Those of gpt-oss have a bias, which TP alone may share out."""
    given = case("gpt_oss", ["dp4"] * 4, dtype=torch.float32)
    batch = {name: torch.zeros(2, 8, dtype=torch.long) for name in ("input_ids", "labels")}
    spec = galvatron.describe(stock(given), batch, given.training)
    kinds = [kind for kind in spec.kinds if kind.experts is not None]
    assert kinds
    assert not any(kind.allows_experts(Strategy.parse("dp2-tp2/ep2-tp2")) for kind in kinds)
    assert all(kind.allows_experts(Strategy.parse("dp4/ep4")) for kind in kinds)
    assert all(kind.tensor_parallel is not None for kind in kinds)
