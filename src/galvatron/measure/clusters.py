"""``profile_cluster``: the devices and links of the machines at hand, measured, as the planner's facts.

Needs no torch in the caller's process; the ranks that measure are processes of their own, or those of torchrun.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from galvatron.core.errors import InvalidInput
from galvatron.core.files.clusters import dump_cluster
from galvatron.core.spec import Cluster, Collective, Device, Factor, Level, MeasuredGroup, degree_of
from galvatron.families import load_cluster
from galvatron.measure import cache
from galvatron.measure.cache import provenance
from galvatron.measure.cluster_jobs.findings import (
    MEASURED_OPTIMIZER,
    ClusterFindings,
    ClusterProbe,
    DeviceProbe,
    GroupProbe,
    TransferProbe,
)
from galvatron.measure.cluster_jobs.job import ClusterJob
from galvatron.measure.cluster_jobs.shapes import factors_of, islands
from galvatron.measure.figures import NOISY, Line, Quality, Reading, fit_line, quality_of, reading_of
from galvatron.processes.helper import measured, under_torchrun
from galvatron.processes.job import Progress
from galvatron.processes.virtual import virtual_devices

__all__ = ["cluster_of", "profile_cluster"]

_LOG = logging.getLogger(__name__)
_FRAGMENTATION = 0.06
"""Of a GPU's memory: with segments that grow, PyTorch's allocator was seen to hold up to 5.8% more than predicted."""
_HARDLY = 1.1
"""Contention up to this is noise: devices with hardware of their own."""
_CLEARLY = 1.5
"""Factor by which a transfer alone must be faster than beside others for their link to be a shared one."""
_MOST_SLOWDOWN, _MOST_CONTENTION = 4.0, 8.0
_FASTEST, _SLOWEST = 1e15, 1e6
"""Bytes or operations a second that a cluster file can say."""


def profile_cluster(
    devices: int | None = None, *, fresh: bool = False, rounds: int = 6, progress: Progress | None = None
) -> Cluster:
    """Measure this machine's devices and links, or all machines' under torchrun.

    ``devices``: how many; None: all GPUs, or one process for each core where there is none. What was measured before
    under the same circumstances is taken from the cache, unless it is to be ``fresh``.
    """
    if devices is not None and devices < 1:
        raise InvalidInput(f"devices: {devices} given; expected at least 1")
    if rounds < 2:
        raise InvalidInput(f"rounds: {rounds} given; expected at least 2, so that they can be compared")
    kept = _kept_file(devices or virtual_devices(), rounds)
    # Under torchrun machines might differ in what they have kept, and wait for each other for ever.
    if kept.exists() and not fresh and not under_torchrun():
        known = load_cluster(kept)
        cache.warn_if_noisy(known.source)
        return known
    findings = measured(ClusterJob(devices=devices, rounds=rounds), progress)
    assert isinstance(findings, ClusterFindings)
    cluster = cluster_of(findings)
    for file in (kept, _kept_file(cluster.devices, rounds)):  # all devices, or as many as it turned out that there are
        cache.keep(file, dump_cluster(cluster))
    return cluster


def _kept_file(devices: int | None, rounds: int) -> Path:
    return cache.cached_file("cluster", cache.key_of(devices=devices, rounds=rounds))


def cluster_of(findings: ClusterFindings) -> Cluster:
    """The planner's facts from what was measured."""
    readings = {probe: reading_of(blocks) for probe, blocks in findings.blocks.items()}
    quality = quality_of(readings.values(), max(len(blocks) for blocks in findings.blocks.values()))
    if quality.spread > NOISY:
        _LOG.warning("the machine was busy with other things while it was measured: %s; measure again", quality)
    lines = _lines(readings)
    return Cluster(
        name=f"{findings.devices}-{'gpus' if findings.backend == 'nccl' else 'processes'}",
        device=_device(findings, readings),
        levels=_levels(findings, lines),
        reserved_bytes=findings.device.reserved_bytes,
        fragmentation=_FRAGMENTATION if findings.backend == "nccl" else 0.0,
        overlap_slowdown=_slowdown(readings),
        compute_contention=_contention(findings, readings),
        message_contention=_message_contention(readings),
        groups=_groups(lines),
        source=_source(findings, quality),
    )


def _source(findings: ClusterFindings, quality: Quality) -> str:
    return provenance(f"{findings.devices} × {findings.device.name}, {findings.backend}", quality)


Shape = tuple[Collective, tuple[int, ...]] | tuple[int, bool]


def _lines(readings: Mapping[ClusterProbe, Reading]) -> dict[Shape, Line]:
    """Time over message size, for each collective and group, and for each distance of transfers."""
    points: dict[Shape, list[tuple[float, float]]] = {}
    for probe, reading in readings.items():
        if isinstance(probe, GroupProbe):
            points.setdefault((probe.collective, probe.ranks), []).append((probe.message_bytes, reading.seconds))
        elif isinstance(probe, TransferProbe):
            points.setdefault((probe.stride, probe.alone), []).append((probe.message_bytes, reading.seconds))
    return {shape: _link_line(known) for shape, known in points.items()}


def _link_line(points: Sequence[tuple[float, float]]) -> Line:
    """No link is free: where noise hides what larger messages take longer, they take all of their time for their
    bytes, besides the latency: at most twice too much, never nothing."""
    line, (message_bytes, seconds) = fit_line(points), max(points)
    return line if line.slope > 0 else Line(line.fixed, seconds / message_bytes)


