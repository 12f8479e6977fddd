"""Clusters by name or from a TOML file (docs/clusters.md), and written back to one.

The tables below are the file format: the reader, the writer and docs/cluster.schema.json all come from them. A preset
is one cluster (``titan-rtx-8``), or nodes of a kind of GPU in any number (``a100``: see ``nodes.py``).
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from galvatron.core.errors import InvalidInput
from galvatron.core.files.nodes import NodesOf, fewer, linked, named_size, nodes_of, plain_size
from galvatron.core.files.tables import (
    BANDWIDTH,
    BYTES,
    COMPUTE_RATE,
    FLAG,
    NAME,
    SECONDS,
    SOURCE,
    Key,
    Table,
    Value,
    number,
    preset_names,
    whole,
)
from galvatron.core.spec.cluster import Cluster, Collective, Level, MeasuredGroup
from galvatron.core.spec.device import Device
from galvatron.core.spec.figures import MOST_DEVICES
from galvatron.core.units import format_bytes

__all__ = ["cluster_names", "cluster_of_text", "cluster_schema", "dump_cluster", "is_preset", "load_cluster"]

_FOLDER = "clusters"
_RESERVED = BYTES.between("0B", "8TiB")
_LATENCY = SECONDS.between("0s", "1s")
_PASS = SECONDS.between("0s", "10s")


def _ascending(ranks: list[int]) -> None:
    if ranks[0] < 0 or ranks[-1] >= MOST_DEVICES or any(a >= b for a, b in pairwise(ranks)):
        raise ValueError(f"ranks from 0 to {MOST_DEVICES - 1} in ascending order, such as [0, 1]")


_RANK_SCHEMA = {"items": {"type": "integer", "minimum": 0, "maximum": MOST_DEVICES - 1}}
_RANKS = Value(
    list[int], {"min_length": 2, "max_length": MOST_DEVICES, "json_schema_extra": _RANK_SCHEMA}, _ascending, tuple
)

_DEVICE = Table(
    Device,
    (
        Key("name", "name", NAME, "the accelerator's name"),
        Key("memory", "memory_bytes", BYTES.between("1MiB", "8TiB"), "memory of one device, such as 24GiB"),
        Key("memory_bandwidth", "memory_bytes_per_s", BANDWIDTH, "achieved bandwidth of that memory"),
        Key("fp32", "fp32_flops_per_s", COMPUTE_RATE, "achieved rate of a Transformer layer's forward in fp32"),
        Key("bf16", "bf16_flops_per_s", COMPUTE_RATE, "the same in bf16; left out where the device has none"),
        Key("tf32", "tf32_flops_per_s", COMPUTE_RATE, "the same with fp32 tensors and TF32 products, if any"),
        Key("float8", "float8_flops_per_s", COMPUTE_RATE, "the same of products in float8, without casting, if any"),
        Key("bf16_products", "bf16_products_flops_per_s", COMPUTE_RATE, "rate of large matrix products in bf16"),
        Key("bf16_attention", "bf16_attention_flops_per_s", COMPUTE_RATE, "rate of fused attention's forward in bf16"),
        Key("traffic", "traffic", number(0, 100), "bytes moved for each byte that a layer's forward saves"),
        Key("compiled_traffic", "compiled_traffic", number(0, 100), "the same where blocks are compiled"),
        Key("layer_overhead", "layer_overhead_s", _LATENCY, "time a layer's forward takes however small its work"),
        Key("fp32_peak", "fp32_peak_flops_per_s", COMPUTE_RATE, "the data sheet's rate, to show a plan's share of it"),
        Key("bf16_peak", "bf16_peak_flops_per_s", COMPUTE_RATE, "the same in bf16, without sparsity"),
        Key("compiles", "compiles", FLAG, "whether blocks are compiled where nobody says (default true)"),
        Key("host_bandwidth", "host_bytes_per_s", BANDWIDTH, "between its memory and the host's, each way"),
        Key("host_memory", "host_memory_bytes", BYTES.between("1MiB", "1024TiB"), "its share of the host's memory"),
        Key("price_per_hour", "price_per_hour", number(0, 1e6), "what an hour of one device costs, in any currency"),
        Key("power", "power_w", number(0, 1e6), "watts that one device draws while it trains"),
    ),
)
_LEVEL = Table(
    Level,
    (
        Key("name", "name", NAME, "what the level is, such as node"),
        Key("units", "units", whole(2, MOST_DEVICES), "how many devices, or islands of the level before, it joins"),
        Key("shared", "shared", FLAG, "true: a unit's devices divide one link; false: each device has a lane"),
        Key("bandwidth", "bytes_per_s", BANDWIDTH, "ring bandwidth of the shared link, or of one lane"),
        Key("transfer_bandwidth", "transfer_bytes_per_s", BANDWIDTH, "the same between stages, if not that of a ring"),
        Key("latency", "latency_s", _LATENCY, "time of one step of a collective, however small"),
    ),
    many=(0, 16),
)
_GROUP = Table(
    MeasuredGroup,
    (
        Key("ranks", "ranks", _RANKS, "the group that device 0 is in, such as [0, 1]"),
        *(
            key
            for name in Collective
            for key in (
                Key(name, f"{name}_bytes_per_s", BANDWIDTH, f"bus bandwidth of {name}"),
                Key(f"{name}_latency", f"{name}_latency_s", _PASS, "time of one pass of it (an all-reduce makes two)"),
            )
        ),
    ),
    many=(0, 1000),
)
_CLUSTER = Table(
    Cluster,
    (
        Key("name", "name", NAME, "the cluster's name"),
        Key("source", "source", SOURCE, "where the figures come from"),
        Key("reserved", "reserved_bytes", _RESERVED, "memory a process needs besides tensors, such as 1GiB"),
        Key("fragmentation", "fragmentation", number(0, 0.5), "part of the other memory that is lost between tensors"),
        Key("overlap_slowdown", "overlap_slowdown", number(1, 4), "slowdown while computing and communicating at once"),
        Key("compute_contention", "compute_contention", number(1, 1024), "slowdown of a device while all compute"),
        Key("message_contention", "message_contention", number(1, 8), "slowdown of exchanges beside other messages"),
        Key("device", "device", _DEVICE, "a [device] table that describes one accelerator"),
        Key("levels", "levels", _LEVEL, "[[levels]] tables, innermost first; for a single device levels = [] on top"),
        Key("groups", "groups", _GROUP, "[[groups]] tables of what was measured with groups, preferred to the levels"),
    ),
)


def cluster_names() -> tuple[str, ...]:
    """The clusters known by name."""
    return preset_names(_FOLDER)


def is_preset(name: str) -> bool:
    """Whether a name means a preset, in whatever number, and never the path of a file."""
    size = named_size(name)
    return name in cluster_names() or (size is not None and size.kind in cluster_names())


def cluster_of_text(text: str, file: str) -> Cluster:
    """The cluster in the text of a TOML file, checked; ``file`` is its name in errors."""
    return _checked(_CLUSTER.parse(text.removeprefix("\ufeff"), file), file)


def load_cluster(source: str | Path, *, devices: int | None = None, node_link: str | None = None) -> Cluster:
    """The cluster that ``source`` names: a preset (``a100``, ``a100:2x8``, ``a100-64``), or the path of a TOML file.

    ``devices``: how many of them; ``node_link``: the network of a node, such as ``200Gb`` or ``8x400Gb``.
    """
    name = str(source)
    size = named_size(name)
    if size is None or size.kind not in cluster_names():
        cluster = _checked(_CLUSTER.load(source, _FOLDER, "cluster"), name)
    else:
        _refuse_beginning(name, size)
        template = _CLUSTER.load(size.kind, _FOLDER, "cluster")
        if devices is not None and size.plain:
            size, devices = plain_size(template, devices), None
        cluster = _checked(nodes_of(template, size), name)
    if devices is not None:
        cluster = fewer(cluster, devices)
    return cluster if node_link is None else linked(cluster, node_link)


def _refuse_beginning(name: str, size: NodesOf) -> None:
    """``a100-80`` could be 80 of the A100 or the preset ``a100-80gb``."""
    longer = re.compile(re.escape(name) + r"[^0-9].*")
    meant = next((each for each in cluster_names() if size.count is not None and longer.fullmatch(each)), None)
    if meant is not None:
        raise InvalidInput(
            f"cluster: {name!r} given, which could be {size.count} devices of {size.kind!r} or the preset {meant!r}; "
            f"give {meant}, or {size.kind} --devices {size.count}"
        )


def dump_cluster(cluster: Cluster) -> str:
    """The cluster as a file that reads back equal; what no file may say (a bandwidth of zero) is refused here."""
    # The top level's own keys must come before the first table, so an empty list of levels cannot stand at the end.
    lines = _CLUSTER.write(cluster) if cluster.levels else ["levels = []", *_CLUSTER.write(cluster)]
    content, file = "\n".join(lines) + "\n", f"cluster {cluster.name!r}"
    _checked(_CLUSTER.parse(content, file), file)
    return content


def cluster_schema() -> dict[str, Any]:
    """The file format as JSON schema, for editors; docs/cluster.schema.json holds it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | _CLUSTER.model.model_json_schema()


