"""At the end of a run: what was predicted, what was measured, and what explains the difference. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from galvatron.core.units import format_bytes, format_seconds
from galvatron.measure.figures import NOISY, QUIET, quality_in
from galvatron.planner.plan.plan import Plan
from galvatron.planner.plan.record import PlannedStage

__all__ = ["RankTimes", "Report", "phases_line", "report_view"]

_WORTH_SAYING = 0.02
"""Parts of the difference below this share of the iteration are not listed."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Where an iteration of one rank went, in seconds (medians), and the most memory its tensors had."""

    work_s: float
    """Forward and backward of all micro-batches, with the collectives inside."""
    waiting_s: float
    """For the neighbouring stages."""
    data_s: float
    """For the next batch."""
    rest_s: float
    """After the last backward: sums of gradients, clipping, the optimizer's step."""
    memory_bytes: int
    """In iterations."""
    elsewhere_bytes: int = 0
    """While building, evaluating, comparing and saving, where it is known."""
    held_bytes: int = 0
    """That PyTorch's allocator had of a GPU in iterations: tensors, and what it kept besides."""
    shortages: int = 0
    """How often it ran short in iterations but the first, gave back what it kept and asked again."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage, the slowest and the fullest of its ranks."""

    stage: int
    predicted: RankTimes
    measured: RankTimes
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run."""

    steps: int
    first_loss: float
    last_loss: float
    predicted_s: float
    measured_s: float
    """Median of the iterations that neither saved nor evaluated."""
    samples_per_s: float
    stages: tuple[StageReport, ...]
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the run, from the command to its end."""
    disturbed: float = 0.0
    """The part of the machine's cores that other programs had while it trained."""

    @classmethod
    def of(
        cls, plan: Plan, ranks: Sequence[RankTimes], iteration_s: float, losses: Sequence[float], steps: int
    ) -> Report:
        stages = []
        for number, stage in enumerate(plan.stages):
            own = [ranks[rank] for rank in stage.devices]
            slowest = max(own, key=lambda times: times.work_s)
            most = {
                name: max(getattr(times, name) for times in own)
                for name in ("memory_bytes", "elsewhere_bytes", "held_bytes", "shortages")
            }
            measured = replace(slowest, **most)
            stages.append(StageReport(number, _predicted(plan, stage), measured, plan.memory_budget_bytes))
        return cls(steps, losses[0], losses[-1], plan.iteration_s, iteration_s, plan.batch / iteration_s, tuple(stages))

    @property
    def difference(self) -> float:
        """Measured over predicted, less one."""
        return self.measured_s / self.predicted_s - 1

    @property
    def compared(self) -> str:
        """The difference, for people; that of a run among others says nothing about the plan."""
        if self.disturbed > QUIET and self.difference > QUIET:
            return f"the machine was busy: other programs had {self.disturbed:.0%} of its cores"
        return f"{self.difference:+.1%}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference, "explanation": list(explanation(self))}


def _predicted(plan: Plan, stage: PlannedStage) -> RankTimes:
    """The plan's figures in the same parts. What a stage neither works nor does once an iteration it waits.

    Devices that share cores are faster while others wait; a stage's figures are for all of them at work, so they are
    scaled to what fits into the iteration.
    """
    use, count = stage.time, plan.micro_batches
    faster = min(1.0, plan.iteration_s / max(count * each.time_s for each in plan.stages))
    work_s = faster * count * (use.compute_s + use.tp_s + use.ep_s + use.cp_s + use.sdp_s + use.layout_s)
    rest_s = faster * (use.sync_s + use.optimizer_s)
    waiting_s = max(0.0, plan.iteration_s - work_s - rest_s) if plan.pipeline_degree > 1 else 0.0
    return RankTimes(work_s, waiting_s, 0.0, rest_s, stage.memory_bytes - stage.memory.reserved)


