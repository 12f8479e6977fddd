"""A plan as a notebook shows it: a few lines of plain HTML, without scripts, in the notebook's own colours."""

from __future__ import annotations

from html import escape

from galvatron.core.units import format_bytes, format_seconds
from galvatron.planner.plan.record import PlannedStage, PlanRecord, layer_runs

__all__ = ["notebook_html"]


def notebook_html(plan: PlanRecord) -> str:
    """The plan's figures, and a line a stage."""
    facts = plan.cluster.facts
    head = (
        f"<b>{escape(plan.model.name)}</b> on {plan.cluster.devices} × {escape(facts.device.name)} "
        f"({escape(facts.name)}): <b>{plan.throughput:.2f} samples/s</b>, batch {plan.batch} = {plan.micro_batches} × "
        f"{plan.micro_batch}, iteration {format_seconds(plan.iteration_s)}, {escape(plan.schedule)}"
    )
    columns = ("stage", "devices", "layers and strategies", "memory")
    head_row = "".join(f"<th style='text-align:left'>{column}</th>" for column in columns)
    rows = "".join(_row(plan, number, stage) for number, stage in enumerate(plan.stages))
    proof = plan.certificate
    said = (
        "written by hand" if proof is None else f"{proof.proven} in the space {plan.space.name!r} (gap {proof.gap:g})"
    )
    return f"<div>{head}<table><thead><tr>{head_row}</tr></thead><tbody>{rows}</tbody></table>{escape(said)}</div>"


def _row(plan: PlanRecord, number: int, stage: PlannedStage) -> str:
    runs = ", ".join(f"{count} × {layer.layer} {layer.strategy}" for layer, count in layer_runs(stage.layers))
    share = stage.memory_bytes / plan.memory_budget_bytes
    used = f"{format_bytes(stage.memory_bytes)} of {format_bytes(plan.memory_budget_bytes)}"
    cells = (
        str(number),
        f"{stage.devices[0]}–{stage.devices[-1]}",
        escape(runs),
        f"<meter min='0' max='1' value='{share:.4f}'>{share:.0%}</meter> {used}",
    )
    return "<tr>" + "".join(f"<td style='text-align:left'>{cell}</td>" for cell in cells) + "</tr>"
