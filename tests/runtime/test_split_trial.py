"""Tensor parallelism by transformers' own plans: a tiny copy on two simulated ranks trains as the whole model does, and
what is wrong with a split is found before any run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from longer import longer
from torch import Tensor, nn
from transformers import AutoConfig

from galvatron.core.spec import Training
from galvatron.families.build import build_meta
from galvatron.families.generic import adapter
from galvatron.families.generic.tensor_plan import block_rules
from galvatron.families.generic.tensor_rules import TensorRules, find_rules
from galvatron.families.rules import Columns, Experts, PartialGradients, Rows, Rule, SharedKey, Summed, Table
from galvatron.runtime.split_trial import split_difference
from galvatron.runtime.tensor_parallel.simulated import simulate

_TRAINING = Training(dropout=False)
_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
}


def _model(kind: str, name: str) -> nn.Module:
    config = AutoConfig.for_model(kind, num_hidden_layers=2, **_SIZES.get(kind, {}))
    config.architectures = [name]
    return build_meta(config, _TRAINING, as_named=True)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        longer("qwen3", "Qwen3ForCausalLM"),
        longer("mistral", "MistralForCausalLM"),
        longer("gemma3_text", "Gemma3ForCausalLM"),
        longer("olmo2", "Olmo2ForCausalLM"),
        longer("phi3", "Phi3ForCausalLM"),
        ("gpt_neox", "GPTNeoXForCausalLM"),
        longer("deepseek_v2", "DeepseekV2ForCausalLM"),
        longer("deepseek_v3", "DeepseekV3ForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        longer("mixtral", "MixtralForCausalLM"),
    ],
)
def test_split_as_transformers_says(kind: str, name: str) -> None:
    """Norms of heads, scaled embeddings, gathered and packed projections, latent attention, experts; tied or not."""
    assert split_difference(_model(kind, name), _TRAINING, sequence=True) is None


def test_norms_of_heads_that_the_plan_forgets() -> None:
    """Without an entry their gradients would be of a rank's own heads."""
    model: Any = _model("qwen3", "Qwen3ForCausalLM")
    model._tp_plan = {name: style for name, style in model.tp_plan.items() if "_norm" not in name}
    assert len(model.tp_plan)
    assert not any("_norm" in name for name in model.tp_plan)
    found = [rule.path for rule in block_rules(model, "model.layers.0") if isinstance(rule, PartialGradients)]
    assert found == ["self_attn.q_norm", "self_attn.k_norm"]


def _without(kind: type[Rule]) -> Callable[[tuple[Rule, ...]], tuple[Rule, ...]]:
    return lambda rules: tuple(rule for rule in rules if not isinstance(rule, kind))


def _packed_as_plain(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(replace(rule, parts=1) if isinstance(rule, Table) else rule for rule in rules)


def _experts_enter_for_nothing(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(Summed(rule.path) if isinstance(rule, Experts) else rule for rule in rules)


def _not_gathered(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(replace(rule, gathered=False) if isinstance(rule, Columns) else rule for rule in rules)


def _not_summed(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    down = [rule.path for rule in rules if isinstance(rule, Rows) and rule.path.endswith("down_proj")]
    return tuple(rule for rule in rules if getattr(rule, "path", "") not in down)


@pytest.mark.parametrize(
    ("kind", "name", "broken"),
    [
        ("qwen3", "Qwen3ForCausalLM", _without(PartialGradients)),
        longer("qwen3", "Qwen3ForCausalLM", _not_summed),
        ("qwen3_moe", "Qwen3MoeForCausalLM", _packed_as_plain),
        longer("qwen3_moe", "Qwen3MoeForCausalLM", _experts_enter_for_nothing),
        longer("deepseek_v2", "DeepseekV2ForCausalLM", _without(SharedKey)),
        ("olmo2", "Olmo2ForCausalLM", _not_gathered),
    ],
)
def test_a_wrong_split_is_found(
    kind: str, name: str, broken: Callable[[tuple[Rule, ...]], tuple[Rule, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm's gradient that is not summed, a packed table split as a plain one, a router's gradient of one rank …"""

    def find(*args: Any) -> TensorRules:
        found = find_rules(*args)
        return replace(found, blocks={kind: broken(rules) for kind, rules in found.blocks.items()})

    monkeypatch.setattr(adapter, "find_rules", find)
    assert split_difference(_model(kind, name), _TRAINING) is not None


def test_simulated_ranks_meet() -> None:
    from galvatron.runtime import collectives

    def run(group: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        own = torch.arange(4.0) + 10 * group.rank()
        return (
            collectives.all_reduce(own.clone(), group),
            collectives.all_gather(own, group),
            collectives.reduce_scatter(own, group),
            collectives.maximum(own.clone(), group),
        )

    first, second = simulate(2, run)
    total = torch.tensor([10.0, 12, 14, 16])
    for rank, (summed, gathered, scattered, highest) in enumerate((first, second)):
        assert summed.equal(total)
        assert gathered.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
        assert scattered.equal(total[2 * rank : 2 * rank + 2])
        assert highest.tolist() == [10, 11, 12, 13]


def test_an_error_of_one_simulated_rank_ends_the_others() -> None:
    from galvatron.runtime import collectives

    def run(group: Any) -> Tensor:
        if group.rank():
            raise ValueError("rank 1 has had enough")
        return collectives.all_reduce(torch.ones(1), group)

    with pytest.raises(ValueError, match="rank 1 has had enough"):
        simulate(2, run)
