"""Times many things in turns: every round measures each of them once, so that a slow moment falls on all.

All ranks measure the same thing at the same time, as they will run it. A block of calls is long enough for processes
that share cores to take turns within it, and its time is the mean over the ranks; of devices that have no such turns it
is that of the slowest, for which all others wait. Time that other people's processes took from ours meanwhile is left
out, as far as it can be told.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from galvatron.profiler.cores import Moment, machine, shares
from galvatron.profiler.crew import Crew
from galvatron.profiler.figures import Block

__all__ = ["Probe", "Rounds", "measure_in_turns"]

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


def measure_in_turns(probes: Mapping[_Key, Probe], rounds: Rounds, crew: Crew) -> dict[_Key, list[Block]]:
    """For each probe its blocks: the same on every rank."""
    steps = (rounds.count + 1) * len(probes)
    calls: dict[_Key, int] = {}
    for done, (key, probe) in enumerate(probes.items()):
        crew.report(done, steps, "warming up")
        crew.meet()
        probe.run(1)
        crew.meet()
        slowest = max(sum(parts) for parts in crew.gather(probe.run(1)))
        calls[key] = min(max(1, math.ceil(rounds.block_s / max(slowest, 1e-9))), rounds.most_calls)
    found: dict[_Key, list[Block]] = {key: [] for key in probes}
    machines = crew.gather(machine())
    for number in range(rounds.count):
        for place, (key, probe) in enumerate(probes.items()):
            crew.report((number + 1) * len(probes) + place, steps, f"round {number + 1} of {rounds.count}")
            found[key].append(_block(probe, calls[key], crew, machines))
    crew.report(steps, steps, "done")
    return found


def _block(probe: Probe, calls: int, crew: Crew, machines: Sequence[str]) -> Block:
    crew.meet()
    before = Moment.now()
    parts = probe.run(calls)
    after = Moment.now()
    everyone = crew.gather([parts, after.own_s - before.own_s])
    here = [own_s for (_, own_s), where in zip(everyone, machines, strict=True) if where == machines[crew.rank]]
    had = shares(before, after, sum(here))
    disturbed, lost = map(statistics.fmean, zip(*crew.gather([had.disturbed, had.lost]), strict=True))
    taking_part = [parts for parts, _ in everyone if parts]
    if crew.device.type != "cpu":
        return Block(tuple(part / calls for part in max(taking_part, key=sum)))
    ours = 1 - lost if probe.by_wall_clock else 1.0
    return Block(
        tuple(statistics.fmean(part) / calls * ours for part in zip(*taking_part, strict=True)),
        disturbed,
    )
