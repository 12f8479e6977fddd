"""What a cluster is to the planner: one kind of device, and nested islands of links.

Facts only. Devices are numbered so that neighbours in number are neighbours in the innermost island; a group of ranks
is described by the factors of the rank that vary in it (:class:`galvatron.core.spec.strategy.Factor`), and
:meth:`Cluster.link` says what such a group gets from the links it really spans. Paper Section 3.2 (device islands),
3.4 (bandwidths).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from galvatron.core.errors import InvalidInput, OutOfRange
from galvatron.core.spec.device import Device
from galvatron.core.spec.figures import MOST_DEVICES, check_facts
from galvatron.core.spec.layout import Factor, degree_of

__all__ = ["Cluster", "Collective", "Level", "Link", "MeasuredGroup"]

_PEAKS = ("fp32_peak_flops_per_s", "bf16_peak_flops_per_s")
"""Fields of a device that are shown only."""
_ROOFLINE = ("bf16_products_flops_per_s", "bf16_attention_flops_per_s", "traffic", "compiled_traffic")


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One level of islands: how many units of the level below it joins, and by which links."""

    name: str
    units: int
    """Units joined: devices for the innermost level, else islands of the level below."""
    bytes_per_s: float
    """Bus bandwidth of a ring: what a shared link carries in all, or each device's own lane where not shared."""
    latency_s: float
    transfer_bytes_per_s: float | None = None
    """Point-to-point bandwidth between two devices across this level, where it differs from that of a ring."""
    shared: bool
    """Whether a unit has one link to the others, which the groups that cross it at the same time divide."""

    def __post_init__(self) -> None:
        check_facts(self, f"level {self.name!r}")


