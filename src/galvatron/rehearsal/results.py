"""What a rehearsal found for a rank, beside what the plan says about its stage. Knows plans, not torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from galvatron.plans.plan import Plan, PlannedStage

__all__ = ["Measured", "Rehearsal"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one rank took for one iteration, communication left out."""

    state_bytes: int
    """Alive between backward and optimizer step: parameters, gradients, optimizer states, whatever else stays."""
    forward_backward_bytes: int
    """Peak over all micro-batches."""
    optimizer_bytes: int
    """Peak of the optimizer step."""
    reserved_bytes: int | None
    """Most the caching allocator took from the device: the peak, and what it could not reuse. None on the CPU."""
    compute_s: float
    """Forward and backward of all micro-batches: the median of the measured iterations."""
    optimizer_s: float

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_backward_bytes, self.optimizer_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """One rank of a plan: predicted and measured."""

    rank: int
    stage: int
    device: str
    """Kind of device it ran on."""
    planned: PlannedStage
    micro_batches: int
    measured: Measured

    @classmethod
    def of(cls, plan: Plan, rank: int, device: str, measured: Measured) -> Rehearsal:
        stage = next(number for number, stage in enumerate(plan.stages) if rank in stage.devices)
        return cls(
            rank=rank,
            stage=stage,
            device=device,
            planned=plan.stages[stage],
            micro_batches=plan.micro_batches,
            measured=measured,
        )

    @property
    def predicted_bytes(self) -> int:
        """Of tensors: what the plan reserves for context and communication is not part of a rehearsal."""
        return self.planned.memory_bytes - self.planned.memory.reserved

    @property
    def predicted_compute_s(self) -> float:
        """Forward and backward of all micro-batches."""
        return self.micro_batches * self.planned.time.compute_s

    @property
    def memory_ratio(self) -> float:
        """Predicted over measured peak: below one, the plan promises too much."""
        return self.predicted_bytes / self.measured.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "stage": self.stage,
            "device": self.device,
            "predicted": {
                "peak_bytes": self.predicted_bytes,
                **{f"{name}_bytes": size for name, size in asdict(self.planned.memory).items()},
                "compute_s": self.predicted_compute_s,
                "optimizer_s": self.planned.time.optimizer_s,
            },
            "measured": {"peak_bytes": self.measured.peak_bytes, **asdict(self.measured)},
            "memory_ratio": self.memory_ratio,
        }
