"""Whose time counts: ranks are threads of one process here, and say what they are told to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from galvatron.measure import timing
from galvatron.measure.figures import Block
from galvatron.measure.timing import Probe, Rounds, measure_in_turns, seconds_of_calls
from galvatron.processes.peers import Peers

PARTS = [(1.0, 2.0), (), (2.0, 5.0), (4.0, 1.0)]
"""What each rank says of one call; the second has no part in it."""


def _measured(kind: str) -> list[Block]:
    store, rounds = HashStore(), Rounds(count=2, block_s=3.0)

    def measure(rank: int) -> list[Block]:
        device = torch.device(kind)
        peers = Peers(rank=rank, world=4, local_world=4, device=device, store=store, report=lambda *_: None)
        probe = Probe(lambda calls: tuple(part * calls for part in PARTS[rank]))
        return measure_in_turns({"work": probe}, rounds, peers)["work"]

    with ThreadPoolExecutor(4) as ranks:
        found = list(ranks.map(measure, range(4)))
    assert all(blocks == found[0] for blocks in found), "the same on every rank"
    return found[0]


def test_all_wait_for_the_slowest_gpu() -> None:
    """With both its parts: the largest of each would add up to what none of them took."""
    assert [block.seconds for block in _measured("cuda")] == [(2.0, 5.0)] * 2


def test_processes_that_take_turns_on_cores_are_averaged() -> None:
    assert [block.seconds for block in _measured("cpu")] == [pytest.approx((7 / 3, 8 / 3))] * 2


@pytest.mark.parametrize(("short_calls", "expected"), [({3}, [1.0, 1.0]), ({3, 4}, [9.0, 1.0])])
def test_what_was_timed_while_memory_ran_short_is_timed_again(
    short_calls: set[int], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third call, the first one that counts; but not for ever."""
    calls = 0

    def run(count: int) -> tuple[float, ...]:
        nonlocal calls
        calls += 1
        return (9.0 if calls in short_calls else 1.0,)

    monkeypatch.setattr(timing, "shortages", lambda device: len(short_calls & set(range(calls + 1))))
    device, store = torch.device("cuda"), HashStore()
    peers = Peers(rank=0, world=1, local_world=1, device=device, store=store, report=lambda *_: None)
    found = measure_in_turns({"work": Probe(run)}, Rounds(count=2, block_s=1.0), peers)["work"]
    assert [sum(block.seconds) for block in found] == expected


class _Event:
    """Of a GPU whose clock goes on by a second with each event."""

    now = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        _Event.now += 1
        self.at = _Event.now

    def elapsed_time(self, later: _Event) -> float:
        return (later.at - self.at) * 1e3


@pytest.mark.parametrize("lead_in", [False, True])
def test_the_call_in_which_ranks_meet_does_not_count(monkeypatch: pytest.MonkeyPatch, lead_in: bool) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    called = []

    def parts(mark: object) -> None:
        called.append(1)
        assert callable(mark)
        mark()
        mark()

    assert seconds_of_calls(3, parts, torch.device("cuda"), lead_in=lead_in) == (3.0, 3.0)
    assert len(called) == 3 + lead_in
