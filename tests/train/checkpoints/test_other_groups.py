"""A checkpoint goes on with an optimizer whose parameters are grouped otherwise: states belong to parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from oracle import Case, batches
from parity import plan_for
from ranks import ranks
from small_models import config
from torch import Tensor

import galvatron
from galvatron.core.errors import InvalidInput
from galvatron.train.checkpoints.checkpoints import Checkpoints

_CASE = Case(config=config("gpt2"), stages=[["sdp2", "tp2"], ["dp2", "sdp2"]], batch=4, micro_batches=2, steps=1)


def _regroup(plan: galvatron.Plan, batch: dict[str, Tensor], folder: Path) -> tuple[list[Tensor], list[Tensor], str]:
    """On a rank: moments as they were saved and as another optimizer has them, and what is said where some are left
    out."""
    model = galvatron.parallelize(None, plan, device="cpu")
    optimizer = model.optimizer(lr=1e-2)
    model.forward_backward(batch)
    optimizer.step()
    checkpoints = Checkpoints(folder)
    checkpoints.save(model, optimizer, {}, step=1, wait=True)
    grouped = model.optimizer(lr=1e-4, weight_decay=0.3, decay_vectors=False)
    assert checkpoints.load(model, grouped).step == 1
    assert [(group["lr"], group["weight_decay"]) for group in grouped.param_groups] == [(1e-4, 0.3), (1e-4, 0.0)]
    fewer = torch.optim.AdamW([local.master for local in model.locals if len(local.shard.shape) > 1], fused=True)
    try:
        checkpoints.load(model, fewer)
        said = ""
    except InvalidInput as error:
        said = str(error)
    moments = [[state.state[own]["exp_avg"] for own in model.parameters()] for state in (optimizer, grouped)]
    return moments[0], moments[1], said


def test_states_follow_their_parameters(tmp_path: Path) -> None:
    (batch,) = batches(_CASE)
    for before, after, said in ranks(4).run(_regroup, plan_for(_CASE), batch, tmp_path):
        assert all(torch.equal(own, other) for own, other in zip(before, after, strict=True))
        assert "is not among its parameters; when the checkpoint was saved, it was" in said
