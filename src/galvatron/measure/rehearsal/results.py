"""Measured beside predicted, for programs and for people. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from galvatron.core.units import format_bytes, format_seconds
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.record import PlannedStage

__all__ = ["Measured", "Rehearsal", "rehearsal_view"]


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
    least_bytes: int | None = None
    """Least of the device's memory in which the allocator does not run short. None on the CPU."""
    compute_s: float
    """Forward and backward of all micro-batches: the median of the measured iterations."""
    optimizer_s: float

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_backward_bytes, self.optimizer_bytes)

    @property
    def lost(self) -> float:
        """Part of the least memory that the allocator cannot give away."""
        return 0.0 if self.least_bytes is None else max(0.0, 1 - self.peak_bytes / self.least_bytes)


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


def rehearsal_view(plan: Plan, rehearsals: Sequence[Rehearsal]) -> RenderableType:
    """Memory and time of each rehearsed rank."""
    device = rehearsals[0].device
    title = Text(plan.model.name, style="bold")
    title.append(
        f"  rank {', '.join(str(each.rank) for each in rehearsals)} of {plan.cluster.devices}, alone on {device}: "
        f"batch {plan.batch} = {plan.micro_batches} × {plan.micro_batch}, {plan.schedule}",
        style="default",
    )
    return Group(title, _memory(rehearsals), _times(rehearsals), *_notes(plan, rehearsals))


def _memory(rehearsals: Sequence[Rehearsal]) -> Table:
    parts = "states + activations + transient"
    table = _table("rank", "stage", "predicted peak", parts, "measured peak", "states", "predicted is")
    for each in rehearsals:
        use, found = each.planned.memory, each.measured
        table.add_row(
            str(each.rank),
            str(each.stage),
            format_bytes(each.predicted_bytes),
            " + ".join(format_bytes(size) for size in (use.states, use.activations, use.transient)),
            format_bytes(found.peak_bytes),
            format_bytes(found.state_bytes),
            Text(f"{each.memory_ratio - 1:+.1%}", style="" if each.memory_ratio > 0.95 else "bold red"),
        )
    return table


def _times(rehearsals: Sequence[Rehearsal]) -> Table:
    table = _table("rank", "stage", "predicted compute", "measured", "predicted optimizer step", "measured")
    for each in rehearsals:
        table.add_row(
            str(each.rank),
            str(each.stage),
            format_seconds(each.predicted_compute_s),
            format_seconds(each.measured.compute_s),
            format_seconds(each.planned.time.optimizer_s),
            format_seconds(each.measured.optimizer_s),
        )
    return table


def _notes(plan: Plan, rehearsals: Sequence[Rehearsal]) -> list[Text]:
    facts = plan.cluster.facts
    lines = [
        f"Peaks are of tensors; the plan keeps {format_bytes(facts.reserved_bytes)} for context and communication too. "
        f"Times are of an iteration without communication; predicted ones are for {facts.device.name}."
    ]
    taken = [each.measured.reserved_bytes for each in rehearsals if each.measured.reserved_bytes is not None]
    if taken:
        lines.append(f"The allocator took at most {format_bytes(max(taken))} from the device.")
    lines += [
        f"Rank {each.rank} still runs in {format_bytes(each.measured.least_bytes)}, {each.measured.lost:.1%} of it "
        "between tensors."
        for each in rehearsals
        if each.measured.least_bytes is not None
    ]
    if plan.space.conventions != "galvatron":
        lines.append("The plan predicts for the systems of the paper; what ran is this runtime.")
    return [Text(line, style="dim") for line in lines]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right")
    return table
