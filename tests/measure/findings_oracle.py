"""Findings of a cluster whose constants are known: timings that follow from them, with no clock involved."""

from __future__ import annotations

from dataclasses import dataclass, field

from galvatron.core.spec import Collective
from galvatron.measure.cluster_jobs.findings import (
    ClusterFindings,
    ClusterProbe,
    DeviceFacts,
    DeviceProbe,
    GroupProbe,
    TransferProbe,
)
from galvatron.measure.figures import Block

SIZES = (1 << 14, 1 << 18, 1 << 22)


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What the timings are made from. All devices are bits of a rank's number."""

    devices: int = 4
    per_node: int = 4
    rings: dict[int, float] = field(default_factory=lambda: {1: 1e9, 2: 1e9, 4: 1e9})
    """Bytes a second along each stride; a ring is as fast as the slowest stride it takes."""
    latency_s: float = 2e-4
    transfers: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Bytes a second beside others and alone, by stride."""
    scatter_factor: float = 3.0
    """How many times slower a reduce-scatter is than an all-gather."""
    exchange_factor: float = 2.0
    """The same of an all-to-all."""
    fp32_flops_per_s: float = 1e12
    contention: float = 1.0
    overlap_slowdown: float = 1.25
    message_contention: float = 2.75
    backend: str = "gloo"

    def ring(self, ranks: tuple[int, ...]) -> float:
        return min(self.rings[stride] for stride in self.rings if any(rank & stride for rank in ranks))

    def slower(self, collective: Collective) -> float:
        """How many times slower a collective is than an all-gather."""
        factors = {Collective.REDUCE_SCATTER: self.scatter_factor, Collective.ALL_TO_ALL: self.exchange_factor}
        return factors.get(collective, 1.0)

    def seconds(self, probe: ClusterProbe) -> float:
        if isinstance(probe, GroupProbe):
            share = (len(probe.ranks) - 1) / len(probe.ranks)
            once = share * probe.message_bytes / self.ring(probe.ranks) + self.latency_s
            passes = 2 if probe.collective is Collective.ALL_REDUCE else 1
            return passes * once * self.slower(probe.collective)
        if isinstance(probe, TransferProbe):
            together, alone = self.transfers.get(probe.stride, (5e8, 5e8))
            return probe.message_bytes / (alone if probe.alone else together) + 1e-4
        return {
            DeviceProbe.FP32: 1e9 / self.fp32_flops_per_s,
            DeviceProbe.BF16: 1e9 / self.fp32_flops_per_s / 4,
            DeviceProbe.TF32: 1e9 / self.fp32_flops_per_s / 2,
            DeviceProbe.FLOAT8: 1e9 / self.fp32_flops_per_s / 8,
            DeviceProbe.ALONE: 1e9 / self.fp32_flops_per_s,
            DeviceProbe.OVERHEAD: 3e-4,
            DeviceProbe.OPTIMIZER: 28 * 1000 / 5e9,
            DeviceProbe.COMPUTE: 0.004,
            DeviceProbe.COMMUNICATE: 0.005,
            DeviceProbe.OVERLAP: 0.005 + (self.overlap_slowdown - 1) * 0.004,
            DeviceProbe.EXCHANGE: 0.002,
            DeviceProbe.SHARED: 0.002 * self.message_contention,
        }[probe]


def findings(truth: Truth) -> ClusterFindings:
    strides = [1 << bit for bit in range(truth.devices.bit_length() - 1)]
    groups = {tuple(sorted(sum(chosen) for chosen in _sums(strides, mask))) for mask in range(1, 1 << len(strides))}
    probes: list[ClusterProbe] = list(DeviceProbe)
    for ranks in sorted(groups):
        probes += [GroupProbe(collective=c, ranks=ranks, message_bytes=size) for c in Collective for size in SIZES]
    for stride in strides:
        for alone in (False, True):
            probes += [TransferProbe(stride=stride, alone=alone, message_bytes=size) for size in SIZES]
    return ClusterFindings(
        devices=truth.devices,
        per_node=truth.per_node,
        device=DeviceFacts(
            name="toy", memory_bytes=1 << 30, reserved_bytes=1 << 20, layer_flops=10**9, optimizer_parameters=1000
        ),
        backend=truth.backend,
        contention=truth.contention,
        blocks={probe: [Block((truth.seconds(probe),))] * 3 for probe in probes},
    )


def _sums(strides: list[int], mask: int) -> list[list[int]]:
    """Every choice of the strides in the mask."""
    chosen: list[list[int]] = [[]]
    for bit, stride in enumerate(strides):
        if mask >> bit & 1:
            chosen += [[*one, stride] for one in chosen]
    return chosen
