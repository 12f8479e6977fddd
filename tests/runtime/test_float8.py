"""Linear layers in float8: torchao's own conversion in one process is the oracle; on CPUs torchao emulates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Case, batches, first_weights, stock_loss, stock_model
from parity import Trained, cluster_of, plan_for, run, spec_of
from ranks import ranks
from small_models import config
from torch import Tensor, nn

import galvatron
from galvatron import InvalidInput
from galvatron.core.spec import Training
from galvatron.core.spec.float8 import float8_pays
from galvatron.families.build import build_meta
from galvatron.families.registry import layered_model
from galvatron.planner.plan.by_hand import priced
from galvatron.planner.plan.planner import Request
from galvatron.runtime.float8 import to_float8

_WIDE = {"hidden_size": 1040, "intermediate_size": 4112, "num_attention_heads": 13, "num_key_value_heads": 13}


def _case(*strategies: str) -> Case:
    shape = config("llama", **_WIDE, num_hidden_layers=len(strategies) - 2)
    training = Training(dropout=False, float8=True)
    return Case(
        config=shape, stages=[list(strategies)], batch=2, steps=2, dtype=torch.float32, training=training,
        learning_rate=1e-4,
    )  # fmt: skip


def _plan(case: Case) -> galvatron.Plan:
    cluster = cluster_of(case.devices)
    cluster = replace(cluster, device=replace(cluster.device, float8_flops_per_s=1e14))
    return priced(Request(model=spec_of(case), cluster=cluster, batch=case.batch), case.stages)


def _train(case: Case, plan: galvatron.Plan, folder: Path, given: Sequence[dict[str, Tensor]]) -> Trained:
    model = galvatron.parallelize(None, plan, weights=folder, dtype=case.dtype, device="cpu", check=False)
    return run(case, model, given)


def _converted(case: Case) -> nn.Module:
    """By torchao's own rule, but for the head."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    emulated: Any = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    model: nn.Module = convert_to_float8_training(
        stock_model(case), config=emulated, module_filter_fn=_auto_filter_for_recipe("rowwise", ["lm_head"])
    )
    return model


@pytest.mark.slow
def test_dp_and_sdp_train_as_torchao_in_one_process() -> None:
    """Weights' gradients are scaled by the tokens of a rank, so the one process has them rank by rank, too."""
    pytest.importorskip("torchao")
    case = _case("dp2", "sdp2+f8", "dp2+f8", "dp2")
    found = ranks(2).run(_train, case, _plan(case), first_weights(case), batches(case))
    model = _converted(case)
    changed = [name for name, own in model.named_modules() if type(own).__name__ == "Float8Linear"]
    assert changed == [f"model.layers.{layer}.mlp.{own}_proj" for layer in (0, 1) for own in ("gate", "up")]
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate, **case.optimizer_options)
    losses = []
    for step, batch in enumerate(batches(case)):
        parts = [stock_loss(model, {name: own[rank : rank + 1] for name, own in batch.items()}) for rank in (0, 1)]
        torch.autograd.backward(torch.stack(parts).mean())
        if step == 0:
            for mine in (own for one in found for own in one.held):
                whole = model.get_parameter(mine.name).grad
                assert whole is not None
                torch.testing.assert_close(mine.gradient, whole.flatten()[mine.places], rtol=1e-3, atol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(part.detach() for part in parts)) / 2)
    exact = stock_loss(stock_model(case), batches(case)[0]).detach()
    assert abs(losses[0] - float(exact)) > 1e-4, "float8 is not what the stock model computes"
    for one in found:
        assert one.losses == pytest.approx(losses, rel=1e-5)


def test_our_rule_is_torchao_s() -> None:
    pytest.importorskip("torchao")
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    rule = _auto_filter_for_recipe("rowwise", [])
    sizes = (1008, 1024, 1040, 2047, 2048, 2064, 4096, 4112, 8192)
    for inputs in sizes:
        for outputs in sizes:
            assert float8_pays(inputs, outputs) == rule(nn.Linear(inputs, outputs, device="meta"), "")


def test_what_cannot_be_in_float8_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"float8 \(\+f8\) needs no tp axis"):
        _plan(_case("tp2", "tp2+f8", "tp2"))
    with pytest.raises(InvalidInput, match="layer 0"):
        _plan(_case("dp2+f8", "dp2", "dp2"))
    with pytest.raises(InvalidInput, match="device 'TITAN RTX' has no float8"):
        plan_for(_case("dp2", "dp2+f8", "dp2"))
    pytest.importorskip("torchao")
    small = layered_model(build_meta(config("llama"), Training()))
    with pytest.raises(InvalidInput, match="layer 'decoder', which has no linear layers that it pays for"):
        to_float8(small.layers[1], torch.device("cpu"))
