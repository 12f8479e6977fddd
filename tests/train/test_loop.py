"""The loss of an evaluation is the mean over all targets of the held-out samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import Case, batches, first_weights, stock_model
from parity import build, plan_for
from ranks import ranks
from small_models import config
from torch import Tensor
from torch.nn import functional

import galvatron
from galvatron.families.layer import IGNORED
from galvatron.train.loop import mean_loss


def _evaluated(case: Case, plan: galvatron.Plan, folder: Path, given: list[dict[str, Tensor]]) -> float:
    return mean_loss(build(case, plan, folder), given)


def test_each_target_has_the_same_weight() -> None:
    """Of a causal model the first token of a row is nobody's target; a batch may have no target at all."""
    case = Case(config=config("llama"), stages=[["ring2", "dp2", "sdp2", "ring2"]], batch=2, steps=3)
    few, many, none = batches(case)
    few["labels"][:, 3:] = IGNORED
    none["labels"][:] = IGNORED
    given = [few, many, none]
    model = stock_model(case).to(case.dtype)
    logits = torch.cat([model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1) for batch in given])
    labels = torch.cat([batch["labels"][:, 1:].flatten() for batch in given])
    expected = float(functional.cross_entropy(logits, labels, ignore_index=IGNORED).detach())
    assert ranks(2).run(_evaluated, case, plan_for(case), first_weights(case), given) == [pytest.approx(expected)] * 2
