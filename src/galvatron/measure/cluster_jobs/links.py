"""Probes of links: collectives over every shape of group, all groups of a shape at once, and transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.core.spec import Collective, Digit
from galvatron.measure.cluster_jobs.findings import GroupProbe, TransferProbe
from galvatron.measure.cluster_jobs.messages import Sizes, sizes_for
from galvatron.measure.cluster_jobs.shapes import digits_of, groups_of, shapes
from galvatron.measure.timing import Probe, seconds_of_calls
from galvatron.processes.crew import Crew
from galvatron.runtime import collectives

__all__ = ["link_probes"]


def link_probes(crew: Crew) -> Iterator[tuple[GroupProbe | TransferProbe, Probe]]:
    """All probes of links; makes the groups they need, so every rank must take all of them."""
    sizes: dict[tuple[Digit, ...], Sizes] = {}
    for digits in shapes(crew.world):
        partition = groups_of(crew.world, digits)
        own = next(ranks for ranks in partition if crew.rank in ranks)
        group = _group(partition, own)
        sizes[digits] = sizes_for(partial(_sum, group, crew), crew)
        for collective in Collective:
            for size in sizes[digits]:
                key = GroupProbe(collective=collective, ranks=partition[0], message_bytes=size)
                yield key, _collective_probe(collective, group, size, crew)
    for digit in digits_of(crew.world):
        for alone in (False, True):
            for size in sizes[(digit,)]:
                way = TransferProbe(stride=digit.stride, alone=alone, message_bytes=size)
                yield way, _transfer_probe(digit.stride, alone, size, crew)


def _group(partition: list[tuple[int, ...]], own: tuple[int, ...]) -> ProcessGroup:
    if len(partition) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    made = {ranks: dist.new_group(list(ranks)) for ranks in partition}
    group = made[own]
    assert isinstance(group, ProcessGroup)
    return group


def _sum(group: ProcessGroup, crew: Crew, size: int) -> None:
    collectives.all_reduce(torch.zeros(size // 4, device=crew.device), group)


def _collective_probe(collective: Collective, group: ProcessGroup, size: int, crew: Crew) -> Probe:
    """As the runtime does it, results allocated anew included."""
    elements = size // 4 // group.size() * group.size()
    whole = torch.zeros(elements, device=crew.device)
    part = torch.zeros(elements // group.size(), device=crew.device)
    work: dict[Collective, Callable[[], Tensor]] = {
        Collective.ALL_REDUCE: lambda: collectives.all_reduce(whole, group),
        Collective.ALL_GATHER: lambda: collectives.all_gather(part, group),
        Collective.REDUCE_SCATTER: lambda: collectives.reduce_scatter(whole, group),
    }
    run = work[collective]

    def once(mark: Callable[[], None]) -> None:
        run()
        mark()

    return Probe(lambda calls: seconds_of_calls(calls, once, crew.device, lead_in=True), by_wall_clock=True)


def _transfer_probe(stride: int, alone: bool, size: int, crew: Crew) -> Probe:
    """Each device of a stage sends to its peer in the next one, as between two stages of so many devices; or only the
    first does. The peers say how long it took: a sender is done when the system has taken what it sends."""
    buffer = torch.zeros(size // 4, device=crew.device)
    sends = crew.rank // stride % 2 == 0
    peer = crew.rank + stride if sends else crew.rank - stride
    taking_part = 0 <= peer < crew.world and (not alone or min(crew.rank, peer) == 0)
    operation = dist.isend if sends else dist.irecv

    def once(mark: Callable[[], None]) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, buffer, peer)]):
            work.wait()
        mark()

    def run(calls: int) -> tuple[float, ...]:
        seconds = seconds_of_calls(calls, once, crew.device, lead_in=True) if taking_part else ()
        return () if sends else seconds

    return Probe(run, by_wall_clock=True)
