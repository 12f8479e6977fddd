"""Clusters by name or from a TOML file (docs/clusters.md), and written back to one.

The table below is the file format: the reader, the writer and docs/cluster.schema.json all come from it. Knows ``spec``
and units; imports nothing heavy, as every plan starts with a cluster.
"""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path
from typing import Any

from galvatron.errors import InvalidInput
from galvatron.spec.cluster import Cluster, Device, Level
from galvatron.units import format_bytes
from galvatron.zoo.toml_fields import (
    Entry,
    Flag,
    Number,
    Place,
    Table,
    Tables,
    Text,
    Whole,
    bandwidth,
    compute_rate,
    duration,
    parse_toml,
    read_text,
    size,
)

__all__ = ["cluster_names", "cluster_schema", "dump_cluster", "load_cluster"]

_MOST_DEVICES = 2**20
_short_time = duration(least=0.0, most=1.0, expected="a time from 0 to 1s such as 20us or 0.2ms")

_DEVICE = Table(
    Device,
    (
        Entry("name", "name", Text(), "the accelerator's name"),
        Entry("memory", "memory_bytes", size("1MiB"), "memory of one device, such as 24GiB"),
        Entry("memory_bandwidth", "memory_bytes_per_s", bandwidth, "achieved bandwidth of that memory"),
        Entry("fp32", "fp32_flops_per_s", compute_rate, "achieved rate of a Transformer layer in fp32"),
        Entry("bf16", "bf16_flops_per_s", compute_rate, "achieved rate in bf16; left out where there is none"),
        Entry("layer_overhead", "layer_overhead_s", _short_time, "least time of a layer's forward, however small"),
    ),
)
_LEVEL = Table(
    Level,
    (
        Entry("name", "name", Text(), "what the level is, such as node"),
        Entry("units", "units", Whole(2, _MOST_DEVICES), "how many devices, or islands of the level before, it joins"),
        Entry("shared", "shared", Flag(), "true: a unit has one link, which its devices divide; false: a lane each"),
        Entry("bandwidth", "bytes_per_s", bandwidth, "bus bandwidth of a ring, of the shared link or of one lane"),
        Entry(
            "transfer_bandwidth",
            "transfer_bytes_per_s",
            bandwidth,
            "bandwidth from one device to another between pipeline stages; left out where it is that of a ring",
        ),
        Entry("latency", "latency_s", _short_time, "time of one step of a collective, however small the message"),
    ),
)
_CLUSTER = Table(
    Cluster,
    (
        Entry("name", "name", Text(), "the cluster's name"),
        Entry("source", "source", Text(shortest=0, longest=4000, lines=True), "where the figures come from"),
        Entry("reserved", "reserved_bytes", size("0B"), "memory a process needs besides tensors, such as 1GiB"),
        Entry(
            "overlap_slowdown",
            "overlap_slowdown",
            Number(1, 4),
            "factor by which computation and communication slow each other down while both run",
        ),
        Entry("device", "device", _DEVICE, "a [device] table: one accelerator"),
        Entry(
            "levels",
            "levels",
            Tables(_LEVEL, most=16),
            "[[levels]] tables, the innermost first; for a single device write levels = [] above [device]",
        ),
    ),
)


def cluster_names() -> tuple[str, ...]:
    """The clusters known by name."""
    files = resources.files(__package__).joinpath("clusters").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_cluster(source: str | Path) -> Cluster:
    """The cluster that ``source`` names: a preset, or a ``.toml`` file."""
    if Path(source).suffix == ".toml":
        return _read(read_text(Path(source), "a cluster"), str(source))
    names = cluster_names()
    if source in names:
        preset = resources.files(__package__).joinpath("clusters", f"{source}.toml")
        return _read(preset.read_text(encoding="utf-8"), f"{source}.toml")
    close = difflib.get_close_matches(str(source), names, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(names)}."
    raise InvalidInput(f"unknown cluster {str(source)!r}; {hint} The path of a .toml file will also do")


def dump_cluster(cluster: Cluster) -> str:
    """The cluster as a file that reads back equal; what no file may say (a bandwidth of zero) is refused here."""
    text = "\n".join(_CLUSTER.lines(cluster)) + "\n"
    _read(text, f"cluster {cluster.name!r}")
    return text


def cluster_schema() -> dict[str, Any]:
    """The file format as JSON schema, for editors; kept in docs/cluster.schema.json."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Cluster"} | _CLUSTER.schema()


def _read(text: str, file: str) -> Cluster:
    place = Place(file)
    cluster = _CLUSTER.read(parse_toml(text, place), place)
    if cluster.reserved_bytes >= cluster.device.memory_bytes:
        raise InvalidInput(
            f"{file}: reserved is {format_bytes(cluster.reserved_bytes)}, but device.memory is only "
            f"{format_bytes(cluster.device.memory_bytes)}; expected less, so that tensors have room"
        )
    if cluster.devices > _MOST_DEVICES:
        raise InvalidInput(f"{file}: levels join {cluster.devices} devices; expected at most {_MOST_DEVICES}")
    return cluster
