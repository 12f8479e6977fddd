"""The term for the balance of experts in a stock model's loss: under any plan, what one process computes of the same
micro-batches."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from experts_oracle import ExpertCase, case, compare, expert_plan, stock
from longer import longer
from ranks import ranks

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import Attention, Training
from galvatron.families.build import without_weights
from galvatron.families.generic.adapter import Generic
from galvatron.families.registry import layered_model
from galvatron.runtime.checks import check_model
from galvatron.runtime.verify import difference as verified

_PADDED = {"padding": True}
_FP32 = {"dtype": torch.float32}


def _balanced(family: str, *stages: list[str], **options: Any) -> ExpertCase:
    """With a weight that makes the term a large part of the loss. Trained by SGD: the stock model computes the term in
    fp32, and Adam makes large steps of small gradients."""
    config = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    attention = Attention.EAGER if family == "gpt_oss" else Attention.FUSED
    training = Training(dropout=False, attention=attention, optimizer="sgd")
    return case(family, *stages, config=config, training=training, **options)


@pytest.mark.parametrize(
    ("family", "stages", "options"),
    [
        # Rows on four ranks, on two, on all alike; experts divided, replicated, split.
        longer("mixtral", [["dp4", "sdp4/ep4+rc", "dp2-tp2", "dp2-sdp2"]], {"micro_batches": 2, **_PADDED}),
        longer("qwen3_moe", [["tp4", "dp2-tp2/ep2-tp2", "dp4/dp2-ep2", "tp2-dp2"]], {"micro_batches": 1}),
        # A first stage without experts' scores of the last, and micro-batches of different balance.
        ("mixtral", [["dp2", "tp2"], ["sdp2/ep2+rc", "dp2"]], {"micro_batches": 4, **_PADDED}),
        longer("qwen2_moe", [["tp2"], ["dp2", "dp2/ep2", "tp2"]], {"schedule": "gpipe", **_PADDED}),
        longer("gpt_oss", [["dp4", "dp2-tp2/ep4", "sdp4/sdp2-ep2+rc", "sdp4"]], {"skewed": True, **_PADDED}),
        longer("mixtral", [["sdp4", "sdp4+rc", "dp4+zero2", "sdp4"]], {"micro_batches": 1, **_FP32}),
        longer("qwen3_moe", [["dp4", "dp4", "sdp2-tp2", "dp4+rc"]], {"micro_batches": 2, "clip": 0.5}),
        longer("mixtral", [["dp2"], ["dp2"], ["tp2", "dp2"]], {"micro_batches": 4, **_PADDED}),
    ],
)
def test_equals_one_process(family: str, stages: list[list[str]], options: dict[str, Any]) -> None:
    assert compare(_balanced(family, *stages, **options)) is None


_STAGE = ("dp4", "sdp4", "dp2-sdp2", "dp2-tp2", "tp2-dp2", "sdp2-tp2")
_EXPERTS = ("dp4/ep4", "sdp4/sdp2-ep2", "dp2-tp2/ep4", "dp2-tp2/ep2-tp2", "tp2-dp2/ep2-dp2", *_STAGE)
_HALF, _HALF_EXPERTS = ("dp2", "sdp2", "tp2"), ("dp2/ep2", "sdp2/ep2", "tp2/ep2", "dp2", "tp2")


@pytest.mark.parametrize("seed", [longer(seed) for seed in range(12)])
def test_random_plans_equal_one_process(seed: int) -> None:
    draw = random.Random(seed)
    halves = draw.random() < 0.5
    around, blocks = (_HALF, _HALF_EXPERTS) if halves else (_STAGE, _EXPERTS)
    chosen = [draw.choice(own) + draw.choice(("", "+rc")) for own in (around, blocks, blocks, around)]
    cut = draw.choice((1, 2, 3)) if halves else 4
    stages = [own for own in (chosen[:cut], chosen[cut:]) if own]
    options = {"micro_batches": draw.choice((1, 2, 4)), "padding": draw.random() < 0.7, "batch": 16}
    given = _balanced(draw.choice(("mixtral", "qwen3_moe", "qwen2_moe")), *stages, **options)
    assert compare(given) is None, (stages, options)


def _verify(given: ExpertCase, plan: galvatron.Plan) -> str | None:
    return verified(stock(given), plan, device=torch.device("cpu"))


def test_a_tiny_copy_is_compared_before_training() -> None:
    given = _balanced("mixtral", ["dp2", "dp2/ep2"], ["tp2", "dp2"], **_FP32)
    assert ranks(4).run(_verify, given, expert_plan(given)) == [None] * 4


def test_divided_sequences_are_refused() -> None:
    given = _balanced("mixtral", ["dp2", "tp2+sp", "dp2", "dp2"])
    layered = layered_model(without_weights(stock(given)))
    with pytest.raises(InvalidInput, match=r"'tp2\+sp' divides sequences, but .* the balance of experts"):
        check_model(expert_plan(given), layered)


def test_the_planner_is_offered_no_divided_sequences() -> None:
    for config, divides in (({}, True), ({"output_router_logits": True}, False)):
        layered = layered_model(without_weights(stock(case("mixtral", ["dp1"] * 4, config=config))))
        assert isinstance(layered, Generic)
        layered.tensor_rules = replace(layered.tensor_rules, divisible=frozenset({"block"}))  # as if it could be
        found = layered.tensor_parallel(layered.layers[1], tokens=8)
        assert found is not None
        assert bool(found.sequence_divides) is divides


def test_a_term_that_the_loss_does_not_have_is_left_out() -> None:
    """DeepSeek-V3 collects scores, and makes nothing of them."""
    given = case("deepseek_v3", ["dp1"] * 4, config={"output_router_logits": True})
    assert not layered_model(without_weights(stock(given))).wide_activations
