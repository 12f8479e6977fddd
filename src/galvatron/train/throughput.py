"""How fast training is: samples and tokens a second, and the share of the devices' peak that the model's own operations
make up (recompute not counted)."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron.plans.plan import Plan
from galvatron.spec import Precision

__all__ = ["Throughput", "peak_flops_per_s"]

_PEAKS = {
    "H200": (67e12, 989e12),
    "H100": (67e12, 989e12),
    "A100": (19.5e12, 312e12),
    "L4": (30.3e12, 121e12),
    "RTX 4090": (82.6e12, 165e12),
    "TITAN RTX": (16.3e12, 16.3e12),
}
"""Dense peaks in fp32 (without TF32) and bf16 from the makers' data sheets, by a part of the device's name."""


def peak_flops_per_s(device_name: str, precision: Precision) -> float | None:
    """A device's peak, where its name is known."""
    for name, (fp32, bf16) in _PEAKS.items():
        if name in device_name:
            return fp32 if precision is Precision.FP32 else bf16
    return None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Figures of one iteration."""

    samples_per_s: float
    tokens_per_s: float | None
    """None for models without tokens."""
    peak_share: float | None
    """None where the device's peak is not known."""

    @classmethod
    def of(cls, plan: Plan, iteration_s: float, device_name: str) -> Throughput:
        samples_per_s = plan.batch / iteration_s
        length = plan.model.training.sequence_length or (plan.model.config or {}).get("max_position_embeddings")
        spec = plan.model.spec()
        peak = peak_flops_per_s(device_name, plan.model.training.precision)
        return cls(
            samples_per_s=samples_per_s,
            tokens_per_s=samples_per_s * length if length else None,
            peak_share=3 * spec.forward_flops * samples_per_s / (plan.cluster.devices * peak) if peak else None,
        )