def _checked(cluster: Cluster, file: str) -> Cluster:
    """What no single field can say about itself."""
    if cluster.reserved_bytes >= cluster.device.memory_bytes:
        raise InvalidInput(
            f"{file}: reserved is {format_bytes(cluster.reserved_bytes)}, but device.memory is "
            f"{format_bytes(cluster.device.memory_bytes)}; expected less, so that tensors have room"
        )
    if (cluster.device.host_bytes_per_s is None) != (cluster.device.host_memory_bytes is None):
        raise InvalidInput(f"{file}: device has one of host_bandwidth and host_memory; expected both or neither")
    device = cluster.device
    roofline = (device.bf16_products_flops_per_s, device.bf16_attention_flops_per_s)
    if len({each is None for each in (*roofline, device.traffic, device.compiled_traffic)}) > 1:
        raise InvalidInput(
            f"{file}: device has some of bf16_products, bf16_attention, traffic and compiled_traffic; expected all of "
            "them or none"
        )
    seen: set[tuple[int, ...]] = set()
    for index, group in enumerate(cluster.groups):
        if group.ranks[0] != 0 or group.ranks[-1] >= cluster.devices or group.ranks in seen:
            raise InvalidInput(
                f"{file}: groups[{index}].ranks is {list(group.ranks)}; expected a group of device 0 among "
                f"{cluster.devices} devices, each group once"
            )
        if (group.all_to_all_bytes_per_s is None) != (group.all_to_all_latency_s is None):
            raise InvalidInput(
                f"{file}: groups[{index}] has one of all_to_all and all_to_all_latency; expected both or neither"
            )
        seen.add(group.ranks)
    return cluster
