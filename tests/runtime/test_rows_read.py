"""What a rank says it does not read, it does not read: not-a-number there changes no loss."""

from __future__ import annotations

import pytest
import torch
from oracle import Case, batches, first_weights
from parity import build, plan_for
from ranks import ranks
from small_models import config
from torch import Tensor

import galvatron


def both_losses(case: Case, plan: galvatron.Plan, folder: str, batch: dict[str, Tensor]) -> tuple[float, float, int]:
    """On a rank: the loss of the batch, that of the batch with what is not read spoiled, and how much was spoiled."""
    model = build(case, plan, folder)  # type: ignore[arg-type]
    spoiled = {name: tensor.clone() for name, tensor in batch.items()}
    count = 0
    for name, rows in model.rows_read().items():
        unread = sorted(set(range(case.batch)) - rows)
        count += len(unread)
        # Token ids have no NaN; one beyond every vocabulary makes the embedding raise.
        spoiled[name][unread] = torch.nan if batch[name].is_floating_point() else 10**6
    return float(model.forward_backward(batch)), float(model.forward_backward(spoiled)), count


@pytest.mark.parametrize(
    ("family", "stages", "spoiled"),
    [
        ("vit", [["dp4", "tp4", "dp2-tp2", "dp4"]], [12, 12, 12, 12]),
        ("vit", [["dp2", "tp2"], ["tp2", "dp2"]], [8, 8, 16, 16]),
        ("gpt2", [["tp2", "dp2"], ["dp2", "dp2"]], [0, 0, 8, 8]),
    ],
)
def test_rows_that_are_not_read_may_hold_anything(family: str, stages: list[list[str]], spoiled: list[int]) -> None:
    case = Case(config=config(family), stages=stages, micro_batches=2)
    found = ranks(4).run(both_losses, case, plan_for(case), first_weights(case), batches(case)[0])
    assert [count for *_, count in found] == spoiled
    for clean, dirty, _ in found:
        assert clean == dirty