class Collective(StrEnum):
    """What a group does together. An all-reduce makes two passes over its members, the others one."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    """Each member sends each other member a part of its own."""


@dataclass(frozen=True, slots=True)
class Link:
    """What one group sees: bandwidth of its ring, and the latency of one pass over its members."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredGroup:
    """What was measured of the groups of one shape, while all of them that fit into the cluster ran at once.

    Libraries differ in how a collective's speed depends on the group's size, and in which of them they do well (gloo's
    reduce-scatter is an all-reduce in disguise); no rule about links says that.
    """

    ranks: tuple[int, ...]
    """The group that device 0 is in; the others lie alike."""
    all_gather_bytes_per_s: float
    """Bus bandwidths, as nccl-tests defines them; latencies are of one pass, of which an all-reduce makes two."""
    all_gather_latency_s: float
    reduce_scatter_bytes_per_s: float
    reduce_scatter_latency_s: float
    all_reduce_bytes_per_s: float
    all_reduce_latency_s: float
    all_to_all_bytes_per_s: float | None = None
    """None: it was not measured, and follows from the levels."""
    all_to_all_latency_s: float | None = None

    def __post_init__(self) -> None:
        check_facts(self, f"group {self.ranks}")

    def link(self, collective: Collective) -> Link | None:
        """What was measured of a collective; None: nothing."""
        bytes_per_s = getattr(self, f"{collective}_bytes_per_s")
        return None if bytes_per_s is None else Link(bytes_per_s, getattr(self, f"{collective}_latency_s") or 0.0)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in nested islands."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    """Innermost first; empty for a single device."""
    reserved_bytes: int
    """Memory a process needs besides tensors: context, communication buffers, workspace."""
    fragmentation: float = 0.0
    """Part of the rest that is lost between tensors: an allocator cannot give away everything it holds. The margin of
    every plan: 6% where PyTorch's CUDA allocator manages the memory."""
    overlap_slowdown: float = 1.0
    """Factor by which computation and communication slow each other down while they overlap (paper: 1.3)."""
    compute_contention: float = 1.0
    """Factor by which a device computes slower while all compute than while it computes alone: above one where devices
    are processes that share cores. All times are those while all compute."""
    message_contention: float = 2.0
    """Factor by which exchanges of divided sequences take longer beside sums and gathers: a link is theirs by half."""
    groups: tuple[MeasuredGroup, ...] = ()
    """Where a group was measured, that is preferred to what the levels say."""
    source: str = ""
    """Where the figures come from."""

    def __post_init__(self) -> None:
        check_facts(self, f"cluster {self.name!r}")
        if self.devices > MOST_DEVICES:
            raise OutOfRange(
                f"cluster {self.name!r}: its levels join {self.devices} devices; expected at most {MOST_DEVICES}"
            )

    @cached_property
    def devices(self) -> int:
        return math.prod(level.units for level in self.levels)

    def tensor_bytes(self, budget_bytes: int) -> int:
        """What tensors can have of a device's budget."""
        return int((budget_bytes - self.reserved_bytes) * (1 - self.fragmentation))

    def allocator_bytes(self, budget_bytes: int) -> int:
        """The part of a device's budget that is left to the allocator."""
        return budget_bytes - self.reserved_bytes - self.tensor_bytes(budget_bytes)

    def least_budget(self, tensor_bytes: int) -> int:
        """The least budget in which tensors can have so much."""
        budget = self.reserved_bytes + math.ceil(tensor_bytes / (1 - self.fragmentation))
        return budget if self.tensor_bytes(budget) >= tensor_bytes else budget + 1

    @cached_property
    def has_uneven_links(self) -> bool:
        """Whether islands differ in speed, so that who talks to whom matters."""
        return len({(level.bytes_per_s, level.shared) for level in self.levels}) > 1

    def link(self, factors: frozenset[Factor], collective: Collective = Collective.ALL_GATHER) -> Link:
        """Bandwidth and latency of a group whose members differ in these factors: as measured, or by the levels.

        By the levels a collective is as fast as its slowest crossing. A level is crossed when some factor's block does
        not lie inside one unit. Where a unit's link is shared, all groups that leave the unit divide it; otherwise a
        group has one lane for each of its members there. The bandwidth is a bus bandwidth: in the time of a collective
        each member sends (g−1)/g of its message at that speed.
        """
        key = factors, collective
        if key not in self._links:
            group = self._measured.get(_members(factors))
            measured = group.link(collective) if group else None
            self._links[key] = measured or self._slowest_crossing(factors, collective)
        return self._links[key]

    def pass_link(self, factors: frozenset[Factor]) -> Link:
        """What each member of such a group gets that sends to the next one while it receives from the one before.

        As measured of an all-gather, which rings make of such passes. By the levels one member of a group leaves each
        unit, so where links are not shared it has one lane; latency is that of the farthest step.
        """
        if not factors:
            return Link(math.inf, 0.0)
        group = self._measured.get(_members(factors))
        if group is not None:
            return Link(group.all_gather_bytes_per_s, group.all_gather_latency_s)
        bytes_per_s, latency_s, unit_size = math.inf, 0.0, 1
        for level in self.levels:
            if any(unit_size % factor.block for factor in factors):
                lanes = self._lanes(factors, unit_size, level.shared) if level.shared else 1.0
                bytes_per_s = min(bytes_per_s, (level.transfer_bytes_per_s or level.bytes_per_s) * lanes)
                latency_s = max(latency_s, level.latency_s)
            unit_size *= level.units
        return Link(bytes_per_s, latency_s)

    @cached_property
    def _links(self) -> dict[tuple[frozenset[Factor], Collective], Link]:
        return {}

    @cached_property
    def _measured(self) -> dict[tuple[int, ...], MeasuredGroup]:
        return {group.ranks: group for group in self.groups}

    def _slowest_crossing(self, factors: frozenset[Factor], collective: Collective) -> Link:
        bytes_per_s, latency_s = math.inf, 0.0
        unit_size = 1
        lanes = self._own_lanes if collective is Collective.ALL_TO_ALL else self._lanes
        for level in self.levels:
            crossing = [factor for factor in factors if unit_size % factor.block]
            if crossing:
                bytes_per_s = min(bytes_per_s, level.bytes_per_s * lanes(factors, unit_size, level.shared))
            island = unit_size * level.units
            units = degree_of(factor for factor in crossing if island % factor.block == 0)
            # Inside the innermost islands collectives use trees; between islands a ring passes each of them.
            latency_s += level.latency_s * (math.ceil(math.log2(units)) if unit_size == 1 else units - 1)
            unit_size = island
        return Link(bytes_per_s, latency_s)

    def _lanes(self, factors: frozenset[Factor], unit_size: int, shared: bool) -> float:
        """How much of a level's bandwidth the worst-placed group gets where it leaves units of this size."""
        return min(count / busy if shared else count for count, busy in self._leaving(factors, unit_size))

    def _own_lanes(self, factors: frozenset[Factor], unit_size: int, shared: bool) -> float:
        """The same for an all-to-all, in which each member sends for itself, but only what leaves the unit."""
        others = degree_of(factors) - 1
        return min(
            others / (others + 1 - count) / (busy if shared else 1) for count, busy in self._leaving(factors, unit_size)
        )

    def _leaving(self, factors: frozenset[Factor], unit_size: int) -> set[tuple[int, int]]:
        """Of each group that leaves units of this size: its members in a unit, and those of all such groups there."""
        if all(unit_size % factor.block == 0 or factor.stride % unit_size == 0 for factor in factors):
            return {(degree_of(factor for factor in factors if unit_size % factor.block == 0), unit_size)}
        groups: dict[int, Counter[int]] = {}
        for rank in range(self.devices):  # some group straddles units: count its members in each
            first = rank - sum(rank // factor.stride % factor.size * factor.stride for factor in factors)
            groups.setdefault(first, Counter())[rank // unit_size] += 1
        leaving = [units for units in groups.values() if len(units) > 1]
        busy = sum(leaving, Counter())
        return {(count, busy[unit]) for units in leaving for unit, count in units.items()}

    def stage_link(self, stage_devices: int) -> Link:
        """Bandwidth of one device's transfer to its peer in the next stage, at the slowest boundary between stages."""
        bytes_per_s, latency_s = math.inf, 0.0
        unit_size = 1
        for level in self.levels:
            if unit_size * level.units > stage_devices:
                sharers = min(stage_devices, unit_size) if level.shared else 1
                bytes_per_s = min(bytes_per_s, (level.transfer_bytes_per_s or level.bytes_per_s) / sharers)
                latency_s = max(latency_s, level.latency_s)
            unit_size *= level.units
        return Link(bytes_per_s, latency_s)

    def shrunk(self, devices: int) -> Cluster:
        """This cluster with fewer devices: whole islands where that comes out even, else all at the speed of the
        outermost links that are still needed."""
        if not 1 <= devices <= self.devices:
            raise InvalidInput(f"devices: {devices} given; cluster {self.name!r} has {self.devices}")
        levels: list[Level] = []
        size = 1
        for level in self.levels:
            if size < devices:
                units = min(level.units, -(-devices // size))
                levels.append(replace(level, units=units))
                size *= units
        if size != devices:
            levels = [replace(levels[-1], units=devices)]
        groups = tuple(group for group in self.groups if max(group.ranks) < devices)
        return replace(self, levels=tuple(level for level in levels if level.units > 1), groups=groups)

    def to_dict(self) -> dict[str, Any]:
        """As plan files have it. What came later and says nothing (an unmeasured all-to-all, no TF32) is left out:
        digests and files stay the same."""
        facts = asdict(self)
        if self.message_contention == Cluster.message_contention:
            del facts["message_contention"]
        if self.device.compiles:
            del facts["device"]["compiles"]
        later = ("host_bytes_per_s", "host_memory_bytes", "tf32_flops_per_s", "float8_flops_per_s", *_PEAKS, *_ROOFLINE)
        for name in (*later, "price_per_hour", "power_w"):
            if facts["device"][name] is None:
                del facts["device"][name]
        for group in facts["groups"]:
            if group["all_to_all_bytes_per_s"] is None:
                del group["all_to_all_bytes_per_s"], group["all_to_all_latency_s"]
        return facts

    @cached_property
    def digest(self) -> str:
        """Identifies the facts, whatever file or preset they came from."""
        facts = self.to_dict()
        del facts["name"], facts["source"]
        for name in (*_PEAKS, "price_per_hour", "power_w"):  # the same cluster may cost more tomorrow
            facts["device"].pop(name, None)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _members(factors: frozenset[Factor]) -> tuple[int, ...]:
    """The group of device 0 whose members differ in these factors."""
    ranks = [0]
    for factor in factors:
        ranks = [rank + value * factor.stride for rank in ranks for value in range(factor.size)]
    return tuple(sorted(ranks))
