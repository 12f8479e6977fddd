"""Nodes of a kind of GPU, in any number: what ``a100``, ``a100:4``, ``a100:2x8`` and ``a100-64`` mean.

Such a preset is the file of a cluster whose outermost level joins whole nodes; here that is cut to a size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from galvatron.core.errors import InvalidInput
from galvatron.core.spec.cluster import Cluster
from galvatron.core.spec.figures import MOST_DEVICES
from galvatron.core.units import parse_bytes_per_s

__all__ = ["NodesOf", "fewer", "linked", "named_size", "nodes_of", "plain_size"]

_SIZED = re.compile(r"(?P<kind>.+?)(?:-(?P<count>[0-9]{1,7})|:(?:(?P<nodes>[0-9]{1,7})x)?(?P<each>[0-9]{1,7}))?")
_PORTS = re.compile(r"(?:(?P<ports>[0-9]{1,3})x)?(?P<speed>[0-9].*)")
_BETWEEN_NODES = "cluster"
"""The name of the level that joins nodes, in presets."""
_ACHIEVED = 0.9
"""What collectives get of a port's line rate: 86 to 96% in nccl-tests issues 119 and 175."""


@dataclass(frozen=True, slots=True)
class NodesOf:
    """How many nodes of how many GPUs; ``each`` of None: as many as a node has."""

    name: str
    kind: str
    nodes: int = 1
    each: int | None = None
    count: int | None = None
    """All of them, as in ``a100-64``; None: ``nodes`` times ``each``."""

    @property
    def plain(self) -> bool:
        """Whether the name says no number."""
        return self.each is None and self.count is None


def named_size(name: str) -> NodesOf | None:
    """What a name says, whether or not there is such a preset."""
    match = _SIZED.fullmatch(name)
    if match is None:
        return None
    each, count = match["each"], match["count"]
    return NodesOf(
        name=name,
        kind=match["kind"],
        nodes=int(match["nodes"] or 1),
        each=None if each is None else int(each),
        count=None if count is None else int(count),
    )


def plain_size(template: Cluster, devices: int) -> NodesOf:
    """So many devices of a kind: in one node, or in whole ones."""
    size = NodesOf(name="", kind=template.name, count=devices)
    nodes, each = _counted(template, size)
    return NodesOf(name=f"{template.name}:{nodes}x{each}", kind=template.name, nodes=nodes, each=each)


def nodes_of(template: Cluster, size: NodesOf) -> Cluster:
    """The cluster of so many nodes, with the links that such nodes usually have."""
    nodes, each = _counted(template, size)
    *inner, outer = template.levels
    node = replace(template, levels=tuple(inner)).shrunk(each)
    levels = (*node.levels, replace(outer, units=nodes)) if nodes > 1 else node.levels
    return replace(template, name=size.name, levels=levels)


def _counted(template: Cluster, size: NodesOf) -> tuple[int, int]:
    """Nodes, and devices of each."""
    if template.levels[-1].name != _BETWEEN_NODES:
        raise InvalidInput(
            f"cluster: {size.name!r} given, but {template.name} is one machine of {template.devices} devices; ask for "
            "fewer of them with --devices"
        )
    most = template.devices // template.levels[-1].units
    if size.count is not None:
        nodes, each = (1, size.count) if size.count <= most else (size.count // most, most)
        if nodes * each != size.count or each < 1:
            raise InvalidInput(
                f"cluster: {size.count} devices of {template.name} asked for; expected 1 to {most}, which are one "
                f"node, or a multiple of {most}; other nodes are written {template.name}:NODESxGPUS"
            )
        return _few_enough(size, nodes, each)
    each = most if size.each is None else size.each
    if not 1 <= each <= most or size.nodes < 1:
        raise InvalidInput(
            f"cluster: {size.name!r} given; a node of {template.name} has 1 to {most} devices, as in "
            f"{template.name}:{most} or {template.name}:2x{most}"
        )
    return _few_enough(size, size.nodes, each)


def _few_enough(size: NodesOf, nodes: int, each: int) -> tuple[int, int]:
    if nodes * each > MOST_DEVICES:
        raise InvalidInput(
            f"cluster: {size.name!r} given, which has {nodes * each} devices; expected at most {MOST_DEVICES}"
        )
    return nodes, each


def fewer(cluster: Cluster, devices: int) -> Cluster:
    """So many of a cluster's devices."""
    return cluster if devices == cluster.devices else cluster.shrunk(devices)


def linked(cluster: Cluster, given: str) -> Cluster:
    """The cluster with another network: one speed that a node's devices share, or so many ports (``8x400Gb``)."""
    if not cluster.levels or cluster.levels[-1].name != _BETWEEN_NODES:
        raise InvalidInput(
            f"node-link: {given!r} given, but cluster {cluster.name!r} is one node, or its file describes the network; "
            "ask for several nodes of a preset, such as --cluster a100:2x8, or edit the file"
        )
    match = _PORTS.fullmatch(given)
    if match is None or not 1 <= int(match["ports"] or 1) <= 64:
        raise InvalidInput(f"node-link: {given!r} given; expected a bandwidth such as 200Gb, or ports such as 8x400Gb")
    ports = int(match["ports"] or 1)
    speed = parse_bytes_per_s(match["speed"], where="node-link")
    if not 1e6 <= speed * ports <= 1e15:
        raise InvalidInput(f"node-link: {given!r} given; expected from 1MB/s to 1PB/s, such as 200Gb (200 gigabits/s)")
    *inner, outer = cluster.levels
    rails = ports > 1 and ports == cluster.devices // outer.units
    bytes_per_s = _ACHIEVED * speed * (1 if rails else ports)
    network = replace(outer, bytes_per_s=bytes_per_s, transfer_bytes_per_s=None, shared=not rails)
    source = f"{cluster.source}; between nodes {given}, of which collectives get {_ACHIEVED:.0%}"
    return replace(cluster, levels=(*inner, network), source=source)
