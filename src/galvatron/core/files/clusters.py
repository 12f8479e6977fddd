"""Clusters by name or from a TOML file (docs/clusters.md), and written back to one.

The tables below are the file format: the reader, the writer and docs/cluster.schema.json all come from them. Knows
``spec`` and units; imports nothing heavy, as every plan starts with a cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.files.toml_fields import (
    ascending,
    bandwidth,
    compute_rate,
    duration,
    flag,
    number,
    size,
    text,
    whole,
)
from galvatron.core.files.toml_files import load_named, parse_text, preset_names
from galvatron.core.files.toml_tables import Entry, Table, table, tables
from galvatron.core.spec.cluster import Cluster, Collective, Device, Level, MeasuredGroup
from galvatron.core.units import format_bytes

__all__ = ["cluster_names", "cluster_schema", "dump_cluster", "load_cluster"]

_FOLDER = "clusters"
_MOST_DEVICES = 2**20

_DEVICE = Table(
    Device,
    (
        Entry("name", "name", text(), "the accelerator's name"),
        Entry("memory", "memory_bytes", size("1MiB"), "memory of one device, such as 24GiB"),
        Entry("memory_bandwidth", "memory_bytes_per_s", bandwidth(), "achieved bandwidth of that memory"),
        Entry("fp32", "fp32_flops_per_s", compute_rate(), "achieved rate of a Transformer layer's forward in fp32"),
        Entry("bf16", "bf16_flops_per_s", compute_rate(), "the same in bf16; left out where the device has none"),
        Entry(
            "layer_overhead",
            "layer_overhead_s",
            duration("0s", "1s"),
            "time a layer's forward takes however small its work",
        ),
    ),
)
_LEVEL = Table(
    Level,
    (
        Entry("name", "name", text(), "what the level is, such as node"),
        Entry("units", "units", whole(2, _MOST_DEVICES), "how many devices, or islands of the level before, it joins"),
        Entry("shared", "shared", flag(), "true: a unit's devices divide one link; false: each device has a lane"),
        Entry("bandwidth", "bytes_per_s", bandwidth(), "ring bandwidth of the shared link, or of one lane"),
        Entry(
            "transfer_bandwidth",
            "transfer_bytes_per_s",
            bandwidth(),
            "point-to-point bandwidth between pipeline stages; left out where it is that of a ring",
        ),
        Entry("latency", "latency_s", duration("0s", "1s"), "time of one step of a collective, however small"),
    ),
)
_GROUP = Table(
    MeasuredGroup,
    (
        Entry(
            "ranks",
            "ranks",
            ascending(0, _MOST_DEVICES - 1, 2, _MOST_DEVICES),
            "the group that device 0 is in, such as [0, 1]",
        ),
        *(
            entry
            for collective in Collective
            for entry in (
                Entry(collective, f"{collective}_bytes_per_s", bandwidth(), f"bus bandwidth of an {collective}"),
                Entry(
                    f"{collective}_latency",
                    f"{collective}_latency_s",
                    duration("0s", "10s"),
                    "time of one pass of it over the group (an all-reduce makes two), however small",
                ),
            )
        ),
    ),
)
_CLUSTER = Table(
    Cluster,
    (
        Entry("name", "name", text(), "the cluster's name"),
        Entry("source", "source", text(shortest=0, longest=4000, lines=True), "where the figures come from"),
        Entry("reserved", "reserved_bytes", size("0B"), "memory a process needs besides tensors, such as 1GiB"),
        Entry(
            "fragmentation",
            "fragmentation",
            number(0, 0.5),
            "part of the other memory that is lost between tensors, such as 0.06",
        ),
        Entry(
            "overlap_slowdown",
            "overlap_slowdown",
            number(1, 4),
            "factor by which computation and communication slow each other down while both run",
        ),
        Entry(
            "compute_contention",
            "compute_contention",
            number(1, 1024),
            "factor by which a device computes slower while all compute: above 1 where they share cores",
        ),
        Entry("device", "device", table(_DEVICE), "a [device] table that describes one accelerator"),
        Entry(
            "levels",
            "levels",
            tables(_LEVEL, least=0, most=16),
            "[[levels]] tables, the innermost first; for a single device write levels = [] above [device]",
        ),
        Entry(
            "groups",
            "groups",
            tables(_GROUP, least=0, most=1000),
            "[[groups]] tables of what was measured with groups; the planner prefers it to what the levels say",
        ),
    ),
)


def cluster_names() -> tuple[str, ...]:
    """The clusters known by name."""
    return preset_names(_FOLDER)


def load_cluster(source: str | Path) -> Cluster:
    """The cluster that ``source`` names: a preset, or the path of a ``.toml`` file."""
    return _checked(load_named(source, _FOLDER, "cluster", _CLUSTER), str(source))


def dump_cluster(cluster: Cluster) -> str:
    """The cluster as a file that reads back equal; what no file may say (a bandwidth of zero) is refused here."""
    # The top level's own keys must come before the first table, so an empty list of levels cannot stand at the end.
    lines = _CLUSTER.write(cluster) if cluster.levels else ["levels = []", *_CLUSTER.write(cluster)]
    content, file = "\n".join(lines) + "\n", f"cluster {cluster.name!r}"
    _checked(parse_text(content, file, _CLUSTER), file)
    return content


def cluster_schema() -> dict[str, Any]:
    """The file format as JSON schema, for editors; docs/cluster.schema.json holds it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Cluster"} | _CLUSTER.schema()


def _checked(cluster: Cluster, file: str) -> Cluster:
    """What no single field can say about itself."""
    if cluster.reserved_bytes >= cluster.device.memory_bytes:
        raise InvalidInput(
            f"{file}: reserved is {format_bytes(cluster.reserved_bytes)}, but device.memory is "
            f"{format_bytes(cluster.device.memory_bytes)}; expected less, so that tensors have room"
        )
    if cluster.devices > _MOST_DEVICES:
        raise InvalidInput(f"{file}: levels join {cluster.devices} devices; expected at most {_MOST_DEVICES}")
    seen: set[tuple[int, ...]] = set()
    for index, group in enumerate(cluster.groups):
        if group.ranks[0] != 0 or group.ranks[-1] >= cluster.devices or group.ranks in seen:
            raise InvalidInput(
                f"{file}: groups[{index}].ranks is {list(group.ranks)}; expected a group of device 0 among "
                f"{cluster.devices} devices, each group once"
            )
        seen.add(group.ranks)
    return cluster
