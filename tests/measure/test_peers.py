"""Ranks that exchange numbers through a store: threads of one process here, each with a peers of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch._C._distributed_c10d import HashStore

from galvatron.processes.peers import Peers


def _crews(world: int) -> list[Peers]:
    store, device = HashStore(), torch.device("cpu")
    return [
        Peers(rank=rank, world=world, local_world=world, device=device, store=store, report=lambda *_: None)
        for rank in range(world)
    ]


def test_everyone_gets_everyones_value_in_order() -> None:
    crews = _crews(3)
    with ThreadPoolExecutor(3) as ranks:
        found = list(ranks.map(lambda peers: [peers.gather(peers.rank * 10), peers.gather([peers.rank])], crews))
    assert found == [[[0, 10, 20], [[0], [1], [2]]]] * 3


def test_everyone_gets_what_rank_0_found_and_rank_0_leaves_last() -> None:
    """A second time too: results are shared after every job of a process."""
    crews = _crews(3)
    with ThreadPoolExecutor(3) as ranks:
        for value in ({(0, 1): "first"}, {(0, 1): "second"}):
            first = ranks.submit(crews[0].share, value)
            second = ranks.submit(crews[1].share, "its own")
            assert second.result() == value
            assert not first.done()
            assert crews[2].share("its own") == value
            assert first.result() == value
