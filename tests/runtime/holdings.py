"""Who must hold which rows and tokens: an oracle that passes lists of row numbers around.

The first layer of a stage has the rows in the order of the batch. After that a rank slices and gathers what it has, as
far as that leads to equal shares that together are the batch; where it does not, everybody gathers everything first.
"""

from __future__ import annotations

from itertools import chain
from math import prod

import torch
from torch import Tensor

from galvatron.core.spec import Cluster, Device, Factor, Factors, Layout, Level
from galvatron.planner.space import Space, Switches

__all__ = ["Rows", "changed_rows", "first_rows", "flat_cluster", "layouts", "part"]

Rows = list[list[int]]
"""By rank."""


def layouts(devices: int) -> list[Layout]:
    """Every layout that some strategy has, those of sequence parallelism and hybrid sharding included."""
    switches = Switches(hybrid_sharding=True, sequence_parallel=True)
    strategies = Space(name="full", title="", switches=switches).strategies(devices)
    return list(dict.fromkeys(strategy.layout for strategy in strategies))


def _value(number: int, factor: Factor) -> int:
    return number // factor.stride % factor.size


def _place(rank: int, factors: Factors) -> int:
    """A rank's number among those that some factors tell apart."""
    place = 0
    for factor in sorted(factors, key=lambda factor: -factor.stride):
        place = place * factor.size + _value(rank, factor)
    return place


def first_rows(devices: int, layout: Factors, rows: int) -> Rows:
    """In the first layer of a stage."""
    return [_share(list(range(rows)), rank, layout) for rank in range(devices)]


def changed_rows(held: Rows, source: Factors, target: Factors) -> Rows:
    """After a change of layout."""
    everything = sorted({row for rows in held for row in rows})
    for before, gathered, after in ((target - source, source - target, frozenset()), (frozenset(), source, target)):
        if len(held[0]) % prod(factor.size for factor in before):
            continue
        sliced = [_share(rows, rank, before) for rank, rows in enumerate(held)]
        found = [list(chain(*(sliced[member] for member in _members(rank, gathered)))) for rank in range(len(held))]
        found = [_share(rows, rank, after) for rank, rows in enumerate(found)]
        shares = {_place(rank, target): rows for rank, rows in enumerate(found)}
        alike = all(rows == shares[_place(rank, target)] for rank, rows in enumerate(found))
        if alike and sorted(chain(*shares.values())) == everything:
            return found
    raise AssertionError((source, target))


def _share(rows: list[int], rank: int, factors: Factors) -> list[int]:
    each = len(rows) // prod(factor.size for factor in factors)
    return rows[_place(rank, factors) * each : (_place(rank, factors) + 1) * each]


def _members(rank: int, factors: Factors) -> list[int]:
    """The ranks that differ from this one in no factor but these, in ascending order."""
    members = [rank - sum(_value(rank, factor) * factor.stride for factor in factors)]
    for factor in factors:
        members = [member + turn * factor.stride for member in members for turn in range(factor.size)]
    return sorted(members)


def part(rank: int, whole: Tensor, rows: list[int], sequence: Factors) -> Tensor:
    """What a rank that holds these rows has of a whole micro-batch."""
    each = whole.shape[1] // prod(factor.size for factor in sequence)
    first = _place(rank, sequence) * each
    return whole[torch.tensor(rows)][:, first : first + each].contiguous()


def flat_cluster(devices: int) -> Cluster:
    """One byte a second for everyone, no latency: what a change costs is what a rank receives."""
    device = Device(name="device", memory_bytes=1, memory_bytes_per_s=1.0, fp32_flops_per_s=1.0)
    level = Level(name="flat", units=devices, bytes_per_s=1.0, latency_s=0.0, shared=False)
    return Cluster(name="flat", device=device, levels=(level,), reserved_bytes=0)
