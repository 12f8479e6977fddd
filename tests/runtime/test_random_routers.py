"""Routers that draw: noise on what they read, experts chosen at random.

What would break: a recomputed layer that routes by other numbers has gradients of another forward; tensor-parallel
ranks that do compute different models; ranks that share numbers, or iterations, do not sample what the model asks for.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from experts_oracle import ExpertCase, built, case, expert_plan
from longer import longer
from oracle import batches
from ranks import ranks
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, PhimoeConfig, PhimoeForCausalLM

import galvatron
from galvatron.runtime.drawing import draws
from galvatron.runtime.randomness import LayerRandomness

_SMALL: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 2,
}  # fmt: skip


def _jittered(*stages: list[str]) -> ExpertCase:
    return case("mixtral", *stages, config={"router_jitter_noise": 0.3}, dtype=torch.float32, steps=2)


def _noise(case: ExpertCase, plan: galvatron.Plan, given: list[dict[str, Tensor]]) -> tuple[Any, ...]:
    """On a rank: losses, gradients of routers, and what was drawn in each forward and backward."""
    model = built(case, plan)
    drawn: list[Tensor] = []
    stock = Tensor.uniform_

    def watched(own: Tensor, *bounds: float) -> Tensor:
        drawn.append(stock(own, *bounds).clone())
        return own

    Tensor.uniform_ = watched  # type: ignore[assignment, method-assign]
    try:
        losses = [float(model.forward_backward(batch)) for batch in given]
    finally:
        Tensor.uniform_ = stock  # type: ignore[method-assign]
    gradients = [gradient for name, gradient in model.whole_gradients() if name.endswith("gate.weight")]
    return losses, gradients, drawn


def _run(given: ExpertCase) -> list[tuple[Any, ...]]:
    return ranks(given.devices).run(_noise, given, expert_plan(given), batches(given))


@pytest.mark.parametrize("grade", ["rc", longer("rs")])
def test_recompute_routes_by_the_same_noise(grade: str) -> None:
    plain = _jittered(["single"] * 4)
    again = replace(plain, stages=[["single", f"single+{grade}", f"single+{grade}", "single"]])
    (losses, gradients, drawn), (_, recomputed, _) = _run(plain)[0], _run(again)[0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(recomputed, gradients, strict=True))
    assert len({round(loss, 9) for loss in losses}) == len(losses)
    assert all(not torch.equal(a, b) for a, b in pairwise(drawn)), "layers, micro-batches and iterations draw anew"


def test_tensor_parallel_ranks_share_noise_and_others_do_not() -> None:
    _, _, drawn = zip(*_run(_jittered(["dp2-tp2"] * 4)), strict=True)
    for first, peer, other in zip(drawn[0], drawn[1], drawn[2], strict=True):
        assert torch.equal(first, peer)
        assert not torch.equal(first, other)


class _Calls(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return _noisy(hidden)


def _noisy(hidden: Tensor) -> Tensor:
    return hidden + torch.rand_like(hidden)


def test_what_draws_is_found_in_figures_and_in_code() -> None:
    def drawing(model: nn.Module) -> set[str]:
        return {type(part).__name__ for part in model.modules() if draws([part])}

    assert not drawing(MixtralForCausalLM(MixtralConfig(**_SMALL)))
    assert drawing(MixtralForCausalLM(MixtralConfig(**_SMALL, router_jitter_noise=0.1))) == {"MixtralSparseMoeBlock"}
    assert drawing(PhimoeForCausalLM(PhimoeConfig(**_SMALL, router_jitter_noise=0.0))) == {"PhimoeTopKRouter"}
    assert drawing(_Calls()) == {"_Calls"}
    assert drawing(nn.Sequential(nn.Dropout2d(0.1), nn.Dropout(0.0), nn.RReLU())) == {"Dropout2d", "RReLU"}


def _randomness() -> LayerRandomness:
    return LayerRandomness(device=torch.device("cpu"), seed=0, layer=3, rows=0, tensor=0, sequence=False, needed=None)


def test_what_draws_without_a_word_is_seen_in_the_first_forward() -> None:
    drawing, numbers = _randomness(), []
    for _ in range(2):
        drawing.begin((0, 0))
        with drawing.watched():
            numbers.append(torch.rand(3))
    assert torch.equal(*numbers)
    quiet = _randomness()
    quiet.begin((0, 0))
    with quiet.watched():
        torch.ones(3)
    assert quiet.needed is False
