"""Every start of a job has a store of its own, whatever an earlier start has left in the one they share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from galvatron.core.errors import RankFailure
from galvatron.processes.world import agreed_name

_WORLD = 4


def _start(store: Store, order: list[int]) -> set[str]:
    """The names that the ranks of one start go by; they come in this order."""
    with ThreadPoolExecutor(_WORLD) as ranks:
        started = []
        for rank in order:
            started.append(ranks.submit(agreed_name, store, rank, _WORLD, 20.0))
            time.sleep(0.1)
        return {each.result() for each in started}


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_ranks_that_start_again_do_not_meet_the_dead(order: list[int]) -> None:
    store = HashStore()
    names = [_start(store, order) for _ in range(3)]
    assert all(len(agreed) == 1 for agreed in names)
    assert len(set.union(*names)) == 3


def test_a_start_that_rank_0_did_not_live_to_see_leaves_nothing_in_the_way() -> None:
    """The others were there, and are gone; so is a rank 0 that nobody answered."""
    store = HashStore()
    for rank in (1, 2):
        with pytest.raises(RankFailure, match="rank 0 has not come"):
            agreed_name(store, rank, _WORLD, 0.1)
    with pytest.raises(RuntimeError):
        agreed_name(store, 0, _WORLD, 0.1)
    assert len(_start(store, [1, 2, 3, 0])) == 1