def explanation(report: Report) -> Iterator[str]:
    """What makes up the difference in the stage that works most, the largest part first."""
    slowest = max(report.stages, key=lambda stage: stage.measured.work_s)
    measured, predicted = slowest.measured, slowest.predicted
    parts = {
        "forward and backward": measured.work_s - predicted.work_s,
        "waiting for neighbouring stages": measured.waiting_s - predicted.waiting_s,
        "waiting for data": measured.data_s,
        "gradient sums, clipping and the optimizer's step": measured.rest_s - predicted.rest_s,
    }
    total = report.measured_s - report.predicted_s
    parts["everything else"] = total - sum(parts.values())
    for name, seconds in sorted(parts.items(), key=lambda part: -abs(part[1])):
        if abs(seconds) > _WORTH_SAYING * report.measured_s:
            sign = "+" if seconds > 0 else "−"
            yield f"{name}: {sign}{format_seconds(abs(seconds))} (stage {slowest.stage})"


def report_view(plan: Plan, report: Report) -> RenderableType:
    """Predicted and measured, as people see it at the end of a run."""
    title = Text("predicted and measured", style="bold")
    title.append(
        f"  iteration {format_seconds(report.predicted_s)} predicted, {format_seconds(report.measured_s)} measured "
        f"({report.compared}); {report.samples_per_s:.1f} samples/s; "
        f"loss {report.first_loss:.4f} → {report.last_loss:.4f} in {report.steps} steps",
        style="default",
    )
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    columns = ("stage", "forward and backward", "waiting", "data", "sums and optimizer", "peak memory of tensors")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for stage in report.stages:
        predicted, measured = stage.predicted, stage.measured
        memory = f"{format_bytes(predicted.memory_bytes)} → {format_bytes(measured.memory_bytes)}"
        if measured.memory_bytes:
            memory += f" ({measured.memory_bytes / predicted.memory_bytes - 1:+.1%})"
        table.add_row(
            str(stage.stage),
            _pair(predicted.work_s, measured.work_s),
            _pair(predicted.waiting_s, measured.waiting_s),
            format_seconds(measured.data_s),
            _pair(predicted.rest_s, measured.rest_s),
            memory,
        )
    lines = [Text(f"the difference: {line}", style="dim") for line in explanation(report)]
    lines += [Text(line, style="dim") for line in (*_held(plan, report), *_noisy(plan))]
    return Group(title, table, *lines, Text(phases_line(report.phases), style="dim"))


def _held(plan: Plan, report: Report) -> Iterator[str]:
    """What the allocator took besides tensors, beside what was left to it."""
    fullest = max((stage.measured for stage in report.stages), key=lambda measured: measured.held_bytes)
    if fullest.held_bytes and fullest.memory_bytes:
        left = plan.cluster.facts.allocator_bytes(plan.memory_budget_bytes)
        lost = fullest.held_bytes - fullest.memory_bytes
        yield (
            f"PyTorch's allocator held {format_bytes(fullest.held_bytes)}, {format_bytes(lost)} "
            f"({lost / fullest.held_bytes:.1%}) of them beside tensors; the plan left it {format_bytes(left)}"
        )
    shortages = max(stage.measured.shortages for stage in report.stages)
    if shortages:
        yield (
            f"it ran short of memory {shortages} times after the first step, and each time waited for the GPU to give "
            "back what it kept; plan with less --memory"
        )


def _noisy(plan: Plan) -> Iterator[str]:
    """Whether what the prediction was made of was measured on a busy machine."""
    for what, source in (("links", plan.cluster.facts.source), ("layers", plan.profile.source if plan.profile else "")):
        quality = quality_in(source)
        if quality is not None and quality.spread > NOISY:
            yield f"{what} were measured while the machine was busy ({quality}); measure again with --fresh"


def phases_line(phases: Mapping[str, float]) -> str:
    """Where the run's time went."""
    parts = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in phases.items())
    return f"{format_seconds(sum(phases.values()))} in all: {parts}"


def _pair(predicted_s: float, measured_s: float) -> str:
    return f"{format_seconds(predicted_s)} → {format_seconds(measured_s)}"
