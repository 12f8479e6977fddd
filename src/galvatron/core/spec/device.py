"""One accelerator, as the planner sees it: how fast it computes, what it holds, what it costs. Facts only."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron.core.errors import InvalidInput, OutOfRange
from galvatron.core.spec.figures import check_facts
from galvatron.core.spec.training import Precision

__all__ = ["MOST_MEMORY_BYTES", "Device", "Roofline"]

MOST_MEMORY_BYTES = 2**43
"""Of one device, 8 TiB: less than what the search takes for more than any device has."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """What bounds the computation of a layer on a device."""

    products_flops_per_s: float
    """Of large matrix products."""
    attention_flops_per_s: float
    """Of a fused attention kernel's forward."""
    memory_bytes_per_s: float
    traffic: float
    """Bytes moved beside products, for each byte that a layer's forward saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    """Achieved bandwidth of its own memory: prices the optimizer step."""
    fp32_flops_per_s: float
    """Achieved (not peak) rate of a Transformer layer's forward in fp32."""
    bf16_flops_per_s: float | None = None
    """Achieved rate in bf16; None: the device has no bf16."""
    tf32_flops_per_s: float | None = None
    """Achieved rate with fp32 tensors and TF32 products; None: the device has none."""
    float8_flops_per_s: float | None = None
    """Achieved rate of products in float8, scaled by rows, without casting; None: the device has none."""
    bf16_products_flops_per_s: float | None = None
    """Rate of large matrix products in bf16. With the three that follow, layers that nobody measured are priced by a
    roofline in place of one rate: products, fused attention and memory traffic apart; None: there is one rate."""
    bf16_attention_flops_per_s: float | None = None
    """Rate of a fused attention kernel's forward in bf16."""
    traffic: float | None = None
    """Bytes that a layer's forward moves through memory beside its products, for each byte that it saves."""
    compiled_traffic: float | None = None
    """The same where blocks are compiled, which fuses operations."""
    layer_overhead_s: float = 0.0
    """Time a layer's forward takes however small its work: kernel launches, Python. Backward takes it twice. Launches
    run ahead of the device, so where there is a roofline it is the least time of a layer, not on top."""
    compiles: bool = True
    """Whether blocks are compiled for it where nobody says; not on processors, where that gains little."""
    fp32_peak_flops_per_s: float | None = None
    """The data sheet's rate, to show a plan's share of it; None: unknown. No price depends on it."""
    bf16_peak_flops_per_s: float | None = None
    host_bytes_per_s: float | None = None
    """Between its memory and the host's, each way; None: nobody knows, and nothing is offloaded."""
    host_memory_bytes: int | None = None
    """Its share of the host's memory, for what is offloaded."""
    price_per_hour: float | None = None
    """What an hour of it costs, in whatever currency; None: not said. Changes no plan."""
    power_w: float | None = None
    """What it draws while it trains, its share of the host included where that is known; None: not said."""

    def __post_init__(self) -> None:
        check_facts(self, f"device {self.name!r}")
        if not 1 <= self.memory_bytes <= MOST_MEMORY_BYTES:
            raise OutOfRange(
                f"device {self.name!r}: memory_bytes is {self.memory_bytes}; expected from 1 to {MOST_MEMORY_BYTES}"
            )

        for precision in (Precision.FP32, Precision.BF16):
            rate, peak = getattr(self, f"{precision}_flops_per_s"), self.peak_flops_per_s(precision)
            if peak is not None and rate is not None and 2 * peak < rate:  # a measured rate may be a bit above
                raise OutOfRange(
                    f"device {self.name!r}: {precision}_peak_flops_per_s is {peak:g}, of which its layers would reach "
                    f"{rate / peak:.0%}; expected the data sheet's rate"
                )

    def flops_per_s(self, precision: Precision) -> float:
        rates = {
            Precision.FP32: self.fp32_flops_per_s,
            Precision.TF32: self.tf32_flops_per_s,
            Precision.BF16: self.bf16_flops_per_s,
        }
        rate = rates[precision]
        if rate is None:
            raise InvalidInput(f"device {self.name!r} has no {precision} arithmetic; use --precision fp32")
        return rate

    def roofline(self, precision: Precision, *, compiled: bool) -> Roofline | None:
        """Products, fused attention and memory traffic apart; None: all that is known is one rate. TF32 has half the
        rates of bf16, as data sheets have it."""
        rates = self.bf16_products_flops_per_s, self.bf16_attention_flops_per_s
        traffic = self.compiled_traffic if compiled else self.traffic
        if rates[0] is None or rates[1] is None or traffic is None or precision is Precision.FP32:
            return None
        share = 0.5 if precision is Precision.TF32 else 1.0
        return Roofline(share * rates[0], share * rates[1], self.memory_bytes_per_s, traffic)

    def products_flops_per_s(self, precision: Precision) -> float:
        """The rate of matrix products: apart, or that of a layer."""
        roofline = self.roofline(precision, compiled=False)
        return self.flops_per_s(precision) if roofline is None else roofline.products_flops_per_s

    @property
    def offloads(self) -> bool:
        """Whether what is saved for backward can be kept on the host."""
        return self.host_bytes_per_s is not None and self.host_memory_bytes is not None

    def peak_flops_per_s(self, precision: Precision) -> float | None:
        """The data sheet's rate; None: unknown."""
        peaks = {Precision.FP32: self.fp32_peak_flops_per_s, Precision.BF16: self.bf16_peak_flops_per_s}
        return peaks.get(precision)

    @property
    def precision(self) -> Precision:
        """The arithmetic people train with on this device: bf16 where it exists."""
        return Precision.FP32 if self.bf16_flops_per_s is None else Precision.BF16
