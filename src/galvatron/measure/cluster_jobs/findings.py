"""What a measured cluster is made of, before it becomes the planner's facts. No torch: the caller reads these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from galvatron.core.spec import ADAMW, Collective
from galvatron.measure.figures import Block

__all__ = [
    "MEASURED_OPTIMIZER",
    "ClusterFindings",
    "ClusterProbe",
    "DeviceFacts",
    "DeviceProbe",
    "GroupProbe",
    "TransferProbe",
]

MEASURED_OPTIMIZER = ADAMW
"""The one whose step is timed: what it moves in that time is the device's memory bandwidth, by which all are priced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupProbe:
    """A collective over all groups of one shape at once."""

    collective: Collective
    ranks: tuple[int, ...]
    """The group of rank 0."""
    message_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferProbe:
    """Devices send to the peer at this distance."""

    stride: int
    alone: bool
    """Only one device sends; else all that have a peer."""
    message_bytes: int


class DeviceProbe(StrEnum):
    """What one device does; all of them at once, unless it says otherwise."""

    FP32 = "fp32"
    BF16 = "bf16"
    TF32 = "tf32"
    FLOAT8 = "float8"
    """One product, scaled by rows, of as many operations as those of FP32 together."""
    ALONE = "alone"
    """The work of FP32 on rank 0 while the others wait; in seconds as if they did not."""
    OVERHEAD = "overhead"
    """Forward of a layer with next to no work."""
    OPTIMIZER = "optimizer"
    COMPUTE = "compute"
    COMMUNICATE = "communicate"
    OVERLAP = "overlap"
    """The last two at the same time."""
    EXCHANGE = "exchange"
    """Of tokens for heads, over all devices, in a group of their own."""
    SHARED = "shared"
    """The same while sums over all devices are on their way."""


ClusterProbe = GroupProbe | TransferProbe | DeviceProbe


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """What a device says about itself, and how much work the probes of it are."""

    name: str
    memory_bytes: int
    reserved_bytes: int
    layer_flops: int
    """Of one call of FP32, of BF16, of TF32 and of FLOAT8."""
    optimizer_parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFindings:
    """All that was measured."""

    devices: int
    per_node: int
    device: DeviceFacts
    backend: str
    contention: float
    """Threads of ranks for each core."""
    blocks: dict[ClusterProbe, list[Block]]
