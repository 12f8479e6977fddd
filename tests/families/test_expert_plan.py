"""Which experts can be divided: what transformers' plans say, its standard form of experts, and who is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from galvatron.families.generic.expert_plan import find_experts
from galvatron.families.rules import DividedExperts


class _Experts(nn.Module):
    """As transformers' standard form has them."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.num_experts = count
        self._is_expert_parallel = False
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 6, 8))
        self.down_proj = nn.Parameter(torch.zeros(count, 8, 3))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


class _Routed(_Experts):
    def forward(self, routed: Tensor) -> Tensor:  # type: ignore[override]
        return routed


class _Model(nn.Module):
    def __init__(self, *experts: nn.Module, plan: dict[str, str] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({f"experts_{n}": own for n, own in enumerate(experts)})])
        self.ep_plan = plan


def _found(*experts: nn.Module, plan: dict[str, str] | None = None) -> tuple[DividedExperts | None, str]:
    rules = find_experts(_Model(*experts, plan=plan), ["layers.0"], ["block"])
    return rules.blocks.get("block"), rules.refused


def _with(experts: nn.Module, **attributes: Any) -> nn.Module:
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


def test_a_standard_module_needs_no_plan() -> None:
    found = DividedExperts("block.experts_0", 4, ("gate_up_proj", "down_proj"))
    assert _found(_Experts()) == (found, "")


def test_a_plan_names_its_parameters() -> None:
    plan = {"layers.*.experts_0.gate_up_proj": "grouped_gemm", "layers.*.experts_0.down_proj": "grouped_gemm"}
    own = _Experts()
    del own._is_expert_parallel
    assert _found(own) == (None, ""), "no experts that we know"
    assert _found(own, plan=plan)[0] == DividedExperts("block.experts_0", 4, ("gate_up_proj", "down_proj"))


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        ([_Experts(), _Experts()], r"several modules of experts \(experts_0 and experts_1\)"),
        ([_Routed()], r"experts_0 \(_Routed\) takes routed; expected hidden states"),
        ([_with(_Experts(), num_experts=None)], "does not say how many experts it has"),
        ([_with(_Experts(), num_experts=5)], r"gate_up_proj of shape \[4, 6, 8\] is no parameter with 5 experts"),
        ([_with(_Experts(), post_expert_norm=nn.LayerNorm(4))], "post_expert_norm.weight"),
        ([_with(_Experts(), scale=nn.Parameter(torch.ones(4, 1)))], "experts_0.scale"),
    ],
)
def test_others_are_refused_by_name(experts: list[nn.Module], reason: str) -> None:
    found, refused = _found(*experts)
    assert found is None
    assert re.search(reason, refused), refused


def test_a_model_without_experts_has_none() -> None:
    assert _found(nn.Linear(2, 2)) == (None, "")