def _device(findings: ClusterFindings, readings: Mapping[ClusterProbe, Reading]) -> Device:
    facts = findings.device
    bf16, tf32, float8 = map(readings.get, (DeviceProbe.BF16, DeviceProbe.TF32, DeviceProbe.FLOAT8))
    return Device(
        name=facts.name,
        memory_bytes=facts.memory_bytes,
        memory_bytes_per_s=_rate(
            MEASURED_OPTIMIZER.traffic_bytes * facts.optimizer_parameters, readings[DeviceProbe.OPTIMIZER].seconds
        ),
        fp32_flops_per_s=_rate(facts.layer_flops, readings[DeviceProbe.FP32].seconds),
        bf16_flops_per_s=_rate(facts.layer_flops, bf16.seconds) if bf16 else None,
        tf32_flops_per_s=_rate(facts.layer_flops, tf32.seconds) if tf32 else None,
        float8_flops_per_s=_rate(facts.layer_flops, float8.seconds) if float8 else None,
        layer_overhead_s=_rounded(min(readings[DeviceProbe.OVERHEAD].seconds, 1.0)),
        compiles=findings.backend == "nccl",
    )


def _contention(findings: ClusterFindings, readings: Mapping[ClusterProbe, Reading]) -> float:
    """Threads for each core, and what they take from each other besides: caches, memory."""
    alone = readings.get(DeviceProbe.ALONE)
    if alone is None:
        return 1.0
    factor = findings.contention * max(1.0, readings[DeviceProbe.FP32].seconds / alone.seconds)
    return _rounded(factor) if factor > _HARDLY else 1.0


def _slowdown(readings: Mapping[ClusterProbe, Reading]) -> float:
    """The paper's one factor for both: together they take max + (σ − 1)·min."""
    if DeviceProbe.OVERLAP not in readings:
        return 1.0
    shorter, longer = sorted(readings[probe].seconds for probe in (DeviceProbe.COMPUTE, DeviceProbe.COMMUNICATE))
    factor = 1 + (readings[DeviceProbe.OVERLAP].seconds - longer) / shorter
    return _rounded(min(max(factor, 1.0), _MOST_SLOWDOWN))


def _message_contention(readings: Mapping[ClusterProbe, Reading]) -> float:
    """By how much sums on their way slow an exchange down."""
    if DeviceProbe.SHARED not in readings:
        return Cluster.message_contention
    factor = readings[DeviceProbe.SHARED].seconds / readings[DeviceProbe.EXCHANGE].seconds
    return _rounded(min(max(factor, 1.0), _MOST_CONTENTION))


def _groups(lines: Mapping[Shape, Line]) -> tuple[MeasuredGroup, ...]:
    shapes = dict.fromkeys(shape[1] for shape in lines if isinstance(shape[1], tuple))
    return tuple(MeasuredGroup(ranks=ranks, **_figures(ranks, lines)) for ranks in shapes)


def _figures(ranks: tuple[int, ...], lines: Mapping[Shape, Line]) -> dict[str, float]:
    """By the conventions of a link: bus bandwidth, and the latency of a pass, of which an all-reduce makes two."""
    share, figures = (len(ranks) - 1) / len(ranks), {}
    for collective in Collective:
        line = lines[collective, ranks]
        passes = 2 if collective is Collective.ALL_REDUCE else 1
        figures[f"{collective}_bytes_per_s"] = _rate(passes * share, line.slope)
        figures[f"{collective}_latency_s"] = _rounded(line.fixed / passes)
    return figures


def _rate(amount: float, slope: float) -> float:
    return _rounded(min(max(amount / slope, _SLOWEST), _FASTEST)) if slope > 0 else _FASTEST


def _rounded(value: float) -> float:
    """To three digits: what was measured is no better, and people read it."""
    return float(f"{value:.3g}")


def _levels(findings: ClusterFindings, lines: Mapping[Shape, Line]) -> tuple[Level, ...]:
    """Islands by what neighbours along each factor of the rank get."""
    if findings.devices == 1:
        return ()
    factors = factors_of(findings.devices)
    pairs = {factor.stride: _figures(_neighbours(factor), lines) for factor in factors}
    rings = {stride: figures["all_reduce_bytes_per_s"] for stride, figures in pairs.items()}
    levels, unit_size = [], 1
    for number, level in enumerate(islands(factors, rings, findings.per_node)):
        outer = level[-1].stride
        together, alone = (_rate(1.0, lines[outer, only].slope) for only in (False, True))
        shared = unit_size > 1 and alone / together > _CLEARLY
        share = unit_size if shared else 1
        leaves_node = level[0].stride >= findings.per_node
        levels.append(
            Level(
                name="cluster" if leaves_node else "node" if number == 0 else f"level {number + 1}",
                units=degree_of(level),
                bytes_per_s=min(rings[outer] * share, _FASTEST),
                latency_s=min(pairs[level[0].stride]["all_reduce_latency_s"], 1.0),
                transfer_bytes_per_s=min(together * share, _FASTEST),
                shared=shared,
            )
        )
        unit_size *= degree_of(level)
    return tuple(levels)


def _neighbours(factor: Factor) -> tuple[int, ...]:
    return tuple(factor.stride * value for value in range(factor.size))
