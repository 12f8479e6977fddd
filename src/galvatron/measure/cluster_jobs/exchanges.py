"""Probes of messages at once: exchanges between all devices, by themselves and beside sums."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron.measure.cluster_jobs.findings import DeviceProbe
from galvatron.measure.timing import Probe, once, seconds_of_calls
from galvatron.processes.peers import Peers

__all__ = ["Works", "end", "exchange_probes", "seconds_each"]

_LASTING = 4
"""How much longer than an exchange the sums last beside which it is measured; a layer's gradients do about so."""

Works = list[dist.Work | None]
"""Messages on their way."""


def exchange_probes(peers: Peers, message: Tensor, sum_s: float) -> Iterator[tuple[DeviceProbe, Probe]]:
    """Exchanges in a group of their own, as in training: each by itself, and right after sums were begun that last
    longer. Where groups share the links such an exchange takes its part of them; where messages are carried in the
    order in which they come it waits for those sums. ``sum_s``: of a sum of the whole message."""
    group = dist.new_group()
    sent = message[: len(message) // peers.world * peers.world].clone()
    received = torch.empty_like(sent)

    def exchange() -> None:
        end([dist.all_to_all_single(received, sent, group=group, async_op=True)])

    exchange_s = max(peers.gather(seconds_each(exchange, peers)))
    lasting = _LASTING * exchange_s / sum_s
    sums = math.ceil(lasting)
    summed = message[: max(1, int(len(message) * lasting / sums))]

    def run(calls: int, sums: int) -> tuple[float, ...]:
        total, begun = 0.0, Works()

        def begin() -> None:
            exchange()  # in which the ranks meet
            begun[:] = [dist.all_reduce(summed, async_op=True) for _ in range(sums)]

        for _ in range(calls):
            (seconds,) = seconds_of_calls(1, once(exchange), peers.device, before=begin)
            end(begun)
            total += seconds
        return (total,)

    yield DeviceProbe.EXCHANGE, Probe(partial(run, sums=0), by_wall_clock=True)
    yield DeviceProbe.SHARED, Probe(partial(run, sums=sums), by_wall_clock=True)


def end(begun: Works) -> None:
    """Wait for all of them."""
    for each in begun:
        assert each is not None
        each.wait()


def seconds_each(work: Callable[[], object], peers: Peers) -> float:
    """Of one call, about: to choose how many are measured."""
    work()
    peers.wait_for_device()
    peers.meet()
    started = time.perf_counter()
    for _ in range(5):
        work()
    peers.wait_for_device()
    return (time.perf_counter() - started) / 5
