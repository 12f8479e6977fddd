"""Each of the paper's 22 strategies on 8 processes trains as a single process does (Section 3.2)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from longer import longer
from oracle import Case
from parity import check
from small_models import config

from galvatron.planner.space import space_named

_SPACE = space_named("full")
_STRATEGIES = [
    (degree, str(strategy))
    for degree in _SPACE.pipeline_degrees(8)
    for strategy in _SPACE.strategies(8 // degree)
]  # fmt: skip
_IN_FP32 = {(2, "tp2-dp2")}
_IN_FP64 = {(8, "single")}
"""What ``make test`` has by itself: that of eight stages, which no other plan here has."""


def _case(degree: int, strategy: str, dtype: torch.dtype) -> Case:
    layers = max(3, 2 * degree if degree < 4 else degree)
    each = layers // degree
    return Case(
        config=config("bert", num_hidden_layers=layers - 2),
        stages=[[strategy] * each for _ in range(degree)],
        micro_batches=min(degree, 4),
        schedule="1f1b" if dtype == torch.float64 else "gpipe",
        dtype=dtype,
        clip=0.5,
        steps=2,
    )


def test_there_are_22() -> None:
    assert len(_STRATEGIES) == 22
    assert {degree for degree, _ in _STRATEGIES} == {1, 2, 4, 8}


@pytest.mark.parametrize("degree", [1, longer(2), longer(4)])
def test_all_in_one_plan(degree: int) -> None:
    """Every strategy of this many stages, each in one of them; the longer run has each by itself."""
    own = [strategy for stages, strategy in _STRATEGIES if stages == degree]
    each = max(2, -(-len(own) // degree))
    case = replace(
        _case(degree, own[0], torch.float64),
        config=config("bert", num_hidden_layers=each * degree - 2),
        stages=[[own[(stage * each + place) % len(own)] for place in range(each)] for stage in range(degree)],
    )
    check(case)


@pytest.mark.parametrize(("degree", "strategy"), [own if own in _IN_FP64 else longer(*own) for own in _STRATEGIES])
def test_exact_in_fp64(degree: int, strategy: str) -> None:
    """Losses, norms, gradients and two AdamW steps; pipelines run 1F1B."""
    check(_case(degree, strategy, torch.float64))


@pytest.mark.parametrize(("degree", "strategy"), [own if own in _IN_FP32 else longer(*own) for own in _STRATEGIES])
def test_close_in_fp32(degree: int, strategy: str) -> None:
    """In the precision that training has; pipelines run GPipe."""
    check(_case(degree, strategy, torch.float32))
