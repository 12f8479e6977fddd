"""A rank that is rehearsed alone has tokens for its experts, though nobody sends any."""

from __future__ import annotations

import torch
from experts_oracle import built, case, expert_plan
from oracle import batches

from galvatron.measure.rehearsal.alone import alone_as


def test_a_rank_trains_alone() -> None:
    given = case("qwen3_moe", ["dp4", "dp2-tp2/ep4", "sdp4/sdp2-ep2+rc", "dp4"], dtype=torch.float32)
    plan, batch = expert_plan(given), batches(given, 1)[0]
    for rank in (0, 3):
        with alone_as(rank, 4):
            model = built(given, plan)
            model.forward_backward(batch)
            gradients = [local.master.grad for local in model.locals if "experts" in local.name]
            assert gradients
            assert all(own is not None for own in gradients)
