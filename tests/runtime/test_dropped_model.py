"""A model that nobody holds any more gives its memory back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from oracle import Case, batches
from parity import plan_for
from ranks import ranks
from small_models import config

import galvatron


def _alive_after_use(case: Case, plan: galvatron.Plan, dtype: torch.dtype) -> int:
    model = galvatron.parallelize(None, plan, device="cpu", dtype=dtype)
    optimizer = model.optimizer()
    model.forward_backward(batches(case)[0])
    optimizer.step()
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, optimizer
    gc.collect()
    return sum(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["dp2", "tp2", "sdp2", "dp2+zero2"])
def test_no_parameter_outlives_its_model(strategy: str, dtype: torch.dtype) -> None:
    case = Case(config=config("bert"), stages=[[strategy] * 4], batch=4)
    assert ranks(2).run(_alive_after_use, case, plan_for(case), dtype) == [0, 0]
