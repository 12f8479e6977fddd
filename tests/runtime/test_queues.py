"""Ranks start the operations of a group in one order, as NCCL demands; every test on ranks fails where they do not."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from oracle import Case
from parity import check
from queues import Noted, stuck
from ranks import RankError, ranks
from small_models import LAYERS, config
from torch import ones


def _crossed() -> None:
    """A sum before a message on one rank, after it on the other, in one group."""
    value, sent = ones(1), ones(1)
    if dist.get_rank() == 0:
        total = dist.all_reduce(value, async_op=True)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 1)]):
            work.wait()
    else:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, sent, 0)]):
            work.wait()
        total = dist.all_reduce(value, async_op=True)
    assert total is not None
    total.wait()


def test_what_gloo_lets_pass_and_nccl_does_not_is_found() -> None:
    with pytest.raises(RankError, match=r"rank 0: allreduce in group .*\nrank 1: \[\('recv', 0\)\]"):
        ranks(2).run(_crossed)


def test_orders_that_differ_between_groups_are_fine() -> None:
    first, second = ("a", (0, 1), "allreduce"), ("b", (0, 1), "allreduce")
    assert stuck([[Noted(1, *first), Noted(2, *second), Noted(1)], [Noted(1, *second), Noted(2, *first)]]) is None


def test_messages_started_together_may_cross() -> None:
    both = [(("send", 1 - rank), ("recv", 1 - rank)) for rank in range(2)]
    assert stuck([[Noted(1, "a", (0, 1), "", own), Noted(1)] for own in both]) is None
    assert stuck([[Noted(1, "a", (0, 1), "", own[:1]), Noted(1)] for own in both]), "each sends first"


def test_a_thread_that_nobody_waits_for_holds_nobody_up() -> None:
    """That which saves a checkpoint, in a group of its own: on one rank it is ahead of the others."""
    own, saved = ("a", (0, 1), "allreduce"), ("b", (0, 1), "gather")

    def ahead(thread: str) -> list[Noted]:
        return [Noted(1, *saved, thread=thread), Noted(1, thread=thread), Noted(2, *own), Noted(2)]

    def behind(thread: str) -> list[Noted]:
        return [Noted(1, *own), Noted(1), Noted(2, *saved, thread=thread), Noted(2, thread=thread)]

    assert stuck([ahead("saves"), behind("saves")]) is None
    assert stuck([ahead(""), behind("")]), "of one thread"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_table_that_two_stages_share_is_summed_when_both_are_through(schedule: str) -> None:
    """Their ranks are those of the group in which activations travel."""
    cut = LAYERS["t5"] - 2
    stages = [["dp2"] * cut, ["dp2"] * 2]
    check(Case(config=config("t5"), stages=stages, batch=8, micro_batches=2, schedule=schedule))
