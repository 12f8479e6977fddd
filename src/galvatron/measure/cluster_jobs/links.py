"""Probes of links: collectives over every shape of group, all groups of a shape at once, and transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from galvatron.core.spec import Collective, Factor
from galvatron.measure.cluster_jobs.findings import GroupProbe, TransferProbe
from galvatron.measure.cluster_jobs.messages import Sizes, sizes_for
from galvatron.measure.cluster_jobs.shapes import factors_of, groups_of, shapes
from galvatron.measure.timing import Probe, seconds_of_calls
from galvatron.processes.peers import Peers
from galvatron.runtime import collectives

__all__ = ["link_probes"]


def link_probes(peers: Peers) -> Iterator[tuple[GroupProbe | TransferProbe, Probe]]:
    """All probes of links; makes the groups they need, so every rank must take all of them."""
    sizes: dict[tuple[Factor, ...], Sizes] = {}
    for factors in shapes(peers.world):
        partition = groups_of(peers.world, factors)
        own = next(ranks for ranks in partition if peers.rank in ranks)
        group = _group(partition, own)
        sizes[factors] = sizes_for(partial(_sum, group, peers), peers)
        for collective in Collective:
            for size in sizes[factors]:
                key = GroupProbe(collective=collective, ranks=partition[0], message_bytes=size)
                yield key, _collective_probe(collective, group, size, peers)
    for factor in factors_of(peers.world):
        for alone in (False, True):
            for size in sizes[(factor,)]:
                variant = TransferProbe(stride=factor.stride, alone=alone, message_bytes=size)
                yield variant, _transfer_probe(factor.stride, alone, size, peers)


def _group(partition: list[tuple[int, ...]], own: tuple[int, ...]) -> ProcessGroup:
    if len(partition) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    made = {ranks: dist.new_group(list(ranks)) for ranks in partition}
    group = made[own]
    assert isinstance(group, ProcessGroup)
    return group


def _sum(group: ProcessGroup, peers: Peers, size: int) -> None:
    collectives.all_reduce(torch.zeros(size // 4, device=peers.device), group)


def _collective_probe(collective: Collective, group: ProcessGroup, size: int, peers: Peers) -> Probe:
    """As the runtime does it, results allocated anew included."""
    elements = size // 4 // group.size() * group.size()
    whole = torch.zeros(elements, device=peers.device)
    part = torch.zeros(elements // group.size(), device=peers.device)
    work: dict[Collective, Callable[[], Tensor]] = {
        Collective.ALL_REDUCE: lambda: collectives.all_reduce(whole, group),
        Collective.ALL_GATHER: lambda: collectives.all_gather(part, group),
        Collective.REDUCE_SCATTER: lambda: collectives.reduce_scatter(whole, group),
        Collective.ALL_TO_ALL: lambda: collectives.all_to_all(whole, None, None, group),
    }
    run = work[collective]

    def once(mark: Callable[[], None]) -> None:
        run()
        mark()

    return Probe(lambda calls: seconds_of_calls(calls, once, peers.device, lead_in=True), by_wall_clock=True)


def _transfer_probe(stride: int, alone: bool, size: int, peers: Peers) -> Probe:
    """Each device of a stage sends to its peer in the next one, as between two stages of so many devices; or only the
    first does. The peers say how long it took: a sender is done when the system has taken what it sends."""
    buffer = torch.zeros(size // 4, device=peers.device)
    sends = peers.rank // stride % 2 == 0
    peer = peers.rank + stride if sends else peers.rank - stride
    taking_part = 0 <= peer < peers.world and (not alone or min(peers.rank, peer) == 0)
    operation = dist.isend if sends else dist.irecv

    def once(mark: Callable[[], None]) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, buffer, peer)]):
            work.wait()
        mark()

    def run(calls: int) -> tuple[float, ...]:
        seconds = seconds_of_calls(calls, once, peers.device, lead_in=True) if taking_part else ()
        return () if sends else seconds

    return Probe(run, by_wall_clock=True)
