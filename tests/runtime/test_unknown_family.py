"""A model of no known family runs under any plan without tensor parallelism, and equals one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from longer import longer
from parity import cluster_of
from ranks import ranks
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.core.spec import ONE_F_ONE_B
from galvatron.families.build import build_meta
from galvatron.families.generic import tensor_rules
from galvatron.families.registry import layered_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request

_RATE, _EPSILON, _STEPS = 1e-3, 1e-6, 2


def _model(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = MistralConfig(
        tie_word_embeddings=tied,
        vocab_size=67,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        sliding_window=None,
    )
    model: nn.Module = MistralForCausalLM._from_config(config, attn_implementation="sdpa")
    return model


def _batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(67, (8, 10), generator=generator) for _ in range(_STEPS)]
    return [{"input_ids": own, "labels": own} for own in ids]


@cache
def _spec(tied: bool = False) -> galvatron.ModelSpec:
    return galvatron.describe(_model(tied), _batches()[0])


def _one_process(tied: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    model = _model(tied).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, eps=_EPSILON)
    losses = []
    for batch in _batches():
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]  # the stock loss would compute in fp32
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: own.detach() for name, own in model.named_parameters()}


def _under(plan: galvatron.Plan, tied: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    model = galvatron.parallelize(_model(tied), plan, dtype=torch.float64, device="cpu", check=False)
    optimizer = model.optimizer(torch.optim.AdamW, lr=_RATE, eps=_EPSILON)
    losses = []
    for batch in _batches():
        losses.append(float(model.forward_backward(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.whole_parameters())


@pytest.mark.parametrize(
    ("stages", "micro_batches"),
    [
        ([["sdp4", "dp4", "sdp4+rc", "dp4+zero2", "dp2-sdp2", "sdp4"]], 2),
        longer([["dp2", "sdp2", "dp2+rc"], ["sdp2+rc", "dp2+zero2", "dp2"]], 2),
        ([["single"], ["single", "single"], ["single"], ["single", "single"]], 4),
    ],
)
def test_equals_one_process(stages: list[list[str]], micro_batches: int) -> None:
    spec = _spec()
    assert [layer.name for layer in spec.layers] == ["embedding", *["block"] * 4, "head"]
    request: Any = Request(model=spec, cluster=cluster_of(4), batch=8, schedule=ONE_F_ONE_B)
    plan = priced(request, stages, micro_batches=micro_batches)
    expected_losses, expected = _one_process()
    for losses, parameters in ranks(4).run(_under, plan):
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        for name, tensor in expected.items():
            torch.testing.assert_close(parameters[name], tensor, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("first", "last"),
    [
        longer("tp4", "dp4"),
        longer("dp4", "tp4"),
        longer("tp4", "tp4"),
        longer("tp4", "dp4+zero2"),
        longer("tp2-dp2", "dp2-tp2"),
        longer("sdp4", "dp2-tp2"),
    ],
)
def test_tied_weights_that_tp_does_not_split(first: str, last: str) -> None:
    """TP ranks that all compute a layer whole have the same gradient of a tied weight: it must count once, and reach
    every rank of the owner. The planner offers no such plan; files of earlier versions hold them."""
    spec = _spec(tied=True)
    plan = _with_strategies(spec, [first, "dp4", "dp4", "dp4", "dp4", last])
    expected_losses, expected = _one_process(tied=True)
    for losses, parameters in ranks(4).run(_under, plan, True):
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        for name, tensor in expected.items():
            torch.testing.assert_close(parameters[name], tensor, rtol=1e-7, atol=1e-9)


def _with_strategies(spec: galvatron.ModelSpec, strategies: list[str]) -> galvatron.Plan:
    """A plan whose strategies nobody checked."""
    request = Request(model=spec, cluster=cluster_of(4), batch=8, schedule=ONE_F_ONE_B)
    plan = priced(request, [["dp4"] * len(strategies)], micro_batches=2)
    (stage,) = plan.stages
    layers = tuple(replace(layer, strategy=own) for layer, own in zip(stage.layers, strategies, strict=True))
    return replace(plan, stages=(replace(stage, layers=layers),))


def test_no_tp_is_offered_where_nothing_can_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = _model(tied=True)
    model._tp_plan = {}  # as of an architecture for which transformers has none, and whose blocks show nothing
    monkeypatch.setattr(tensor_rules, "found_rules", lambda *_: ())
    spec = galvatron.describe(model, _batches()[0])
    request = Request(model=spec, cluster=cluster_of(4), batch=8)
    with pytest.raises(InvalidInput, match=r"layer 0 \(embedding\): strategy 'tp4' cannot.*TP can split no layer"):
        priced(request, [["tp4", *["dp4"] * 5]])
    with pytest.raises(InvalidInput, match="every strategy has TP, which can split none of the model's layers"):
        galvatron.plan(spec, cluster_of(4), batch=8, space="tp")
    planned = galvatron.plan(spec, cluster_of(4), batch=8)
    assert not [layer for stage in planned.stages for layer in stage.layers if "tp" in layer.strategy]


def test_plan_file_builds_the_model_again(tmp_path: Path) -> None:
    """What ``describe`` measured is enough to plan and, from the plan file alone, to build the model."""
    spec = _spec()
    made = galvatron.plan(spec, cluster_of(4), batch=8)
    made.save(tmp_path / "plan.json")
    plan = galvatron.Plan.load(tmp_path / "plan.json")
    assert plan.model.config is not None
    assert plan.model.config["architectures"] == ["MistralForCausalLM"]
    assert plan.to_json() == made.to_json()
    rebuilt = layered_model(build_meta(plan.model.config, plan.model.training))
    names = {name for name, _ in _model().named_parameters()}
    assert {name for layer in rebuilt.layers for _, name, _ in layer.stock_parameters()} == names
