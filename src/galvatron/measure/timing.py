"""Clocks, and timing in turns: several ways to run a thing, one after the other, round after round."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from galvatron.measure.figures import Block
from galvatron.processes.cores import Moment, machine, shares
from galvatron.processes.peers import Peers
from galvatron.processes.world import shortages

__all__ = ["Probe", "Rounds", "measure_in_turns", "once", "seconds_of_calls", "slowdown_when_sustained"]

Parts = Callable[[Callable[[], None]], object]
"""Work in parts: it calls its argument after each of them."""


def seconds_of_calls(
    calls: int,
    parts: Parts,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    *,
    lead_in: bool = False,
    before: Callable[[], None] | None = None,
) -> tuple[float, ...]:
    """Call ``parts`` so many times: the seconds of each part, all calls together; by this clock on the CPU.

    ``lead_in``: with a call before them on a GPU that does not count, for work of several ranks: they meet in it, and
    the host gets ahead of its device, as in training. ``before``: what is begun first, once the device is idle.
    """
    marks: list[list[float]] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if before is not None:
        before()
    if device.type != "cuda":
        for _ in range(calls):
            times = [clock()]
            parts(lambda times=times: times.append(clock()))  # type: ignore[misc]
            marks.append([after - before for before, after in pairwise(times)])
        return tuple(map(sum, zip(*marks, strict=True)))
    if lead_in:
        parts(lambda: None)
    recorded = [_recorded(parts) for _ in range(calls)]
    torch.cuda.synchronize(device)
    marks = [[before.elapsed_time(after) / 1e3 for before, after in pairwise(run)] for run in recorded]
    return tuple(map(sum, zip(*marks, strict=True)))


def once(work: Callable[[], object]) -> Parts:
    """Work that is one part."""

    def parts(mark: Callable[[], None]) -> None:
        work()
        mark()

    return parts


def _recorded(parts: Parts) -> list[torch.cuda.Event]:
    events: list[torch.cuda.Event] = []

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)

    mark()
    parts(mark)
    return events


_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class Probe:
    """Something to be timed."""

    run: Callable[[int], tuple[float, ...]]
    """Does it so many times and says how many seconds each part took in all. No parts: this rank had none."""
    by_wall_clock: bool = False
    """Whether these seconds went by while other processes may have had the cores; else they are those of a device, or
    of a processor working for us."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """How thoroughly to measure."""

    count: int
    block_s: float
    """Least time of a block of calls."""
    most_calls: int = 500


def measure_in_turns(
    probes: Mapping[_Key, Probe], rounds: Rounds, peers: Peers, *, warm: bool = False, before: int = 0, after: int = 0
) -> dict[_Key, list[Block]]:
    """For each probe its blocks: the same on every rank. ``warm``: each has run before. ``before``, ``after``: probes
    that others were and will be, for the report of how far it is."""
    first = (rounds.count + 1) * before
    steps = first + (rounds.count + 1) * (len(probes) + after)
    calls: dict[_Key, int] = {}
    for done, (key, probe) in enumerate(probes.items()):
        peers.report(first + done, steps, "warming up")
        if not warm:
            peers.meet()
            probe.run(1)
        peers.meet()
        slowest = max(sum(parts) for parts in peers.gather(probe.run(1)))
        calls[key] = min(max(1, math.ceil(rounds.block_s / max(slowest, 1e-9))), rounds.most_calls)
    found: dict[_Key, list[Block]] = {key: [] for key in probes}
    machines = peers.gather(machine())
    for number in range(rounds.count):
        for place, (key, probe) in enumerate(probes.items()):
            done = first + (number + 1) * len(probes) + place
            peers.report(done, steps, f"round {number + 1} of {rounds.count}")
            found[key].append(_block(probe, calls[key], peers, machines))
    if not after:
        peers.report(steps, steps, "done")
    return found


_SUSTAINED_S = 3.0
"""Of work without a pause; a GPU's power limit acts within a second or two."""


def slowdown_when_sustained(probe: Probe, blocks: Sequence[Block], peers: Peers) -> float:
    """How much slower the probe gets when it runs without a pause, as training does; at least 1."""
    short_s = statistics.median(sum(block.seconds) for block in blocks)
    peers.meet()
    calls = max(1, math.ceil(0.25 / short_s))
    count = max(2, math.ceil(_SUSTAINED_S / (calls * short_s)))
    runs = [sum(probe.run(calls)) / calls for _ in range(count)]
    slowest: float = max(peers.gather(statistics.median(runs[count // 2 :])))
    return max(1.0, slowest / short_s)


def _block(probe: Probe, calls: int, peers: Peers, machines: Sequence[str], *, again: bool = True) -> Block:
    """``again``: one in which some rank's allocator ran short of memory is timed once more; training settles, too."""
    peers.meet()
    before, short = Moment.now(), shortages(peers.device)
    parts = probe.run(calls)
    after = Moment.now()
    everyone = peers.gather([parts, after.own_s - before.own_s, shortages(peers.device) > short])
    if again and any(ran_short for *_, ran_short in everyone):
        return _block(probe, calls, peers, machines, again=False)
    here = [own_s for (_, own_s, _), where in zip(everyone, machines, strict=True) if where == machines[peers.rank]]
    had = shares(before, after, sum(here))
    disturbed, lost = map(statistics.fmean, zip(*peers.gather([had.disturbed, had.lost]), strict=True))
    taking_part = [parts for parts, *_ in everyone if parts]
    if peers.device.type != "cpu":
        return Block(tuple(part / calls for part in max(taking_part, key=sum)))
    ours = 1 - lost if probe.by_wall_clock else 1.0
    return Block(
        tuple(statistics.fmean(part) / calls * ours for part in zip(*taking_part, strict=True)),
        disturbed,
    )
