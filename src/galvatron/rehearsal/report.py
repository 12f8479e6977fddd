"""Rehearsals for people: predicted and measured side by side. Knows neither torch nor how they were made."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from galvatron.plans.plan import Plan
from galvatron.rehearsal.results import Rehearsal
from galvatron.units import format_bytes, format_seconds

__all__ = ["rehearsal_view"]


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
    if plan.space.conventions != "galvatron":
        lines.append("The plan predicts for the systems of the paper; what ran is this runtime.")
    return [Text(line, style="dim") for line in lines]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right")
    return table
